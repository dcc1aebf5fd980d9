"""The slope h/‖x‖ of an operator at every patch, from the patches' energy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gonio.nn.magnitude import Magnitude
from gonio.nn.magnitude.base import Coefficients, Number

__all__ = ["by_energy", "root", "slope_at", "slope_of"]


def root(energy: Tensor, shortest: float) -> Tensor:
    """The norms of patches; one that is shorter than `shortest` counts as that long, with gradient 0."""
    return energy.clamp_min(shortest**2).sqrt()


def by_energy(by_norm: Tensor, norm: Tensor, energy: Tensor, shortest: float) -> Tensor:
    """The gradient of the energy from that of its root."""
    return torch.ops.aten.threshold_backward(by_norm / (2 * norm), energy, shortest**2)


def slope_at(norm: Tensor, c: Coefficients, magnitude: Magnitude, shortest: float) -> Number:
    """The slope h/‖x‖; 0 at a zero patch for a magnitude that has no limit there."""
    slope = magnitude.slope(norm, c)
    return slope if magnitude.continuous_at_zero else slope * (norm > shortest)


def slope_of(energy: Tensor, c: Coefficients, magnitude: Magnitude, shortest: float) -> Tensor:
    """:func:`slope_at` the root of the energy, for ordinary eager mode; short where no coefficient learns."""
    if any(t.requires_grad for t in c.tensors):
        norm = root(energy, shortest)
        return _as_tensor(slope_at(norm, c, magnitude, shortest), norm)
    result: Tensor = _Slope.apply(energy, c, magnitude, shortest)
    return result


def _as_tensor(slope: Number, norm: Tensor) -> Tensor:
    return slope if isinstance(slope, Tensor) else torch.full_like(norm, slope)


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, energy: Tensor, c: Coefficients, magnitude: Magnitude, shortest: float) -> Tensor:
        norm = root(energy, shortest)
        slope = _as_tensor(slope_at(norm, c, magnitude, shortest), norm)
        ctx.c, ctx.magnitude, ctx.shortest = c, magnitude, shortest
        ctx.save_for_backward(energy, slope)
        return slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        energy, slope = ctx.saved_tensors
        floored = energy.clamp_min(ctx.shortest**2)
        norm = floored.sqrt()
        if torch.is_grad_enabled():
            again = slope_at(norm, ctx.c, ctx.magnitude, ctx.shortest)
            if not (isinstance(again, Tensor) and again.requires_grad):
                return None, None, None, None
            return torch.autograd.grad(again, energy, grad, create_graph=True)[0], None, None, None
        found = (grad * ctx.magnitude.rate(norm, slope, ctx.c)).div_(floored).mul_(0.5)
        return torch.ops.aten.threshold_backward(found, energy, ctx.shortest**2), None, None, None
