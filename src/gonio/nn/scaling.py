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
from gonio.nn.slope import by_energy, root, slope_at

__all__ = ["scale_", "scale_by_parts_", "total_norm"]


def total_norm(energy: Tensor, shortest: float, product: Product) -> Tensor:
    """The sum of the norms of each group's patches."""
    if not ordinary_eager():
        return product.over_groups(root(energy, shortest))
    result: Tensor = _TotalNorm.apply(energy, shortest, product)
    return result


class _TotalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, energy: Tensor, shortest: float, product: Product) -> Tensor:
        ctx.shortest, ctx.product = shortest, product
        ctx.save_for_backward(energy)
        return product.over_groups(root(energy, shortest))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (energy,) = ctx.saved_tensors
        by_norm = ctx.product.per_group(grad)
        return by_energy(by_norm, root(energy, ctx.shortest), energy, ctx.shortest), None, None


def scale_(y: Tensor, slope: Tensor, product: Product) -> Tensor:
    """The product times a slope that is known: no larger than the energy of the patches."""
    result: Tensor = _Scale.apply(y, slope, product)
    return result


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slope: Tensor, product: Product) -> Tensor:
        product.group(y).mul_(slope)
        ctx.product = product
        ctx.mark_dirty(y)
        ctx.save_for_backward(y, slope)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, slope = ctx.saved_tensors
        grad, out = ctx.product.group(grad), ctx.product.group(out)
        if torch.is_grad_enabled():
            total = (wide(grad) * out).sum_to_size(slope.shape)
            return ctx.product.ungroup((grad * slope).to(out.dtype)), _over(total, slope), None
        space, by_slope = torch.empty_like(out), None
        if ctx.needs_input_grad[1]:
            both = torch.mul(grad, out, out=space) if space.dtype == slope.dtype else wide(grad) * out
            by_slope = _over(both.sum_to_size(slope.shape), slope)
        by_y = ctx.product.ungroup(torch.mul(grad, slope, out=space)) if ctx.needs_input_grad[0] else None
        return by_y, by_slope, None


def _over(total: Tensor, slope: Tensor) -> Tensor:
    """Σ grad·y from Σ grad·out. Where the slope is 0 so are y and the result: no gradient passes."""
    return total / (slope + torch.finfo(slope.dtype).tiny)  # changes no other slope


def scale_by_parts_(
    y: Tensor, energy: Tensor, c: Coefficients, magnitude: Magnitude, product: Product, shortest: float
) -> Tensor:
    """The product times a slope that is as large as the product where the energy is not, and never held as a whole.

    Forward and backward compute it part by part from the patches' energy, and backward its derivative,
    by autograd on a part.
    """
    result: Tensor = _ScaleByParts.apply(y, energy, c.alpha, c.beta, c.radius, magnitude, product, shortest)
    return result


class _ScaleByParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        numbers = (alpha, beta, radius)
        ctx.numbers = [None if isinstance(n, Tensor) else n for n in numbers]
        ctx.magnitude, ctx.product, ctx.shortest = magnitude, product, shortest
        ctx.mark_dirty(y)
        ctx.save_for_backward(y, energy, *(n if isinstance(n, Tensor) else None for n in numbers))
        return y

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
    first_found = torch.empty_like(energy) if ctx.needs_input_grad[1] else None
    into = energy if first_found is None else first_found
    sums: list[Tensor | None] = [None, None, None]
    beside = tuple(t for t in leaves if t is not None)
    for part, outs, space, energies, target in in_parts(grad, out, by_y, energy, into, beside=beside):
        slope, (first, *others) = _differentiate(ctx, part, outs, energies, *leaves)
        torch.mul(part, slope, out=space)
        if first is not None:
            target.copy_(first)
        sums = [new if old is None or new is None else old.add_(new) for old, new in zip(sums, others, strict=True)]
    return [first_found, *sums]


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
        return slope, [None if by_norm is None else by_energy(by_norm, norm, energy, ctx.shortest), *others]
