"""The plain product times the operator's slope, written over the product, for ordinary eager training.

With the cosine the operator is a multiple of the product, y·s with s = h/‖x‖, so y can be had back from the
result as long as s cannot vanish where y does not. Saved for backward are the result, which the next layer
keeps anyway, and what s is computed from. Large tensors are worked on part by part (gonio.nn.parts).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gonio.nn.fused import ordinary_eager
from gonio.nn.magnitude import Magnitude
from gonio.nn.magnitude.base import Coefficients, Number
from gonio.nn.parts import in_parts
from gonio.nn.product import Product, wide

__all__ = ["root", "scale_", "scale_by_parts_", "slope_at", "total_norm"]


def root(energy: Tensor, shortest: float) -> Tensor:
    """The norms of patches; one that is shorter than `shortest` counts as that long, with gradient 0."""
    return energy.clamp_min(shortest**2).sqrt()


def _by_energy(by_norm: Tensor, norm: Tensor, energy: Tensor, shortest: float) -> Tensor:
    """The gradient of the energy from that of its root."""
    found = by_norm / (2 * norm)
    return torch.ops.aten.threshold_backward(found, energy, shortest**2)


def slope_at(norm: Tensor, c: Coefficients, magnitude: Magnitude, shortest: float) -> Number:
    """The slope h/‖x‖; 0 at a zero patch for a magnitude that has no limit there."""
    slope = magnitude.slope(norm, c)
    return slope if magnitude.continuous_at_zero else slope * (norm > shortest)


def total_norm(energy: Tensor, shortest: float, product: Product) -> Tensor:
    """The sum of the norms of each group's patches."""
    if not ordinary_eager():
        return product.over_groups(root(energy, shortest))
    result: Tensor = _TotalNorm.apply(energy, shortest, product)
    return result


