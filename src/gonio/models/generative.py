"""Small generative and recurrent models, each one module whose outputs a task's loss and metric read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from gonio.errors import UnknownNameError
from gonio.models.sizes import sized

_PIXELS, _NOISE_SEED = 64, 0


class Gan(nn.Module):
    """A generator and a discriminator of images of 8 × 8, trained together by the non-saturating loss.

    The outputs are three logits and an image: the discriminator on the input, on a generated image without a gradient
    to the generator, and on the same image without a gradient to the discriminator. So one optimizer trains both. In
    evaluation mode the generated images are those of a fixed noise.

    Shape: :math:`(N, 1, 8, 8)` → :math:`(N, 3 + 64)`.

    References: I. Goodfellow et al., "Generative adversarial networks", arXiv 1406.2661, §3.

    Example:
        >>> model = gonio.models.digits_gan(width=16).eval()
        >>> x = torch.zeros(2, 1, 8, 8)
        >>> model(x).shape, torch.equal(model(x), model(x))
        (torch.Size([2, 67]), True)
    """

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.code = code
        self.generator = nn.Sequential(
            nn.Linear(code, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _PIXELS),
            nn.Sigmoid(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(_PIXELS, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        made = self.generator(noise(self, x))
        fixed = {name: value.detach() for name, value in self.discriminator.named_parameters()}
        logits = (
            self.discriminator(x.flatten(1)),
            self.discriminator(made.detach()),
            functional_call(self.discriminator, fixed, (made,)),
        )
        return torch.cat([*logits, made], 1)


class Vae(nn.Module):
    """A variational autoencoder of images of 8 × 8: logits of the pixels, mean and log variance of the code.

    In evaluation mode the code is drawn with a fixed noise.

    Shape: :math:`(N, 1, 8, 8)` → :math:`(N, 64 + 2 k)` for a code of k numbers.

    References: D. P. Kingma and M. Welling, "Auto-encoding variational Bayes", arXiv 1312.6114, §3.

    Example:
        >>> gonio.models.digits_vae(width=16)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 80])
    """

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.code = code
        self.encoder = nn.Sequential(
            nn.Linear(_PIXELS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _PIXELS)
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, 1)
        drawn = mean + (log_variance / 2).exp() * noise(self, x)
        return torch.cat([self.decoder(drawn), mean, log_variance], 1)


def noise(model: Gan | Vae, x: Tensor) -> Tensor:
    """Standard normal codes, the same on every device; in evaluation mode always the same ones."""
    draw = torch.default_generator if model.training else torch.Generator().manual_seed(_NOISE_SEED)
    return torch.randn(len(x), model.code, generator=draw).to(x)


class ByteGru(nn.Module):
    """A gated recurrent network over bytes, with a norm of both products of each step, or none.

    Shape: :math:`(N, L)` integers below 256 → :math:`(N, L, 256)` logits of the byte after each position.

    References: K. Cho et al., "Learning phrase representations", arXiv 1406.1078, §2.3; with norms as in J. L. Ba et
        al., "Layer normalization", arXiv 1607.06450, appendix.

    Example:
        >>> model = gonio.models.byte_gru(width=8, norm="layer")
        >>> first, second = model(torch.tensor([[1, 2, 3], [1, 2, 9]]))
        >>> (first - second).abs().amax(-1) < 1e-5  # causal
        tensor([ True,  True, False])
    """

    def __init__(self, vocabulary: int, width: int, norm: str) -> None:
        super().__init__()
        made = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        if norm not in made:
            raise UnknownNameError("norm", norm, made)
        self.width = width
        self.embed = nn.Embedding(vocabulary, width)
        self.input, self.recurrent = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.input_norm, self.recurrent_norm = (made[norm](3 * width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        products = self.input(self.embed(x))
        state, states = products.new_zeros(len(x), self.width), []
        for product in products.unbind(1):
            update, reset, new = self.input_norm(product).chunk(3, 1)
            update_of, reset_of, new_of = self.recurrent_norm(self.recurrent(state)).chunk(3, 1)
            gate = torch.sigmoid(update + update_of)
            candidate = torch.tanh(new + torch.sigmoid(reset + reset_of) * new_of)
            state = gate * state + (1 - gate) * candidate
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


@sized
def digits_gan(*, width: int = 128, code: int = 16) -> nn.Module:
    """A :class:`Gan` for images of 8 × 8.

    Example:
        >>> sum(p.numel() for p in gonio.models.digits_gan().parameters())
        51905
    """
    return Gan(width, code)


@sized
def digits_vae(*, width: int = 128, code: int = 8) -> nn.Module:
    """A :class:`Vae` for images of 8 × 8.

    Example:
        >>> sum(p.numel() for p in gonio.models.digits_vae().parameters())
        52816
    """
    return Vae(width, code)


@sized
def byte_gru(num_classes: int = 256, *, width: int = 64, norm: str = "none") -> nn.Module:
    """A :class:`ByteGru` with a norm of `none`, `layer` or `batch`.

    Raises:
        UnknownNameError: another norm.

    Example:
        >>> sum(p.numel() for p in gonio.models.byte_gru().parameters())
        57984
    """
    return ByteGru(num_classes, width, norm)


def gan_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Non-saturating loss of generator and discriminator together, from the outputs of :class:`Gan`."""
    real, made, fooled = outputs[:, :3].unbind(1)
    return (F.softplus(-real) + F.softplus(made) + F.softplus(-fooled)).mean()


def negative_elbo(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Mean negative evidence lower bound in nats per image, from the outputs of :class:`Vae`.

    :math:`-\log p(x | z) + \tfrac12 \sum (\mu^2 + \sigma^2 - \log \sigma^2 - 1)`, with grey values as probabilities.
    """
    pixels, code = outputs[:, :_PIXELS], outputs[:, _PIXELS:]
    mean, log_variance = code.chunk(2, 1)
    fit = F.binary_cross_entropy_with_logits(pixels, targets.flatten(1), reduction="none").sum(1)
    prior = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1)
    return (fit + prior).mean()
