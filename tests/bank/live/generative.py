"""Models that generate and normalise in their own ways: diffusion, GANs, flows, Lipschitz and equivariant layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from bank.live.case import Case, Made
from catalog import seeded
from surgery.net import Net


def image(channels: int = 3, size: int = 8) -> Tensor:
    return seeded(2, channels, size, size)


def vectors(features: int = 8, batch: int = 4) -> Tensor:
    return seeded(batch, features)


# --- diffusion ------------------------------------------------------------------------------------------


class TimeBlock(nn.Module):
    """A residual block with group norms and a scale and shift from the time embedding."""

    def __init__(self, channels: int, time: int, *, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(time, 2 * channels if scaled else channels)
        self.norm2, self.conv2 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.scaled = scaled

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        t = self.time_emb_proj(F.silu(time))[:, :, None, None]
        if self.scaled:
            scale, shift = t.chunk(2, dim=1)
            y = self.norm2(y) * (1 + scale) + shift
        else:
            y = self.norm2(y + t)
        return x + self.conv2(F.silu(y))


class UNet(nn.Module):
    """Down, attention, up with a skip; sinusoidal times."""

    def __init__(self, *, scaled: bool = False, zero_out: bool = False) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.time_mlp = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down = TimeBlock(8, 16, scaled=scaled)
        self.downsample = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.mid = TimeBlock(8, 16, scaled=scaled)
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.0)])
        self.up = TimeBlock(16, 16, scaled=scaled)
        self.norm_out, self.conv_out = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1)
        if zero_out:
            nn.init.zeros_(self.conv_out.weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None].to(x) * torch.exp(-torch.arange(4, device=x.device).to(x))
        t = self.time_mlp(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.conv_in(x)
        h = self.mid(self.downsample(self.down(x, t)), t)
        tokens = h.flatten(2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens))
        h = h + self.to_out[1](self.to_out[0](mixed)).transpose(1, 2).reshape(h.shape)
        h = self.up(torch.cat([x, F.interpolate(h, scale_factor=2.0)], 1), t)
        return self.conv_out(F.silu(self.norm_out(h)))


class AdaLNZero(nn.Module):
    """A DiT block: modulation by a layer that starts at 0."""

    def __init__(self, dim: int = 8, *, zero: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        if zero:
            nn.init.zeros_(self.modulation[1].weight)
            nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, d, e, h = self.modulation(c).chunk(6, dim=1)
        y = self.norm1(x) * (1 + a[:, None]) + b[:, None]
        x = x + g[:, None] * self.attn(y, y, y, need_weights=False)[0]
        return x + h[:, None] * self.mlp(self.norm2(x) * (1 + d[:, None]) + e[:, None])


class VectorQuantiser(nn.Module):
    """An autoencoder with a codebook whose nearest rows are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.codebook = nn.Embedding(16, 8)
        self.decoder = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(z.reshape(-1, 8), self.codebook.weight).argmin(1)
        return self.decoder(self.codebook(nearest).view(z.shape).permute(0, 3, 1, 2))


DIFFUSION = [
    Case("UNet with added times", "diffusion", lambda: (UNet(), (image(), torch.tensor([3, 7])))),
    Case("UNet with scales and shifts", "diffusion", lambda: (UNet(scaled=True), (image(), torch.tensor([3, 7])))),
    Case(
        "UNet with a last layer of 0",
        "diffusion",
        lambda: (UNet(zero_out=True), (image(), torch.tensor([1, 2]))),
        findings=("G407",),
    ),
    Case("DiT block, AdaLN-Zero", "diffusion", lambda: (AdaLNZero(), (seeded(2, 5, 8), seeded(2, 8)))),
    Case("DiT block, free modulation", "diffusion", lambda: (AdaLNZero(zero=False), (seeded(2, 5, 8), seeded(2, 8)))),
    Case("VQ autoencoder", "diffusion", lambda: (VectorQuantiser(), image())),
]

# --- GANs -----------------------------------------------------------------------------------------------


class ModulatedConv(nn.Module):
    """StyleGAN2's convolution: a weight of five axes, scaled by the style and demodulated."""

    def __init__(self, style: int, channels_in: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, channels, channels_in, 3, 3))
        self.modulation = EqualLinear(style, channels_in, bias=1.0)
        self.scale = 1 / math.sqrt(channels_in * 9)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        weight = self.scale * self.weight * self.modulation(style).view(batch, 1, channels, 1, 1)
        weight = weight * torch.rsqrt(weight.square().sum([2, 3, 4], keepdim=True) + 1e-8)
        y = F.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=1, groups=batch)
        return y.view(batch, -1, height, width)


