"""Models whose structure or names mislead: sharing, second reads, wrappers, unusual tensors, norms by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from bank.live.case import Case, Made
from bank.live.generative import image, vectors
from bank.live.sequences import frames
from catalog import seeded
from surgery.net import Net

Compute = Callable[[Any, Tensor], Any]


def net(compute: Compute, x: Callable[[], Tensor] = vectors, **layers: Callable[[], nn.Module]) -> Callable[[], Made]:
    return lambda: (Net(compute, **{name: layer() for name, layer in layers.items()}), x())


def linear(a: int = 8, b: int = 8, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(a, b, **options)


def conv(a: int = 3, b: int = 8, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(a, b, 3, padding=1, **options)


def norm(channels: int = 8) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm2d(channels)


def tokens() -> Tensor:
    return torch.arange(10).view(2, 5) % 7


# --- weights used twice ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.relu(self.fc(self.embed(ids))))


def universal() -> Made:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3)), vectors()


def shared_parameter() -> Made:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    return nn.Sequential(a, nn.ReLU(), b, nn.BatchNorm1d(8)), vectors()


class OtherRead(nn.Module):
    """Reads the weight of a layer that is kept in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.held = [self.a]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.b(F.relu(self.a(x)))), self.held[0].weight)


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) + m.bn(m.conv(x.flip(-1)))


def _siamese(m: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2)
    return (m.fc2(F.relu(m.fc1(a))) - m.fc2(F.relu(m.fc1(b)))).abs()


def _autoencoder(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.relu(m.encoder(x)), m.encoder.weight.t())


def _weight_in_output(m: Any, x: Tensor) -> Any:
    return m.b(F.relu(m.a(x))), m.a.weight.norm()


