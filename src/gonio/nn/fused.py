"""Forward and backward with few temporaries, for ordinary eager training.

On CPU a fresh temporary often costs more than the arithmetic that fills it, so these functions work in
place and keep one large temporary in backward. Compilers, function transforms and forward-mode
differentiation get the same mathematics in plain operations, which they fuse or differentiate themselves.
No function here has a `setup_context`, which transforms need and torch pays for with 40 µs per call.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gonio.geometry import safe_norm
from gonio.nn.elementary import transformed
from gonio.nn.product import Product, wide

__all__ = ["multiply_with_energy", "ordinary_eager", "unit_filters"]


def ordinary_eager() -> bool:
    """Whether operations run now, one by one, under reverse-mode differentiation at most."""
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (tracing or transformed() or forward_ad._current_level >= 0)


def unit_filters(weight: Tensor, product: Product) -> Tensor:
    """What `product.filters` gives, its gradient in three passes over the weight."""
    narrow = weight.dtype not in (torch.float32, torch.float64)
    if product.has_phases or narrow or not ordinary_eager():
        return product.filters(weight)
    result: Tensor = _UnitFilters.apply(weight, product)
    return result


class _UnitFilters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, product: Product) -> Tensor:
        unit = product.filters(weight)
        ctx.product = product
        ctx.save_for_backward(weight, unit)
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight, unit = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.autograd.grad(ctx.product.filters(weight), weight, grad, create_graph=True)[0], None
        dims = tuple(range(1, weight.dim()))
        norms = safe_norm(weight, dims, keepdim=True)
        along = (grad * unit).sum(dims, keepdim=True)
        return torch.addcmul(grad, unit, along, value=-1).div_(norms.masked_fill_(norms == 0, inf)), None


def multiply_with_energy(x: Tensor, filters: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    """The product and the energy of every patch, in torch's layout."""
    if ordinary_eager():
        y, energy = _MultiplyWithEnergy.apply(x, filters, product)
        return y, energy
    return product.multiply(x, filters), product.energy(x)


class _MultiplyWithEnergy(torch.autograd.Function):
    """One gradient buffer for the input: the energy's share is added to the product's in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        ctx.product = product
        ctx.save_for_backward(x, filters)
        ctx.set_materialize_grads(False)
        return product.multiply(x, filters), product.energy(x)

    @staticmethod
    def backward(ctx: Any, by_y: Tensor | None, by_energy: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (*_again(ctx, by_y, by_energy), None)
        x, filters = ctx.saved_tensors
        by_x = by_filters = None
        if by_y is not None:
            by_x, by_filters = ctx.product.multiply_backward(by_y, x, filters, ctx.needs_input_grad[:2])
        if by_energy is not None and ctx.needs_input_grad[0]:
            by_x = _add_energy(by_x, by_energy, x, ctx.product)
        return by_x, by_filters, None


def _add_energy(by_x: Tensor | None, by_energy: Tensor, x: Tensor, product: Product) -> Tensor:
    """Add the energy's share to the gradient of the input, in place."""
    by_x = torch.zeros_like(x) if by_x is None else by_x
    spread, into = product.energy_backward(by_energy, x), product.group_input(by_x)
    if into.dtype == spread.dtype:
        into.addcmul_(product.group_input(x), spread, value=2)
    else:
        into += (2 * product.group_input(wide(x)) * spread).to(into.dtype)
    return by_x


def _again(ctx: Any, by_y: Tensor | None, by_energy: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients in plain operations, for a caller that will differentiate them."""
    x, filters = ctx.saved_tensors
    inputs = [t for t, needed in zip((x, filters), ctx.needs_input_grad[:2], strict=True) if needed]
    outputs = [
        (output, grad)
        for output, grad in ((ctx.product.multiply(x, filters), by_y), (ctx.product.energy(x), by_energy))
        if grad is not None and output.requires_grad
    ]
    if not outputs:
        return None, None
    values, grads = zip(*outputs, strict=True)
    found = iter(torch.autograd.grad(values, inputs, grads, create_graph=True, allow_unused=True))
    by_x, by_filters = (next(found) if needed else None for needed in ctx.needs_input_grad[:2])
    return by_x, by_filters