class EqualLinear(nn.Module):
    """A weight of standard normal entries that the forward scales."""

    def __init__(self, features_in: int, features: int, bias: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features_in))
        self.bias = nn.Parameter(torch.full((features,), bias))
        self.scale = 1 / math.sqrt(features_in)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class StyleGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Sequential(EqualLinear(8, 8), nn.LeakyReLU(0.2), EqualLinear(8, 8))
        self.constant = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.conv1, self.conv2 = ModulatedConv(8, 8, 8), ModulatedConv(8, 8, 8)
        self.noise = nn.Parameter(torch.zeros(1))
        self.register_buffer("blur", torch.tensor([1.0, 3.0, 3.0, 1.0]).outer(torch.tensor([1.0, 3.0, 3.0, 1.0])) / 64)
        self.to_rgb = nn.Conv2d(8, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        w = self.style(z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8))
        x = F.leaky_relu(self.conv1(self.constant.expand(len(z), -1, -1, -1), w), 0.2)
        x = x + self.noise * torch.ones_like(x[:, :1])
        x = F.conv2d(F.pad(x, (2, 1, 2, 1)), self.blur.expand(8, 1, 4, 4), groups=8)
        return self.to_rgb(F.leaky_relu(self.conv2(x, w), 0.2))


def dcgan_generator() -> Made:
    layers = [nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)]
    layers += [nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh())
    return model.apply(_dcgan), seeded(2, 8, 1, 1)


def _dcgan(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def spectral_critic(norm: Callable[..., nn.Module]) -> Callable[[], Made]:
    def make() -> Made:
        layers = [norm(nn.Conv2d(3, 8, 3, padding=1)), nn.LeakyReLU(0.1), norm(nn.Conv2d(8, 8, 4, 2, 1))]
        return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Flatten(), norm(nn.Linear(128, 1))), image()

    return make


def patch_critic() -> Made:
    layers = [nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 16, 4, 2, 1, bias=False)]
    layers += [nn.InstanceNorm2d(16), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 1, 2)]
    return nn.Sequential(*layers), image()


class ConditionalNorm(nn.Module):
    """BigGAN's: a batch norm without an affine map, gains and biases from a table."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels, affine=False)
        self.gain, self.shift = nn.Embedding(classes, channels), nn.Embedding(classes, channels)
        nn.init.ones_(self.gain.weight)
        nn.init.zeros_(self.shift.weight)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.bn(x) * self.gain(label)[:, :, None, None] + self.shift(label)[:, :, None, None]


def conditional_generator() -> Made:
    def compute(m: Any, z: Tensor, label: Tensor) -> Tensor:
        x = m.fc(z).view(-1, 8, 4, 4)
        return torch.tanh(m.conv2(F.relu(m.norm(m.conv1(x), label))))

    conv1, conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    model = Conditioned(compute, fc=nn.Linear(8, 128), conv1=conv1, norm=ConditionalNorm(8, 3), conv2=conv2)
    return model, (vectors(batch=2), torch.tensor([0, 2]))


class Conditioned(Net):
    """A net of two inputs."""

    def forward(self, x: Tensor, condition: Tensor) -> Any:
        return self.compute(self, x, condition)


GANS = [
    Case("StyleGAN2 generator", "GAN", lambda: (StyleGenerator(), vectors()), quick=True),
    Case("DCGAN generator", "GAN", dcgan_generator, quick=True),
    Case("critic, parametrizations.spectral_norm", "GAN", spectral_critic(parametrizations.spectral_norm)),
    Case("critic, old spectral_norm", "GAN", spectral_critic(torch.nn.utils.spectral_norm)),
    Case("PatchGAN critic, instance norm", "GAN", patch_critic),
    Case("conditional batch norm", "GAN", conditional_generator),
]

# --- flows ----------------------------------------------------------------------------------------------


class ActNorm(nn.Module):
    """A scale and shift that the first batch sets; it normalises nothing after that."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.shift) * self.scale


class InvertibleConv(nn.Module):
    """Glow's 1×1 convolution, which starts as a rotation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight[:, :, None, None])


class LUConv(nn.Module):
    """The same in its LU form: fixed permutation and signs as buffers, triangles as parameters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.register_buffer("p", p)
        self.register_buffer("sign", upper.diagonal().sign())
        self.log_s = nn.Parameter(upper.diagonal().abs().log())
        self.l, self.u = nn.Parameter(lower), nn.Parameter(upper.triu(1))

    def forward(self, x: Tensor) -> Tensor:
        lower = self.l.tril(-1) + torch.eye(len(self.l)).to(self.l)
        weight = self.p @ lower @ (self.u.triu(1) + torch.diag(self.sign * self.log_s.exp()))
        return F.conv2d(x, weight[:, :, None, None])


class Coupling(nn.Module):
    """An affine coupling whose last layer starts at 0."""

    def __init__(self, channels: int, *, zero: bool = True) -> None:
        super().__init__()
        half = channels // 2
        last = nn.Conv2d(8, channels, 3, padding=1)
        if zero:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Conv2d(half, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), last)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        scale, shift = self.net(a).chunk(2, dim=1)
        return torch.cat([a, b * torch.sigmoid(scale + 2) + shift], 1)


class MaskedLinear(nn.Linear):
    """MADE's layer: a weight times a fixed mask."""

    def __init__(self, features_in: int, features: int) -> None:
        super().__init__(features_in, features)
        self.register_buffer("mask", torch.ones(features, features_in).tril())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