def _conv_by_name(m: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(F.relu(m.bn(m.conv(x))), dict(m.named_parameters())["conv.weight"], padding=1)


def _bias_twice(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) + m.conv.bias.view(1, -1, 1, 1)


def _norm_scale_twice(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) * m.bn.weight.view(1, -1, 1, 1)


def _statistics_twice(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) + m.bn.running_mean.view(1, -1, 1, 1)


TWICE = [
    Case("tied embeddings", "sharing", lambda: (Tied(), tokens()), quick=True),
    Case("a layer that runs twice", "sharing", universal, quick=True),
    Case("one Parameter in two layers", "sharing", shared_parameter),
    Case("siamese halves", "sharing", net(_siamese, fc1=linear(), fc2=linear())),
    Case(
        "convolution and norm that run twice", "sharing", net(_twice, image, conv=conv(), bn=norm()), findings=("G404",)
    ),
    Case("transposed decoder", "second read", net(_autoencoder, encoder=linear()), quick=True),
    Case("weight of a layer in a plain list", "second read", lambda: (OtherRead(), vectors()), quick=True),
    Case("norm of a weight as output", "second read", net(_weight_in_output, a=linear(), b=linear())),
    Case("weight by its name", "second read", net(_conv_by_name, image, conv=conv(), bn=norm())),
    Case("bias read again", "second read", net(_bias_twice, image, conv=conv(), bn=norm())),
    Case("scale of a norm read again", "second read", net(_norm_scale_twice, image, conv=conv(), bn=norm())),
    Case("statistics read again", "second read", net(_statistics_twice, image, conv=conv(), bn=norm())),
]

# --- axes -----------------------------------------------------------------------------------------------


def _norm_after(m: Any, x: Tensor) -> Tensor:
    return m.fc2(F.relu(m.bn(m.fc(x))))


def _transposed(m: Any, x: Tensor) -> Tensor:
    return m.fc2(F.relu(m.bn(m.fc(x).transpose(1, 2)).transpose(1, 2)))


def _permuted(m: Any, x: Tensor) -> Tensor:
    return m.fc(F.relu(m.conv(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _flattened(m: Any, x: Tensor) -> Tensor:
    return m.fc(F.relu(m.conv(x)).flatten(2)).sum(1)


def _mixer(m: Any, x: Tensor) -> Tensor:
    y = m.channels(F.relu(m.tokens(x.transpose(1, 2))).transpose(1, 2))
    return m.fc(F.relu(y))


def _squeeze(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.conv(x))
    return m.conv2(y * torch.sigmoid(m.fc2(F.relu(m.fc1(y.mean((2, 3))))))[:, :, None, None])


def _shuffle(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.conv(x))
    b, c, h, w = y.shape
    return m.conv2(y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w))


def _pixel_shuffle(m: Any, x: Tensor) -> Tensor:
    return m.conv2(F.pixel_shuffle(F.relu(m.conv(x)), 2))


def _concatenated(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.conv(x))
    return m.conv2(torch.cat([y, F.relu(m.bn(m.conv3(y)))], 1))


def _split(m: Any, x: Tensor) -> Tensor:
    a, b = F.relu(m.conv(x)).chunk(2, 1)
    return m.conv2(torch.cat([b, a], 1))


def _scaled(m: Any, x: Tensor) -> Tensor:
    return m.fc2(m.gamma(F.relu(m.fc1(x))))


class Vector(nn.Module):
    """A vector of scales (LayerScale)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def bn1(n: int) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm1d(n)


AXES = [
    Case("batch norm over tokens, C = L", "axes", net(_norm_after, lambda: frames(8), fc=linear(), bn=bn1(8), fc2=linear()), quick=True),
    Case("batch norm over tokens, C ≠ L", "axes", net(_norm_after, lambda: frames(5), fc=linear(), bn=bn1(5), fc2=linear())),
    Case("batch norm between transposes", "axes", net(_transposed, lambda: frames(8), fc=linear(), bn=bn1(8), fc2=linear())),
    Case("linear layer on the last axis of images", "axes", net(_permuted, lambda: image(3), conv=conv(), fc=linear())),
    Case("linear layer over positions", "axes", net(_flattened, lambda: image(3), conv=conv(), fc=linear(64, 4))),
    Case("mixer", "axes", net(_mixer, lambda: frames(8), tokens=linear(), channels=linear(), fc=linear())),
    Case("squeeze and excitation", "axes", net(_squeeze, image, conv=conv(), fc1=linear(8, 4), fc2=linear(4, 8), conv2=conv(8, 4))),
    Case("channel shuffle", "axes", net(_shuffle, image, conv=conv(), conv2=conv(8, 8, groups=2)), quick=True),
    Case("pixel shuffle", "axes", net(_pixel_shuffle, image, conv=conv(), conv2=conv(2, 4))),
    Case("concatenation", "axes", net(_concatenated, image, conv=conv(), conv3=conv(8, 8, bias=False), bn=norm(), conv2=conv(16, 4))),
    Case("halves that change places", "axes", net(_split, image, conv=conv(), conv2=conv(8, 4))),
    Case("layer scale", "axes", net(_scaled, fc1=linear(), gamma=Vector, fc2=linear())),
]  # fmt: skip

# --- wrappers -------------------------------------------------------------------------------------------


class Forwarding(nn.Module):
    """Every attribute that it lacks is that of its inner module; the output is doubled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class AnswersNone(nn.Linear):
    """Answers None for every unknown name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("weight", "bias"):  # not registered yet
                raise
            return None


class Hidden(nn.Module):
    """Layers in a plain list and in a dict, which the model does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.hidden = [nn.Linear(8, 8).double()]
        self.table = {"last": nn.Linear(8, 3).double()}

    def forward(self, x: Tensor) -> Tensor:
        return self.table["last"].to(x.dtype)(F.relu(self.hidden[0].to(x.dtype)(F.relu(self.first(x)))))


class Subclassed(nn.Conv2d):
    """A convolution that standardises its weight in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)


class Equalised(nn.Linear):
    """A linear layer that doubles its weight by `weight` being a property of the class."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


class ConvThenNorm(nn.Conv2d):
    """detectron2's convolution: norm and activation inside."""

    def __init__(self, *args: Any, norm: nn.Module, activation: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(super().forward(x))
        return y if self.activation is None else self.activation(y)


class Frozen(nn.Module):
    """A batch norm whose numbers are all buffers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((n,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


def hooked() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[2].register_forward_hook(double_output)
    return model, vectors()


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def bound() -> Made:
    """A forward that was replaced on the object."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].forward = Halved(model[0])
    return model, vectors()


class Halved:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight) / 2


def branching(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(F.relu(y)) if y.sum() > -1e9 else m.b(y)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += 1
    return m.conv2(m.bn(y).relu_())


def frozen_half() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model[0].requires_grad_(False)
    return model, image()


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: m.b(F.relu(m.a(y))), x, use_reentrant=False)


WRAPPERS = [
    Case("forwarding wrapper", "wrapper", lambda: (nn.Sequential(nn.Linear(8, 8), Forwarding(nn.Linear(8, 8))), vectors()), quick=True),
    Case("forwarding wrapper of a whole model", "wrapper", lambda: (Forwarding(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))), vectors())),
    Case("layer that answers None", "wrapper", lambda: (nn.Sequential(AnswersNone(8, 8), nn.ReLU(), AnswersNone(8, 3)), vectors())),
    Case("layers in a list and a dict", "wrapper", lambda: (Hidden(), vectors()), quick=True),
    Case("weight standardised in the forward", "subclass", lambda: (nn.Sequential(Subclassed(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)), image())),
    Case("weight doubled in the forward", "subclass", lambda: (nn.Sequential(Equalised(8, 8), nn.ReLU(), Equalised(8, 3), nn.BatchNorm1d(3)), vectors())),
    Case("norm inside of a convolution", "subclass", lambda: (nn.Sequential(ConvThenNorm(3, 8, 3, norm=nn.BatchNorm2d(8), activation=F.relu), nn.Conv2d(8, 4, 3)), image())),
    Case("frozen batch norm", "subclass", lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), Frozen(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), image())),
    Case("forward hook that doubles", "subclass", hooked, quick=True),
    Case("forward of the object", "subclass", bound),
    Case("branches on values", "control flow", net(branching, a=linear(), b=linear())),
    Case("changes in place", "control flow", net(in_place, image, conv=conv(), bn=norm(), conv2=conv(8, 4))),
    Case("checkpointed", "control flow", net(checkpointed, a=linear(), b=linear())),
    Case("frozen first layer", "control flow", frozen_half),
]  # fmt: skip

