"""Decoupled convolutions against other ways of writing them.

The operator is tanh(‖x‖)·g(θ) with fixed radius 1, so that all candidates compute the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Candidate, Operation, Row, operation_of
from gonio import nn as gnn
from gonio.nn import angular as angles
from gonio.nn import magnitude

TITLE = "Decoupled convolution, tanh magnitude"
FLOOR = "`F.conv2d` of the same shape and layout"
EPS = 1e-12
MAGNITUDE = magnitude.Tanh(radius=1.0, radius_in="absolute")


@dataclass(frozen=True)
class Shape:
    """One convolution."""

    name: str
    batch: int
    channels: int
    size: int
    filters: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    layout: str = "NCHW"

    def input(self) -> Tensor:
        x = torch.randn(self.batch, self.channels, self.size, self.size, generator=_generator(0))
        return self._laid_out(x).requires_grad_()

    def weight(self) -> Tensor:
        per_group = self.channels // self.groups
        w = torch.randn(self.filters, per_group, self.kernel, self.kernel, generator=_generator(1))
        return self._laid_out(w / math.sqrt(per_group * self.kernel**2)).requires_grad_()

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.layout == "channels_last" else x

    @property
    def options(self) -> dict[str, int]:
        return {"stride": self.stride, "padding": self.kernel // 2, "groups": self.groups}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SHAPES = (
    Shape("A 32×64×32², 64 filters 3×3", 32, 64, 32, 64),
    Shape("B 32×128×16², 128 filters 3×3", 32, 128, 16, 128),
    Shape("C 8×3×224², 64 filters 7×7 stride 2", 8, 3, 224, 64, kernel=7, stride=2),
    Shape("D 32×128×16², depthwise 3×3", 32, 128, 16, 128, groups=128),
    Shape("E 32×128×16², 128 filters 3×3, 4 groups", 32, 128, 16, 128, groups=4),
)
TINY = Shape("tiny 2×4×8², 4 filters 3×3", 2, 4, 8, 4)
ANGULAR = {
    "cosine": angles.Cosine,
    "sqcos": angles.SquaredCosine,
    "linear": angles.Linear,
    "sigmoid": angles.Sigmoid,
}


def combine(angular: str, y: Tensor, norm: Tensor) -> Tensor:
    """tanh(r)·g(θ) from the product with unit filters and the norm, as peers write it."""
    if angular == "cosine":
        return y * (torch.tanh(norm) / norm)
    cosine = y / norm
    if angular == "sqcos":
        return torch.tanh(norm) * cosine * cosine.abs()
    angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
    if angular == "linear":
        return torch.tanh(norm) * (1 - (2 / math.pi) * angle)
    k = ANGULAR[angular]().k
    return torch.tanh(norm) * torch.tanh((math.pi / 2 - angle) / (2 * k)) / math.tanh(math.pi / (4 * k))


def unit(weight: Tensor) -> Tensor:
    return weight / weight.square().flatten(1).sum(1).add(EPS).sqrt().view(-1, 1, 1, 1)


def unfold(x: Tensor, weight: Tensor, shape: Shape, angular: str) -> Tensor:
    """Patches as columns: the textbook way."""
    k, s = shape.kernel, shape.stride
    columns = F.unfold(x, k, padding=k // 2, stride=s).unflatten(1, (shape.groups, -1))
    filters = unit(weight).flatten(1).unflatten(0, (shape.groups, -1))
    norm = columns.square().sum(2, keepdim=True).add(EPS).sqrt()
    side = (shape.size - 1) // s + 1
    return combine(angular, filters @ columns, norm).flatten(1, 2).unflatten(-1, (side, side))


def ones_conv(x: Tensor, weight: Tensor, shape: Shape, angular: str) -> Tensor:
    """The official formulation: ‖x‖² by a convolution of x² with ones over all channels."""
    ones = x.new_ones(shape.groups, x.shape[1] // shape.groups, shape.kernel, shape.kernel)
    norm = F.conv2d(x * x, ones, **shape.options).add(EPS).sqrt()
    norm = norm.repeat_interleave(shape.filters // shape.groups, 1) if shape.groups > 1 else norm
    return combine(angular, F.conv2d(x, unit(weight), **shape.options), norm)


def bcos(x: Tensor, weight: Tensor, shape: Shape, angular: str) -> Tensor:
    """As public B-cos layers do: channel sum of x², then average pooling."""
    energy = (x**2).unflatten(1, (shape.groups, -1)).sum(2)
    pooled = F.avg_pool2d(energy, shape.kernel, padding=shape.kernel // 2, stride=shape.stride, divisor_override=1)
    norm = (pooled + EPS).sqrt()
    norm = norm.repeat_interleave(shape.filters // shape.groups, 1) if shape.groups > 1 else norm
    return combine(angular, F.conv2d(x, unit(weight), **shape.options), norm)


def layer(shape: Shape, weight: Tensor, angular: str) -> nn.Module:
    options = {**shape.options, "bias": False}
    conv = nn.Conv2d(shape.channels, shape.filters, shape.kernel, **options)
    conv.weight = nn.Parameter(weight.detach())
    return gnn.DecoupledConv2d.from_conv(conv, magnitude=MAGNITUDE, angular=ANGULAR[angular]())


Function = Callable[[Tensor, Tensor, Shape, str], Tensor]


def _peer(name: str, function: Function, shape: Shape, mode: str, angular: str, *, compiled: bool = False) -> Candidate:
    def make() -> Operation:
        x, weight = shape.input(), shape.weight()
        call = torch.compile(function, dynamic=False) if compiled else function
        return operation_of(lambda: call(x, weight, shape, angular), [x, weight], mode)

    return Candidate(name, make, compiled=compiled)


def _ours(name: str, shape: Shape, mode: str, angular: str, *, compiled: bool = False) -> Candidate:
    def make() -> Operation:
        x = shape.input()
        module = layer(shape, shape.weight(), angular)
        call = torch.compile(module, dynamic=False) if compiled else module
        return operation_of(lambda: call(x), [x, module.weight], mode)

    return Candidate(name, make, compiled=compiled)


def _floor(shape: Shape, mode: str) -> Candidate:
    def make() -> Operation:
        x, weight = shape.input(), shape.weight()
        return operation_of(lambda: F.conv2d(x, weight, **shape.options), [x, weight], mode)

    return Candidate("conv2d", make)


def row(shape: Shape, mode: str, angular: str, table: str) -> Row:
    candidates = (
        _peer("unfold", unfold, shape, mode, angular),
        _peer("ones conv", ones_conv, shape, mode, angular),
        _peer("B-cos style", bcos, shape, mode, angular),
        _peer("ones conv, compiled", ones_conv, shape, mode, angular, compiled=True),
        _ours("gonio", shape, mode, angular),
        _ours("gonio, compiled", shape, mode, angular, compiled=True),
    )
    case = shape.name if table == "shapes" else angular
    if shape.layout != "NCHW":
        case, candidates = f"{case}, {shape.layout}", candidates[1:]  # unfold has no such layout
    return Row(case, mode, _floor(shape, mode), candidates, table)


def rows(*, quick: bool) -> Iterator[Row]:
    """Every shape in both layouts, then every angular part on shape A."""
    for mode in ("F", "FB"):
        if quick:
            yield row(TINY, mode, "cosine", "shapes")
            continue
        for shape in SHAPES:
            yield row(shape, mode, "cosine", "shapes")
        for shape in SHAPES[:3]:
            yield row(replace(shape, layout="channels_last"), mode, "cosine", "shapes")
        for angular in ("sqcos", "linear", "sigmoid"):
            yield row(SHAPES[0], mode, angular, "angular")