FLOWS = [
    Case(
        "Glow step", "flow", lambda: (nn.Sequential(ActNorm(4), InvertibleConv(4), Coupling(4)), image(4)), quick=True
    ),
    Case(
        "Glow step, LU form",
        "flow",
        lambda: (nn.Sequential(ActNorm(4), LUConv(4), Coupling(4, zero=False)), image(4)),
    ),
    Case(
        "ActNorm between convolutions",
        "flow",
        lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), ActNorm(4), nn.ReLU(), nn.Conv2d(4, 4, 3)), image()),
    ),
    Case(
        "masked autoregressive",
        "flow",
        lambda: (nn.Sequential(MaskedLinear(8, 8), nn.ReLU(), MaskedLinear(8, 8)), vectors()),
        quick=True,
    ),
]

# --- Lipschitz and orthogonal layers ----------------------------------------------------------------------


class Bjorck(nn.Module):
    """Two steps towards the nearest orthogonal matrix."""

    def forward(self, weight: Tensor) -> Tensor:
        w = weight.flatten(1) / weight.flatten(1).norm()
        for _ in range(2):
            w = 1.5 * w - 0.5 * w @ w.T @ w
        return w.view(weight.shape)


class Skew(nn.Module):
    """A square weight as the exponential of its skew part (geotorch's SO)."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.matrix_exp(weight.triu(1) - weight.triu(1).T)


class LowRank(nn.Module):
    """Two factors in the place of one weight."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :2] * s[:2], v[:2]


class Grown(nn.Module):
    """Another shape than that of the trained tensor."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.view(6, 8)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.flatten()


def constrained(part: Callable[[], nn.Module], size: int = 8, *, unsafe: bool = False) -> Callable[[], Made]:
    def make() -> Made:
        layer = parametrize.register_parametrization(nn.Linear(8, size), "weight", part(), unsafe=unsafe)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(size, 3)), vectors()

    return make


class SpectralDense(nn.Linear):
    """torchlip's: the forward divides the weight by its largest singular value, by a kept vector."""

    def __init__(self, features_in: int, features: int) -> None:
        super().__init__(features_in, features)
        self.register_buffer("u", torch.ones(features) / features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        v = F.normalize(self.weight.T @ self.u, dim=0)
        return F.linear(x, self.weight / (self.weight @ v).norm(), self.bias)


class GroupSort(nn.Module):
    """Sorts pairs of features."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).sort(dim=2).values.flatten(1, 2)


LIPSCHITZ = [
    Case("Björck in the forward of a parametrization", "Lipschitz", constrained(Bjorck)),
    Case("exponential of a skew matrix", "Lipschitz", constrained(Skew, unsafe=False)),
    Case("two factors", "Lipschitz", constrained(LowRank), findings=("G201",)),
    Case("a parametrization of another shape", "Lipschitz", constrained(Grown, 6, unsafe=True)),
    Case("torch's orthogonal", "Lipschitz", lambda: _with(parametrizations.orthogonal)),
    Case("torch's weight_norm", "Lipschitz", lambda: _with(parametrizations.weight_norm)),
    Case(
        "spectral dense and GroupSort",
        "Lipschitz",
        lambda: (nn.Sequential(SpectralDense(8, 8), GroupSort(), SpectralDense(8, 2)), vectors()),
        quick=True,
    ),
]


def _with(norm: Callable[..., nn.Module]) -> Made:
    layers = [norm(nn.Linear(8, 8)), nn.ReLU(), norm(nn.Linear(8, 6)), nn.BatchNorm1d(6)]
    return nn.Sequential(*layers), vectors()


# --- equivariant layers -----------------------------------------------------------------------------------


class FlatLinear(nn.Module):
    """e3nn's: all weights in one vector, used block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * 4 + 2 * 2))

    def forward(self, x: Tensor) -> Tensor:
        scalars, rest = x[:, :4], x[:, 4:].unflatten(1, (2, 3))
        mixed = torch.einsum("uw,bui->bwi", self.weight[16:].view(2, 2), rest) / 2**0.5
        return torch.cat([scalars @ self.weight[:16].view(4, 4) / 2, mixed.flatten(1)], 1)


class TensorProduct(nn.Module):
    """Weights of three axes (in, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 6) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bu,bv,uvw->bw", x, x, self.weight)


EQUIVARIANT = [
    Case("flat weights by irreps", "equivariant", lambda: (FlatLinear(), vectors(10)), quick=True),
    Case(
        "tensor product, then linear",
        "equivariant",
        lambda: (nn.Sequential(TensorProduct(), nn.Linear(6, 3)), vectors(4)),
    ),
    Case("bilinear", "equivariant", lambda: (Conditioned(_bilinear, b=nn.Bilinear(4, 5, 3)), (vectors(4), vectors(5)))),
]


def _bilinear(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.b(x, y)


CASES = [*DIFFUSION, *GANS, *FLOWS, *LIPSCHITZ, *EQUIVARIANT]
