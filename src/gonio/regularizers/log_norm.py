"""The logarithm of a norm plus a share of the L1 norm of the direction: the formula, and both its passes over memory.

Note [Two passes]
    A gradient that is added in place costs one reading of x for ‖x‖ and ‖x‖₁, and one for the update. On CPU both
    go in pieces that stay in cache, so that what torch does in several operations reads memory once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gonio.regularizers.closed_form import Formula

__all__ = ["LogNorm", "Row", "add_rows_"]

PIECE = 1 << 17


@dataclass(frozen=True)
class LogNorm(Formula):
    """Σ over rows of log max(‖x‖, floor) + share · ‖x‖₁/‖x‖; gradient a x + b sign(x)."""

    results: ClassVar[int] = 3
    floor: float
    share: float

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        square = (x * x).sum(-1)
        scale = 0.5 * square.clamp_min(max(self.floor**2, torch.finfo(x.dtype).tiny)).log().sum()
        zero = square < torch.finfo(x.dtype).tiny
        inverse = square.masked_fill(zero, 1).rsqrt().masked_fill(zero, 0)
        direction = self.share * (x.abs().sum(-1) * inverse).sum()
        return scale + direction, scale, direction

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        norm = torch.linalg.vector_norm(x, dim=-1)
        low = norm <= self.floor
        zero = norm < torch.finfo(x.dtype).tiny ** 0.5
        inverse = norm.masked_fill(zero, 1).reciprocal().masked_fill(zero, 0)
        scale = norm.clamp_min(self.floor).log().sum()
        on_weight = (inverse * inverse).masked_fill(low, 0)
        direction, on_sign = torch.zeros_like(scale), torch.zeros_like(norm)
        if self.share:
            absolute = torch.stack([piece.abs().sum(-1) for piece in x.split(PIECE, -1)]).sum(0)
            direction = self.share * (absolute * inverse).sum()
            on_sign = self.share * inverse
            on_weight = on_weight - self.share * absolute * inverse**3
        return (scale + direction, scale, direction), (on_weight, on_sign)

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        on_weight, on_sign = ((factor * s).unsqueeze(-1) for s in saved)
        if not self.share:
            return x * on_weight
        return x.sign().mul_(on_sign).addcmul_(x, on_weight)

    def evaluate_and_add_(self, target: Tensor, x: Tensor, factor: float) -> tuple[Tensor, ...]:
        if x.device.type != "cpu":  # reading the coefficients would wait for the device
            return super().evaluate_and_add_(target, x, factor)
        found = add_rows_([Row(*pair, self, factor) for pair in zip(x.unbind(), target.unbind(), strict=True)])
        scale, direction = (sum(parts) for parts in zip(*found, strict=True))
        return x.new_tensor(scale + direction), x.new_tensor(scale), x.new_tensor(direction)


class Row(NamedTuple):
    """Contiguous numbers, taken as a vector, and those to which factor × the gradient at it is added."""

    x: Tensor
    target: Tensor
    formula: LogNorm
    factor: float


def add_rows_(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Add the gradients of all rows; the two terms of each. Note [Two passes]"""
    scratch: dict[torch.dtype, Tensor] = {}
    for row in rows:
        if row.x.dtype not in scratch:
            scratch[row.x.dtype] = row.x.new_empty(min(PIECE, max(r.x.numel() for r in rows)))
    return [_add_row(row, scratch[row.x.dtype]) for row in rows]


def _add_row(row: Row, scratch: Tensor) -> tuple[float, float]:
    floor, share = row.formula.floor, row.formula.share
    pieces, targets = _pieces(row.x), _pieces(row.target)
    norm, absolute = _norms(pieces, scratch if share else None)
    on_weight = on_sign = direction = 0.0
    if not norm < torch.finfo(row.x.dtype).tiny ** 0.5:  # a NaN passes, and shows
        on_sign, direction = share / norm, share * absolute / norm
        on_weight = (norm > floor) / norm**2 - direction / norm**2
    for x, target in zip(pieces, targets, strict=True):
        target.add_(x, alpha=row.factor * on_weight)
        if on_sign:
            target.add_(torch.sign(x, out=_begin(scratch, x)), alpha=row.factor * on_sign)
    return math.log(max(norm, floor)), direction


def _norms(pieces: Sequence[Tensor], scratch: Tensor | None) -> tuple[float, float]:
    """‖x‖ and, where there is room to compute it, ‖x‖₁."""
    square = absolute = 0.0
    for piece in pieces:
        square += torch.dot(piece, piece).item()
        if scratch is not None:
            absolute += torch.abs(piece, out=_begin(scratch, piece)).sum().item()
    return math.sqrt(square), absolute


def _pieces(x: Tensor) -> Sequence[Tensor]:
    x = x.view(-1)
    return x.split(PIECE) if x.numel() > PIECE else (x,)


def _begin(scratch: Tensor, x: Tensor) -> Tensor:
    """As much of `scratch` as `x` has."""
    return scratch.narrow(0, 0, x.numel()) if x.numel() < scratch.numel() else scratch
