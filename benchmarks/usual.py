"""Methods as a user writes them today with autograd, in about ten lines each: the column "usual" of `whole_steps`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from benchmarks.switchable_norm import reference as published_norm

STRENGTH = 1e-4


@dataclass(frozen=True)
class Prepared:
    """What a method adds to a step: a term of the loss, calls before the forward and before the optimizer's step."""

    penalty: Callable[[], Tensor] | None = None
    before_step: Callable[[], object] | None = None


Prepare = Callable[[nn.Module, type[nn.Module]], Prepared]


# --- penalties ------------------------------------------------------------------------------------------


def _sum_over_weights(of: Callable[[Tensor], Tensor]) -> Prepare:
    """A penalty on each weight of the chosen layers."""

    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        weights = [module.weight for module in model.modules() if isinstance(module, where)]
        return Prepared(lambda: STRENGTH * torch.stack([of(weight) for weight in weights]).sum())

    return prepare


def _small_side(weight: Tensor) -> Tensor:
    rows = weight.flatten(1)
    return rows if rows.shape[0] <= rows.shape[1] else rows.T


def _defect(weight: Tensor) -> Tensor:
    rows = _small_side(weight)
    return rows @ rows.T - torch.eye(rows.shape[0])


def _spectral_defect(weight: Tensor) -> Tensor:
    """As in the paper's code: one power iteration from a random vector, differentiated with the rest."""
    defect = _defect(weight)
    direction = F.normalize(defect @ torch.rand(len(defect)), dim=0)
    return (defect @ direction).norm()


def _scale_and_shift(weight: Tensor) -> Tensor:
    norm = weight.norm()
    return norm.log() + weight.abs().sum() / norm


orthogonality = _sum_over_weights(lambda weight: _defect(weight).square().sum())
srip = _sum_over_weights(_spectral_defect)
scale_shift = _sum_over_weights(_scale_and_shift)


def outputs_of(model: nn.Module, where: type[nn.Module]) -> list[Tensor]:
    """A list to which each of these layers appends its output."""
    outputs: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, where):
            module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    return outputs


def self_orthogonality(samples: int | None) -> Prepare:
    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        outputs = outputs_of(model, where)

        def penalty() -> Tensor:
            total = torch.zeros(())
            for output in outputs:
                columns = output.movedim(1, -1).flatten(0, -2) if output.dim() == 4 else output.flatten(0, -2)
                if samples is not None and columns.shape[0] > samples:
                    columns = columns[torch.randint(columns.shape[0], (samples,))]
                signs = F.normalize(torch.tanh(columns - columns.mean(0)), dim=0)
                cosines = signs.T @ signs
                cosines = cosines - torch.diag(cosines.diagonal())
                total = total + cosines.sum().square() + cosines.square().sum()
            outputs.clear()
            return STRENGTH * total

        return Prepared(penalty)

    return prepare


# --- layers ---------------------------------------------------------------------------------------------


def replaced(kind: type[nn.Module], new: Callable[[Any], nn.Module]) -> Prepare:
    """Other layers in the place of all of one type."""

    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is kind:
                    setattr(module, name, new(child))
        return Prepared()

    return prepare


def in_the_place_of(kind: type[nn.Conv2d]) -> Callable[[nn.Conv2d], nn.Conv2d]:
    """A convolution of another type with the options and the weight of one, and no bias."""

    def new(old: nn.Conv2d) -> nn.Conv2d:
        size, stride, padding = old.kernel_size, old.stride, old.padding
        made = kind(old.in_channels, old.out_channels, size, stride, padding, bias=False)
        made.weight = old.weight
        return made

    return new


class Decoupled(nn.Conv2d):
    """tanh(‖x‖) · cos θ by a convolution of x² with ones, as the official code does it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / (self.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1e-8)
        ones = torch.ones(1, *self.weight.shape[1:])
        norm = (F.conv2d(x * x, ones, None, self.stride, self.padding) + 1e-8).sqrt()
        return F.conv2d(x, weight, None, self.stride, self.padding) / norm * torch.tanh(norm)


class LearnedDecoupled(nn.Conv2d):
    """As `Decoupled`, with a learned radius per filter in units of the mean norm."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log_radius = nn.Parameter(torch.zeros(self.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / (self.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1e-8)
        ones = torch.ones(1, *self.weight.shape[1:])
        norm = (F.conv2d(x * x, ones, None, self.stride, self.padding) + 1e-8).sqrt()
        radius = norm.mean() * self.log_radius.exp().view(1, -1, 1, 1)
        return F.conv2d(x, weight, None, self.stride, self.padding) / norm * torch.tanh(norm / radius)


class SwitchableNorm(nn.Module):
    """The formulation of the paper's code."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.mean_logits, self.var_logits = (nn.Parameter(torch.zeros(3)) for _ in range(2))
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return published_norm(x, self.mean_logits, self.var_logits, self.weight, self.bias)


decoupled = replaced(nn.Conv2d, in_the_place_of(Decoupled))
learned_decoupled = replaced(nn.Conv2d, in_the_place_of(LearnedDecoupled))
switchable_norm = replaced(nn.BatchNorm2d, SwitchableNorm)


# --- weights --------------------------------------------------------------------------------------------


def _parametrized(make: Callable[[Tensor], nn.Module]) -> Prepare:
    """Modules registered with torch.nn.utils.parametrize, as torch's documentation shows it."""

    def prepare(model: nn.Module, where: type[nn.Module]) -> Prepared:
        for module in list(model.modules()):
            if isinstance(module, where):
                parametrize.register_parametrization(module, "weight", make(module.weight.detach()))
        return Prepared()

    return prepare


def by_filter(numbers: Tensor, weight: Tensor) -> Tensor:
    """One number per filter, as a factor of the weight."""
    return numbers.view(-1, *(1,) * (weight.dim() - 1))


def unit(weight: Tensor) -> Tensor:
    """Filters of norm 1."""
    return weight / by_filter(weight.flatten(1).norm(dim=1), weight)


class Sphere(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return unit(weight)


class WeightNorm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(weight.flatten(1).norm(dim=1))

    def forward(self, weight: Tensor) -> Tensor:
        return by_filter(self.gain, weight) * unit(weight)


class SpectralNorm(nn.Module):
    """One power iteration in each forward."""

    left: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("left", F.normalize(torch.randn(len(weight)), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        rows = weight.flatten(1)
        with torch.no_grad():
            right = F.normalize(rows.T @ self.left, dim=0)
            self.left = F.normalize(rows @ right, dim=0)
        return weight / (self.left @ rows @ right)


class Standardized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        var, mean = torch.var_mean(weight, tuple(range(1, weight.dim())), keepdim=True)
        return (weight - mean) * var.rsqrt()


class Orthogonal(nn.Module):
    """The polar factor by an SVD."""

    def forward(self, weight: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        return (u @ vh).view_as(weight)


weight_norm = _parametrized(WeightNorm)
spectral_norm = _parametrized(SpectralNorm)
weight_standardization = _parametrized(lambda weight: Standardized())
sphere = _parametrized(lambda weight: Sphere())
orthogonal = _parametrized(lambda weight: Orthogonal())
