"""Forward and backward with few temporaries, for ordinary eager training.

On CPU a fresh temporary often costs more than the arithmetic that fills it, so these functions work in
place and keep one large temporary in backward. Compilers, function transforms and forward-mode
differentiation get the same mathematics in plain operations, which they fuse or differentiate themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gonio.nn.product import Product, wide

__all__ = ["multiply_with_energy", "ordinary_eager"]


def ordinary_eager() -> bool:
    """Whether operations run now, one by one, under reverse-mode differentiation at most."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # private: no public function tells
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (tracing or transformed or forward_ad._current_level >= 0)


def multiply_with_energy(x: Tensor, filters: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    """The product and the energy of every patch, in torch's layout."""
    if ordinary_eager():
        y, energy = _MultiplyWithEnergy.apply(x, filters, product)
        return y, energy
    return product.multiply(x, filters), product.energy(x)


class _MultiplyWithEnergy(torch.autograd.Function):
    """One gradient buffer for the input: the energy's share is added to the product's in place."""

    @staticmethod
    def forward(x: Tensor, filters: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        return product.multiply(x, filters), product.energy(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Product], output: tuple[Tensor, Tensor]) -> None:
        x, filters, ctx.product = inputs
        ctx.save_for_backward(x, filters)
        ctx.set_materialize_grads(False)

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
    spread = product.energy_backward(by_energy, x)
    if by_x is None:
        by_x = torch.zeros_like(x)
    if x.dtype == spread.dtype:
        product.group_input(by_x).addcmul_(product.group_input(x), spread, value=2)
        return by_x
    share = product.group_input(wide(x)) * spread
    return (share.mul_(2).add_(product.group_input(by_x))).to(x.dtype).reshape(x.shape)


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
