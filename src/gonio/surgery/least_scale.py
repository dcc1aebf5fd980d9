r"""The least sum of squared weights among all ways to place the free scales of a network.

The sum is a sum of terms :math:`s_i^2\, m_{ij} / t_j^2` and so convex in the logarithms of the scales. For
one scale with all others held it is :math:`s^2 P + Q / s^2`, least at :math:`s^4 = Q / P`, where P is the
square of the rows that produce the channel and Q of the columns that consume it. In the logarithm of s this
is a hyperbolic cosine about its minimum, so a step of up to twice the way still descends: steps are
lengthened as successive over-relaxation does for a chain of that many scales, which needs a number of
sweeps in proportion to its length instead of its square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.surgery.scales import Layer, Variable

__all__ = ["Placed", "least_scales"]

_SWEEPS = 10_000
_CONVERGED = 1e-13  # of a log scale: rounding, so that the closed form is reached to fp64 precision


@dataclass(frozen=True)
class Placed:
    """Where the scales are placed at the least sum.

    Attributes:
        scales: of each variable, one number per channel.
        before: the sum of squares of the layers that take part.
        after: the same with the scales in place.
        converged: whether coordinate descent came to rest; if not, the scales are valid but not the best.
    """

    layers: int
    scales: dict[Variable, Tensor]
    before: float
    after: float
    converged: bool


@torch.no_grad()
def least_scales(
    variables: list[Variable], *, per_channel: bool, sweeps: int = _SWEEPS, tolerance: float = _CONVERGED
) -> Placed:
    """Coordinate descent over the free variables.

    Args:
        variables: free ones.
        per_channel: one scale per channel; otherwise one per tensor.
        sweeps: at most this many over all variables.
        tolerance: largest change of a log scale at rest.
    """
    ends = _Ends(variables)
    before = ends.sum_of_squares()
    largest = 0.0
    for _ in range(sweeps):
        largest = max((_improve_(ends, variable, per_channel=per_channel) for variable in variables), default=0.0)
        if largest < tolerance:
            break
    return Placed(len(ends.layers), ends.scales, before, ends.sum_of_squares(), largest < tolerance)


class _Ends:
    """The layers between the variables, with the squares of the factors of their rows and columns."""

    def __init__(self, variables: list[Variable]) -> None:
        self.scales = {v: torch.ones(v.channels, dtype=torch.float64) for v in variables}
        self.layers: dict[int, Layer] = {}
        self.rows: dict[int, Tensor] = {}
        self.columns: dict[int, Tensor] = {}
        self.longer = _over_relaxation(variables)
        self.loops = {v for v in variables if {id(p) for p in v.producers} & {id(c) for c, _ in v.consumers}}
        for layer in (part for v in variables for part in (*v.producers, *(c for c, _ in v.consumers))):
            if id(layer) not in self.layers:
                self.layers[id(layer)] = layer
                self.rows[id(layer)] = torch.ones(layer.out_channels, dtype=torch.float64)
                self.columns[id(layer)] = torch.ones(layer.in_channels, dtype=torch.float64)

    def made(self, layer: Layer) -> Tensor:
        """The squares of a layer's rows."""
        columns = self.columns[id(layer)].view(layer.squares.shape[0], -1, 1).to(layer.squares.device)
        return self.rows[id(layer)] * torch.bmm(layer.squares, columns).flatten().cpu()

    def used(self, layer: Layer, per: int) -> Tensor:
        """The squares of a layer's columns, summed over the features of each channel."""
        rows = self.rows[id(layer)].view(layer.squares.shape[0], 1, -1).to(layer.squares.device)
        columns = self.columns[id(layer)] * torch.bmm(rows, layer.squares).flatten().cpu()
        return columns.view(-1, per).sum(1)

    def scale_(self, variable: Variable, step: Tensor) -> None:
        self.scales[variable] *= step
        squares = self.scales[variable].square()
        for layer in variable.producers:
            self.rows[id(layer)] = squares
        for layer, per in variable.consumers:
            self.columns[id(layer)] = 1 / squares.repeat_interleave(per)

    def sum_of_squares(self) -> float:
        return math.fsum(float(self.made(layer).sum()) for layer in self.layers.values())


def _over_relaxation(variables: list[Variable]) -> dict[Variable, float]:
    """By how much to lengthen the steps of each variable: 1 for one that no other variable depends on."""
    group = {variable: {variable} for variable in variables}
    touching: dict[int, Variable] = {}
    for variable in variables:
        for layer in (*variable.producers, *(layer for layer, _ in variable.consumers)):
            other = touching.setdefault(id(layer), variable)
            if group[other] is not group[variable]:
                joined = group[other] | group[variable]
                group.update(dict.fromkeys(joined, joined))
    return {variable: 2 / (1 + math.sin(math.pi / (len(group[variable]) + 1))) for variable in variables}


def _improve_(ends: _Ends, variable: Variable, *, per_channel: bool) -> float:
    """Give one variable its best scales; the largest log step."""
    moved = 0.0 if per_channel and variable not in ends.loops else _improve_together_(ends, variable)
    return max(moved, _improve_each_(ends, variable)) if per_channel else moved


def _improve_each_(ends: _Ends, variable: Variable) -> float:
    """Every channel by itself."""
    made = torch.stack([ends.made(layer) for layer in variable.producers]).sum(0)
    used = torch.stack([ends.used(layer, per) for layer, per in variable.consumers]).sum(0)
    # Where a layer both makes and reads the tensor, the channels of one step depend on each other: a full
    # step of all of them overshoots, half of it descends.
    return _step_(ends, variable, used, made, power=0.125 if variable in ends.loops else 0.25)


def _improve_together_(ends: _Ends, variable: Variable) -> float:
    """All channels by one factor, which does not change a layer that both makes and reads the tensor."""
    loops = {id(p) for p in variable.producers} & {id(layer) for layer, _ in variable.consumers}
    made = [ends.made(layer).sum() for layer in variable.producers if id(layer) not in loops]
    used = [ends.used(layer, per).sum() for layer, per in variable.consumers if id(layer) not in loops]
    if not made or not used:
        return 0.0
    shape = (variable.channels,)
    return _step_(
        ends, variable, torch.stack(used).sum().expand(shape), torch.stack(made).sum().expand(shape), power=0.25
    )


def _step_(ends: _Ends, variable: Variable, used: Tensor, made: Tensor, *, power: float) -> float:
    # a channel that is never produced or never used has no best scale: it stays
    step = torch.where((made > 0) & (used > 0), (used / made).pow(power * ends.longer[variable]), 1.0)
    ends.scale_(variable, step)
    return float(step.log().abs().max()) if step.numel() else 0.0