# --- norms by name, activations by name -----------------------------------------------------------------


class EvoNormB0(nn.Module):
    """Divides by the larger of a batch deviation and an affine function of the instance's."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.v = nn.Parameter(torch.ones(n))
        self.register_buffer("running_var", torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        var = x.var((0, 2, 3)) if self.training else self.running_var
        instance = (x.var((2, 3), keepdim=True) + 1e-5).sqrt()
        down = torch.maximum((var + 1e-5).sqrt().view(shape), self.v.view(shape) * x + instance)
        return x / down * self.weight.view(shape) + self.bias.view(shape)


class EvoNormS0(nn.Module):
    """Swish over a group deviation."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.v = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(1, (2, -1))
        std = (groups.var((2, 3, 4), keepdim=True) + 1e-5).sqrt().expand(groups.shape).flatten(1, 2)
        y = x * torch.sigmoid(self.v.view(1, -1, 1, 1) * x) / std
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class NoiseNorm(nn.Module):
    """Its name says norm; it adds a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1


class FilterResponseNorm(nn.Module):
    """Divides by the mean square of a channel, then a threshold that is learned."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, n, 1, 1)), nn.Parameter(torch.zeros(1, n, 1, 1))
        self.tau = nn.Parameter(torch.zeros(1, n, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        return torch.maximum(self.gamma * y + self.beta, self.tau)


class ReLU(nn.Module):
    """Named as torch's; it is a sine."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class PixelNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


class OwnBatchNorm(nn.BatchNorm2d):
    """A subclass that also applies a nonlinearity."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class GRN(nn.Module):
    """ConvNeXt V2's response normalisation, which starts as the identity."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(1, 1, 1, n)), nn.Parameter(torch.zeros(1, 1, 1, n))

    def forward(self, x: Tensor) -> Tensor:
        g = x.norm(dim=(1, 2), keepdim=True)
        return self.gamma * (x * g / (g.mean(-1, keepdim=True) + 1e-6)) + self.beta + x


def with_norm(make: Callable[[], nn.Module]) -> Callable[[], Made]:
    def build() -> Made:
        return nn.Sequential(nn.Conv2d(3, 8, 3), make(), nn.ReLU(), nn.Conv2d(8, 4, 3)), image()

    return build


NORMS = [
    Case("EvoNorm B0", "norms", with_norm(lambda: EvoNormB0(8)), quick=True),
    Case("EvoNorm S0", "norms", with_norm(lambda: EvoNormS0(8))),
    Case("a norm that normalises nothing", "norms", with_norm(NoiseNorm)),
    Case("filter response norm", "norms", with_norm(lambda: FilterResponseNorm(8))),
    Case("pixel norm", "norms", with_norm(PixelNorm)),
    Case("batch norm with a nonlinearity", "norms", with_norm(lambda: OwnBatchNorm(8))),
    Case("response norm on the last axis", "norms", lambda: (nn.Sequential(nn.Linear(8, 8), GRN(8), nn.ReLU(), nn.Linear(8, 4)), seeded(2, 3, 3, 8))),
    Case("layer norm over images", "norms", with_norm(lambda: nn.LayerNorm((8, 6, 6)))),
    Case("RMS norm over images", "norms", with_norm(lambda: nn.RMSNorm((8, 6, 6)))),
    Case("instance norm with statistics", "norms", with_norm(lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True))),
    Case("batch norm without statistics", "norms", with_norm(lambda: nn.BatchNorm2d(8, track_running_stats=False))),
    Case("batch norm without an affine map", "norms", with_norm(lambda: nn.BatchNorm2d(8, affine=False))),
    Case("local response norm", "norms", with_norm(lambda: nn.LocalResponseNorm(3))),
    Case("a class ReLU that is a sine", "norms", lambda: (nn.Sequential(nn.Linear(8, 8), ReLU(), nn.Linear(8, 3)), vectors())),
    Case("PReLU per channel", "norms", lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 3)), image())),
]  # fmt: skip

# --- unusual tensors ------------------------------------------------------------------------------------


class ComplexLinear(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(b, a, dtype=torch.complex128) / a**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight.T


class ComplexReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x.real.relu(), x.imag.relu())


def complex_linear() -> Made:
    layers = [nn.Linear(8, 8, dtype=torch.complex128), ComplexReLU(), nn.Linear(8, 3, dtype=torch.complex128)]
    return Net(lambda m, x: m.layers(x.to(torch.complex128)).abs(), layers=nn.Sequential(*layers)), vectors()


class Fourier(nn.Module):
    """A Fourier neural operator's layer: complex weights per frequency."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex128) / channels)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :3].to(self.weight.dtype), self.weight)
        return F.gelu(torch.fft.irfft(modes, x.shape[-1]).to(x) + self.skip(x))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that its sparse formats are a beta
            self.weight = nn.Parameter(torch.eye(8).add(torch.eye(8).roll(1, 0)).to_sparse())
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sparse.mm(self.weight.to(x.dtype), x.T).T)


class Scalar(nn.Module):
    """Parameters without and with one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.fc = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.temperature + self.empty.sum()


class StateBag(nn.Linear):
    """Extra state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def lazy() -> Made:
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)), image()


