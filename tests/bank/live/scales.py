"""What lies between two layers: functions that scale passes, functions that it does not, and folds of every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bank.live.case import Case, Made
from bank.live.generative import image, vectors
from bank.live.sequences import frames
from catalog import seeded
from surgery.net import Net

Between = Callable[[Any, Tensor], Tensor]


class Chain(nn.Module):
    """Two linear layers with a function between them, which may read parameters of the model."""

    def __init__(self, between: Between, wide: int = 8, features: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, wide), nn.Linear(features, 3)
        self.gain, self.position = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(features))
        self.register_buffer("mask", (torch.arange(features) % 3 > 0).float())
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x)))


def linear(between: Between, wide: int = 8, features: int = 8) -> Callable[[], Made]:
    return lambda: (Chain(between, wide, features), vectors())


class Maps(nn.Module):
    """Two convolutions with a function between them."""

    def __init__(self, between: Between, features: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(features, 4, 3, padding=1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x)))


def maps(between: Between, features: int = 8) -> Callable[[], Made]:
    return lambda: (Maps(between, features), image())


LINEAR: dict[str, tuple[Between, int, int]] = {
    "relu": (lambda m, x: torch.relu(x), 8, 8),
    "ReLU6": (lambda m, x: F.relu6(x), 8, 8),
    "squared relu": (lambda m, x: F.relu(x).square(), 8, 8),
    "power": (lambda m, x: F.relu(x) ** 2, 8, 8),
    "absolute value": (lambda m, x: x.abs(), 8, 8),
    "clamp from below": (lambda m, x: x.clamp(min=0), 8, 8),
    "clamp from above": (lambda m, x: x.clamp(max=1), 8, 8),
    "product with a sign": (lambda m, x: x * (x > 0), 8, 8),
    "where": (lambda m, x: torch.where(x > 0, x, 0.1 * x), 8, 8),
    "where with a constant": (lambda m, x: torch.where(x > 0, x, torch.ones_like(x)), 8, 8),
    "maximum with a constant": (lambda m, x: torch.maximum(x, torch.full_like(x, 0.1)), 8, 8),
    "maxout": (lambda m, x: torch.maximum(*x.chunk(2, -1)), 16, 8),
    "GLU": (lambda m, x: F.glu(x), 16, 8),
    "bilinear gate": (lambda m, x: x[:, :8] * x[:, 8:], 16, 8),
    "reglu": (lambda m, x: F.relu(x[:, :8]) * x[:, 8:], 16, 8),
    "softmax": (lambda m, x: x.softmax(-1), 8, 8),
    "F.normalize": (lambda m, x: F.normalize(F.relu(x)), 8, 8),
    "division by the norm": (lambda m, x: F.relu(x) / (x.norm(dim=-1, keepdim=True) + 1e-6), 8, 8),
    "division by the mean": (lambda m, x: F.relu(x) / (F.relu(x).mean() + 0.1), 8, 8),
    "sum with a constant": (lambda m, x: F.relu(x) + 1, 8, 8),
    "sum with a parameter": (lambda m, x: F.relu(x) + m.position, 8, 8),
    "product with a parameter": (lambda m, x: F.relu(x) * m.position, 8, 8),
    "product with a scalar parameter": (lambda m, x: F.relu(x) * m.gain, 8, 8),
    "product with a mask": (lambda m, x: F.relu(x) * m.mask, 8, 8),
    "constant column": (lambda m, x: torch.cat([F.relu(x[:, :7]), torch.ones_like(x[:, :1])], 1), 8, 8),
    "padding by ones": (lambda m, x: F.pad(F.relu(x[:, 1:]), (0, 1), value=1.0), 8, 8),
    "roll": (lambda m, x: F.relu(x).roll(1, -1), 8, 8),
    "flip": (lambda m, x: F.relu(x).flip(-1), 8, 8),
    "chosen columns": (lambda m, x: F.relu(x)[:, [1, 0, 2, 3, 4, 5, 6, 7]], 8, 8),
    "sorted columns": (lambda m, x: F.relu(x).sort(-1).values, 8, 8),
    "running sum": (lambda m, x: F.relu(x).cumsum(-1), 8, 8),
    "mean of pairs": (lambda m, x: F.relu(x).unflatten(-1, (8, 2)).mean(-1), 16, 8),
    "max over pairs": (lambda m, x: F.relu(x).unflatten(-1, (8, 2)).amax(-1), 16, 8),
    "in place": (lambda m, x: F.relu_(x.mul_(2)), 8, 8),
    "residual": (lambda m, x: F.relu(x) + x, 8, 8),
    "detached": (lambda m, x: F.relu(x).detach() + F.relu(x), 8, 8),
    "matrix product with itself": (lambda m, x: F.relu(x) @ F.relu(x).T @ F.relu(x), 8, 8),
    "straight through": (lambda m, x: x + (x.sign() - x).detach(), 8, 8),
    "argmax": (lambda m, x: F.one_hot(x.argmax(-1), 8).to(x) * F.relu(x), 8, 8),
    "top 3": (lambda m, x: torch.zeros_like(x).scatter(-1, x.topk(3).indices, F.relu(x).topk(3).values), 8, 8),
    "quantised": (lambda m, x: (F.relu(x) * 16).round() / 16, 8, 8),
    "cast": (lambda m, x: F.relu(x).float().to(x.dtype), 8, 8),
    "RReLU": (lambda m, x: F.rrelu(x, training=m.training), 8, 8),
    "hard tanh": (lambda m, x: F.hardtanh(x), 8, 8),
    "logarithm": (lambda m, x: F.relu(x).log1p(), 8, 8),
    "root": (lambda m, x: (F.relu(x) + 1e-3).sqrt(), 8, 8),
    "clone": (lambda m, x: F.relu(x.clone()).contiguous(), 8, 8),
    "einsum": (lambda m, x: torch.einsum("bi->bi", F.relu(x)), 8, 8),
    "outer view": (lambda m, x: F.relu(x).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8), 8, 8),
    "batch mean taken off": (lambda m, x: F.relu(x) - F.relu(x).mean(0), 8, 8),
    "batch rolled": (lambda m, x: F.relu(x).roll(1, 0), 8, 8),
    "threshold": (lambda m, x: F.threshold(x, 0.0, 0.5), 8, 8),
    "CELU": (lambda m, x: F.celu(x), 8, 8),
}
MAPS: dict[str, tuple[Between, int]] = {
    "max pooling": (lambda m, x: F.max_pool2d(F.relu(x), 2), 8),
    "adaptive pooling": (lambda m, x: F.adaptive_max_pool2d(F.relu(x), 4), 8),
    "power pooling": (lambda m, x: F.lp_pool2d(F.relu(x), 2, 2), 8),
    "interpolation": (lambda m, x: F.interpolate(F.relu(x), scale_factor=2, mode="bilinear"), 8),
    "reflected padding": (lambda m, x: F.pad(F.relu(x), (1, 1, 1, 1), mode="reflect"), 8),
    "padding by a value": (lambda m, x: F.pad(F.relu(x), (1, 1, 1, 1), value=0.5), 8),
    "channels padded": (lambda m, x: F.pad(F.relu(x), (0, 0, 0, 0, 0, 4)), 12),
    "channels repeated": (lambda m, x: F.relu(x).repeat(1, 2, 1, 1), 16),
    "channels interleaved": (lambda m, x: F.relu(x).repeat_interleave(2, 1), 16),
    "channels by strides": (lambda m, x: torch.cat([F.relu(x)[:, ::2], F.relu(x)[:, 1::2]], 1), 8),
    "concatenated ReLU": (lambda m, x: torch.cat([F.relu(x), F.relu(-x)], 1), 16),
    "shifted channels": (lambda m, x: torch.cat([F.relu(x)[:, :4].roll(1, 2), F.relu(x)[:, 4:]], 1), 8),
    "local contrast": (lambda m, x: F.local_response_norm(F.relu(x), 3), 8),
    "global response": (lambda m, x: F.relu(x) * F.relu(x).mean((2, 3), keepdim=True), 8),
    "mean added": (lambda m, x: F.relu(x) + F.relu(x).mean(1, keepdim=True), 8),
    "unfolded": (lambda m, x: F.fold(F.unfold(F.relu(x), 3, padding=1), (8, 8), 3, padding=1), 8),
    "space to depth": (lambda m, x: F.pixel_unshuffle(F.relu(x), 2), 32),
    "batch statistics": (lambda m, x: F.batch_norm(x, None, None, training=True), 8),
    "blur": (lambda m, x: F.conv2d(F.relu(x), torch.ones(8, 1, 3, 3).to(x) / 9, padding=1, groups=8), 8),
}
BETWEEN = [
    *(Case(f"between linear layers: {name}", "between layers", linear(*row)) for name, row in LINEAR.items()),
    *(Case(f"between convolutions: {name}", "between layers", maps(*row)) for name, row in MAPS.items()),
]

# --- folds ----------------------------------------------------------------------------------------------


def then(layer: Callable[[], nn.Module], norm: Callable[[], nn.Module], *shape: int) -> Callable[[], Made]:
    return lambda: (nn.Sequential(layer(), norm(), nn.ReLU()), seeded(*shape))


def two_norms(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn1(y) + m.bn2(y)


def dropped(m: Any, x: Tensor) -> Tensor:
    return m.bn1(F.dropout(m.conv(x), 0.1, m.training))


def shared_norm(m: Any, x: Tensor) -> Tensor:
    return m.bn1(m.conv(x)) + m.bn1(m.conv2(x))


def by_function_in_training(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(m.conv(x), m.bn1.running_mean, m.bn1.running_var, m.bn1.weight, m.bn1.bias, m.training)


def by_function(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(m.conv(x), m.bn1.running_mean, m.bn1.running_var, m.bn1.weight, m.bn1.bias, False)


def by_another_path(m: Any, x: Tensor) -> Tensor:
    return m.bn1(F.conv2d(x, m.conv.weight, m.conv.bias, padding=1))


def squeezed(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.fc(x.unsqueeze(1)).squeeze(1))


def flattened(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.fc(x).flatten(0, 1)).unflatten(0, (2, -1))


def scaled_after(m: Any, x: Tensor) -> Tensor:
    return m.bn1(m.conv(x) * 2)


def bound_method(m: Any, x: Tensor) -> Tensor:
    return m.bn1.forward(m.conv.forward(x))


def norms(compute: Any, count: int = 2) -> Callable[[], Made]:
    def make() -> Made:
        layers: dict[str, nn.Module] = {f"bn{index + 1}": nn.BatchNorm2d(8) for index in range(count)}
        layers |= {name: nn.Conv2d(3, 8, 3, padding=1) for name in ("conv", "conv2")}
        return Net(compute, **layers), image()

    return make


def mixed(compute: Any, x: Callable[[], Tensor]) -> Callable[[], Made]:
    return lambda: (Net(compute, fc=nn.Linear(8, 8), bn=nn.BatchNorm1d(8)), x())


def nested() -> Made:
    """A norm in a list that the forward calls by index, and one that never runs."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
    wrapped = Net(lambda m, x: m.inner.layers[1](m.inner.layers[0](x)), inner=model)
    return wrapped, image()


