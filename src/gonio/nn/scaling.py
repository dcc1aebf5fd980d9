"""The plain product times the operator's slope, written over the product, for ordinary eager training.

With the cosine the operator is a multiple of the product, y·s with s = h/‖x‖, so y can be had back from the
result as long as s cannot vanish where y does not. Saved for backward are the result, which the next layer
keeps anyway, and what s is computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gonio.nn.magnitude import Magnitude
from gonio.nn.magnitude.base import Coefficients, Number
from gonio.nn.product import Product, wide

__all__ = ["scale_", "scale_by_filter_"]

# Entries of the output that are worked on at a time: few enough for their temporaries to stay in the cache of
# one core, and to be small beside the output.
PART = 2**17


def scale_(y: Tensor, slope: Tensor, product: Product) -> Tensor:
    """The product times a slope that belongs to the patches."""
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
        product = ctx.product
        grouped = product.group(grad)
        by_slope = temporary = None
        if ctx.needs_input_grad[1]:
            temporary = wide(grouped) * product.group(out)
            by_slope = _over(temporary.sum_to_size(slope.shape), slope)
        if not ctx.needs_input_grad[0]:
            return None, by_slope, None
        if temporary is None or torch.is_grad_enabled():
            by_y = grouped * slope
        else:
            by_y = torch.mul(grouped, slope, out=temporary)
        return product.ungroup(by_y.to(out.dtype)), by_slope, None


def _over(total: Tensor, slope: Tensor) -> Tensor:
    """Σ grad·y from Σ grad·out. Where the slope is 0 so are y and the result: no gradient passes."""
    zero = slope == 0
    if torch.is_grad_enabled():
        return (total / slope.masked_fill(zero, 1)).masked_fill(zero, 0)
    return (total / slope).masked_fill_(zero, 0)


def scale_by_filter_(y: Tensor, norm: Tensor, c: Coefficients, magnitude: Magnitude, product: Product) -> Tensor:
    """The product times a slope that differs between filters, which is as large as the product.

    It is never held as a whole: forward and backward compute it part by part. For a magnitude that is
    continuous at zero, with coefficients for which its slope does not vanish.
    """
    result: Tensor = _ScaleByFilter.apply(y, norm, c.alpha, c.beta, c.radius, magnitude, product)
    return result


class _ScaleByFilter(torch.autograd.Function):
    @staticmethod
    def forward(
        y: Tensor, norm: Tensor, alpha: Number, beta: Number, radius: Number, magnitude: Magnitude, product: Product
    ) -> Tensor:
        c = Coefficients(alpha, beta, radius)
        for part, norms in _parts(product.group(y), norm):
            part.mul_(magnitude.slope(norms, c))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, norm, *numbers, ctx.magnitude, ctx.product = inputs
        ctx.numbers = [None if isinstance(n, Tensor) else n for n in numbers]
        ctx.mark_dirty(output)
        ctx.save_for_backward(output, norm, *(n if isinstance(n, Tensor) else None for n in numbers))

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
        return (ctx.product.ungroup(by_y), *found, None, None)


def _by_parts(
    ctx: Any, grad: Tensor, out: Tensor, by_y: Tensor, norm: Tensor, *tensors: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the norm and of the coefficients; that of the product is written to `by_y`."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    by_norm: list[Tensor] = []
    sums: list[Tensor | None] = [None, None, None]
    for part, outs, space, norms in _parts(grad, out, by_y, norm):
        slope, (first, *others) = _differentiate(ctx, part, outs, norms.detach().requires_grad_(), *leaves)
        torch.mul(part, slope, out=space)
        by_norm += [] if first is None else [first]
        sums = [new if old is None or new is None else old + new for old, new in zip(sums, others, strict=True)]
    return [torch.cat(by_norm) if by_norm else None, *sums]


def _differentiate(
    ctx: Any, grad: Tensor, out: Tensor, norm: Tensor, *tensors: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The slope, and the gradients of the norm and the three coefficients that are wanted."""
    c = Coefficients(*(n if t is None else t for t, n in zip(tensors, ctx.numbers, strict=True)))
    inputs = [t if wanted else None for t, wanted in zip((norm, *tensors), ctx.needs_input_grad[1:5], strict=True)]
    with torch.enable_grad():
        slope = ctx.magnitude.slope(norm, c)
    by_slope = _over((wide(grad) * out).sum_to_size(slope.shape), slope)
    create = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(slope, [t for t in inputs if t is not None], by_slope, create_graph=create))
    return slope, [None if t is None else next(found) for t in inputs]


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, cut along the samples; the first has the output's shape."""
    y = tensors[0]
    if len({len(t) for t in tensors}) > 1 or y.numel() <= PART:
        return iter([tensors])  # an output without a batch dimension, or a small one
    samples = max(1, PART * len(y) // y.numel())
    return zip(*(t.split(samples) for t in tensors), strict=True)