def pruned() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.random_unstructured(model[0], "weight", 0.3)
    return model, vectors()


def embedding_bag() -> Made:
    return nn.Sequential(nn.EmbeddingBag(7, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), tokens()


def max_norm() -> Made:
    return nn.Sequential(nn.Embedding(7, 8, padding_idx=0, max_norm=1.0), nn.Linear(8, 3)), tokens()


def transformer() -> Made:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), frames(5)


def adaptive() -> Made:
    model = Net(
        lambda m, x: m.softmax.log_prob(m.fc(x)),
        fc=nn.Linear(8, 16),
        softmax=nn.AdaptiveLogSoftmaxWithLoss(16, 12, [4, 8]),
    )
    return model, vectors()


TENSORS = [
    Case("complex linear layers", "tensors", complex_linear, quick=True),
    Case("own complex layers", "tensors", lambda: (Net(lambda m, x: m.b(m.a(x)).abs(), a=ComplexLinear(8, 8), b=ComplexLinear(8, 3)), vectors())),
    Case("Fourier operator", "tensors", lambda: (Fourier(), seeded(2, 4, 10))),
    Case("sparse weight", "tensors", lambda: (Sparse(), vectors()), quick=True),
    Case("scalar and empty parameters", "tensors", lambda: (Scalar(), vectors())),
    Case("extra state that is a dict", "tensors", lambda: (nn.Sequential(StateBag(8, 8), nn.ReLU(), StateBag(8, 3)), vectors())),
    Case("lazy layers", "tensors", lazy, quick=True),
    Case("pruned", "tensors", pruned),
    Case("embedding bag", "tensors", embedding_bag),
    Case("embedding with max_norm", "tensors", max_norm),
    Case("torch's encoder layer", "tensors", transformer),
    Case("adaptive softmax", "tensors", adaptive),
    Case("single linear layer", "tensors", lambda: (nn.Linear(8, 3), vectors())),
    Case("no parameters", "tensors", lambda: (nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)), image())),
    Case("one filter", "tensors", lambda: (nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Conv2d(1, 1, 1)), image(1))),
    Case("three dimensions", "tensors", lambda: (nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2)), seeded(2, 1, 5, 5, 5))),
]  # fmt: skip

CASES = [*TWICE, *AXES, *WRAPPERS, *NORMS, *TENSORS]