FOLDS = [
    Case("grouped convolution, norm", "folds", then(lambda: nn.Conv2d(4, 8, 3, groups=2), lambda: nn.BatchNorm2d(8), 2, 4, 6, 6)),
    Case("grouped transposed convolution, norm", "folds", then(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), lambda: nn.BatchNorm2d(6), 2, 4, 6, 6), quick=True),
    Case("transposed convolution 1d, norm", "folds", then(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), lambda: nn.BatchNorm1d(6), 2, 4, 6)),
    Case("convolution 1d without a bias, norm", "folds", then(lambda: nn.Conv1d(4, 6, 3, bias=False), lambda: nn.BatchNorm1d(6, eps=1e-2), 2, 4, 6)),
    Case("circular convolution, norm", "folds", then(lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"), lambda: nn.BatchNorm2d(6, affine=False), 2, 3, 6, 6)),
    Case("depthwise convolution, norm", "folds", then(lambda: nn.Conv2d(4, 4, 3, groups=4), lambda: nn.BatchNorm2d(4, momentum=None), 2, 4, 6, 6)),
    Case("two norms of one convolution", "folds", norms(two_norms)),
    Case("one norm of two convolutions", "folds", norms(shared_norm), findings=("G404",)),
    Case("dropout before the norm", "folds", norms(dropped)),
    Case("norm by its function, as the mode says", "folds", norms(by_function_in_training)),
    Case("norm by its function", "folds", norms(by_function)),
    Case("convolution by its function", "folds", norms(by_another_path)),
    Case("scaled before the norm", "folds", norms(scaled_after)),
    Case("forward called by its name", "folds", norms(bound_method)),
    Case("squeezed before the norm", "folds", mixed(squeezed, vectors)),
    Case("tokens joined before the norm", "folds", mixed(flattened, lambda: frames(5))),
    Case("norms in a list", "folds", nested),
]  # fmt: skip

CASES = [*BETWEEN, *FOLDS]