class _TotalNorm(torch.autograd.Function):
    @staticmethod
    def forward(energy: Tensor, shortest: float, product: Product) -> Tensor:
        sums = [product.over_groups(root(part, shortest)) for (part,) in in_parts(energy)]
        return torch.stack(sums).sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, Product], output: Tensor) -> None:
        energy, ctx.shortest, ctx.product = inputs
        ctx.save_for_backward(energy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (energy,) = ctx.saved_tensors
        by_norm = ctx.product.per_group(grad)
        if torch.is_grad_enabled():
            return _by_energy(by_norm, root(energy, ctx.shortest), energy, ctx.shortest), None, None
        found = torch.empty_like(energy)
        for part, space in in_parts(energy, found):
            space.copy_(_by_energy(by_norm, root(part, ctx.shortest), part, ctx.shortest))
        return found, None, None


def scale_(y: Tensor, slope: Tensor, product: Product) -> Tensor:
    """The product times a slope that is known, and small because it belongs to patches."""
    result: Tensor = _Scale.apply(y, slope, product)
    return result


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, slope: Tensor, product: Product) -> Tensor:
        product.group(y).mul_(slope)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Product], output: Tensor) -> None:
        _, slope, ctx.product = inputs
        ctx.mark_dirty(output)
        ctx.save_for_backward(output, slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, slope = ctx.saved_tensors
        grad, out = ctx.product.group(grad), ctx.product.group(out)
        if torch.is_grad_enabled():
            total = (wide(grad) * out).sum_to_size(slope.shape)
            return ctx.product.ungroup((grad * slope).to(out.dtype)), _over(total, slope), None
        by_y, total = torch.empty_like(out), torch.empty_like(slope)
        for part, outs, slopes, space, sums in in_parts(grad, out, slope, by_y, total):
            if ctx.needs_input_grad[1]:
                both = torch.mul(part, outs, out=space) if space.dtype == sums.dtype else wide(part) * outs
                sums.copy_(both.sum_to_size(sums.shape))
            torch.mul(part, slopes, out=space)
        by_slope = _over(total, slope) if ctx.needs_input_grad[1] else None
        return ctx.product.ungroup(by_y) if ctx.needs_input_grad[0] else None, by_slope, None


def _over(total: Tensor, slope: Tensor) -> Tensor:
    """Σ grad·y from Σ grad·out. Where the slope is 0 so are y and the result: no gradient passes."""
    return total / (slope + torch.finfo(slope.dtype).tiny)  # changes no other slope


def scale_by_parts_(
    y: Tensor, energy: Tensor, c: Coefficients, magnitude: Magnitude, product: Product, shortest: float
) -> Tensor:
    """The product times a slope that is as large as the product, and never held as a whole.

    Forward and backward compute it part by part from the patches' energy, and backward its derivative,
    by autograd on a part.
    """
    result: Tensor = _ScaleByParts.apply(y, energy, c.alpha, c.beta, c.radius, magnitude, product, shortest)
    return result


class _ScaleByParts(torch.autograd.Function):
    @staticmethod
    def forward(
        y: Tensor,
        energy: Tensor,
        alpha: Number,
        beta: Number,
        radius: Number,
        magnitude: Magnitude,
        product: Product,
        shortest: float,
    ) -> Tensor:
        c = Coefficients(alpha, beta, radius)
        for part, energies in in_parts(product.group(y), energy, beside=c.tensors):
            part.mul_(slope_at(root(energies, shortest), c, magnitude, shortest))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, energy, *numbers, ctx.magnitude, ctx.product, ctx.shortest = inputs
        ctx.numbers = [None if isinstance(n, Tensor) else n for n in numbers]
        ctx.mark_dirty(output)
        ctx.save_for_backward(output, energy, *(n if isinstance(n, Tensor) else None for n in numbers))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, *tensors = ctx.saved_tensors
        grad, out = ctx.product.group(grad), ctx.product.group(out)
        if torch.is_grad_enabled():
            slope, found = _differentiate(ctx, grad, out, *tensors)
            by_y = (grad * slope).to(out.dtype)
        else:
            by_y = torch.empty_like(out)
            found = _by_parts(ctx, grad, out, by_y, *tensors)
        return (ctx.product.ungroup(by_y), *found, None, None, None)


def _by_parts(
    ctx: Any, grad: Tensor, out: Tensor, by_y: Tensor, energy: Tensor, *tensors: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the energy and of the coefficients; that of the product is written to `by_y`."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    by_energy = torch.empty_like(energy) if ctx.needs_input_grad[1] else None
    into = energy if by_energy is None else by_energy
    sums: list[Tensor | None] = [None, None, None]
    beside = tuple(t for t in leaves if t is not None)
    for part, outs, space, energies, target in in_parts(grad, out, by_y, energy, into, beside=beside):
        slope, (first, *others) = _differentiate(ctx, part, outs, energies, *leaves)
        torch.mul(part, slope, out=space)
        if first is not None:
            target.copy_(first)
        sums = [new if old is None or new is None else old.add_(new) for old, new in zip(sums, others, strict=True)]
    return [by_energy, *sums]


def _differentiate(
    ctx: Any, grad: Tensor, out: Tensor, energy: Tensor, *tensors: Tensor | None
) -> tuple[Number, list[Tensor | None]]:
    """The slope, and the gradients of the energy and the three coefficients that are wanted."""
    again = torch.is_grad_enabled()
    norm = root(energy, ctx.shortest)
    norm = norm if again else norm.requires_grad_()
    c = Coefficients(*(n if t is None else t for t, n in zip(tensors, ctx.numbers, strict=True)))
    inputs = [t if wanted else None for t, wanted in zip((norm, *tensors), ctx.needs_input_grad[1:5], strict=True)]
    wanted = [t for t in inputs if t is not None]
    with torch.enable_grad():
        slope = slope_at(norm, c, ctx.magnitude, ctx.shortest)
    if not (wanted and isinstance(slope, Tensor) and slope.requires_grad):
        return slope, [None if t is None else torch.zeros_like(t) for t in inputs]
    with torch.set_grad_enabled(again):
        by_slope = _over((wide(grad) * out).sum_to_size(slope.shape), slope)
        found = iter(torch.autograd.grad(slope, wanted, by_slope, create_graph=again, materialize_grads=True))
        by_norm, *others = [None if t is None else next(found) for t in inputs]
        return slope, [None if by_norm is None else _by_energy(by_norm, norm, energy, ctx.shortest), *others]
