"""Filters of given norms: w_i = g_i v_i / ‖v_i‖, by torch's fused kernels where they apply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gonio.geometry.norms import safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations.eager import is_eager
from gonio.parametrizations.filters import by_filter

__all__ = ["rescaled"]


def rescaled(raw: Tensor, norms: Tensor, layout: Layout, *, floor: Tensor | None = None) -> Tensor:
    """`raw` with each filter scaled to the norm given for it; a zero filter stays zero, with gradient 0.

    A filter counts as zero as in Note [Zero vectors] of :mod:`gonio.geometry.norms`, or where its norm is at most
    a floor given by the caller.

    Args:
        raw: the stored tensor.
        norms: one number per filter, in the order of the matrix view.
        layout: how the tensor is stored.
        floor: norms of `raw` up to which its filters are rounding, one per filter.
    """
    if raw.device.type != "cpu" or layout.transposed or not is_eager(raw, norms):
        return _formula(raw, norms, layout, floor)
    if raw.dim() == 4 and not raw.is_contiguous():
        # channels_last: a filter is a sum over its entries in whatever order they lie
        last: Tensor = _Fused.apply(raw.permute(0, 2, 3, 1).contiguous(), norms, floor)
        return last.permute(0, 3, 1, 2)
    weight: Tensor = _Fused.apply(raw.contiguous(), norms, floor)
    return weight


def _formula(raw: Tensor, norms: Tensor, layout: Layout, floor: Tensor | None) -> Tensor:
    """In plain operations: for compiled graphs, transforms of functions, other devices and layouts."""
    filters, dims = by_filter(raw, layout)
    each = [1 if d in dims else n for d, n in enumerate(filters.shape)]
    norm = safe_norm(filters, dims, keepdim=True)
    zero = norm == 0 if floor is None else (norm == 0) | (norm <= floor.view(each))
    return (filters * (norms.view(each) * norm.masked_fill(zero, torch.inf).reciprocal())).view_as(raw)


class _Fused(torch.autograd.Function):
    """By torch's kernels, which read the weight once and write it once; plain operations take three times as long.

    The kernels are NaN at a zero filter; there seldom is one, and to look costs nothing on CPU. Their own second
    derivative takes the norms for constants (gradgradcheck fails, torch 2.13); here it is that of the formula.
    """

    @staticmethod
    def forward(ctx: Any, raw: Tensor, norms: Tensor, floor: Tensor | None) -> Tensor:
        weight, found = torch._weight_norm_interface(raw, _each(norms, raw), 0)
        smallest = torch.finfo(found.dtype).tiny ** 0.5
        excess = found if floor is None else found - floor.view_as(found)
        ctx.zero = None
        if excess.min().item() <= smallest:
            ctx.zero = excess <= smallest
            weight.masked_fill_(ctx.zero, 0)
            found = found.masked_fill(ctx.zero, 1)
        ctx.save_for_backward(raw, norms, found)
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        raw, norms, found = ctx.saved_tensors
        each = _each(norms, raw)
        if torch.is_grad_enabled():  # to be differentiated again
            return *_gradients(raw, each, ctx.zero, grad), None
        kernel = torch.ops.aten._weight_norm_interface_backward.default
        of_raw, of_norms = kernel(grad.contiguous(), raw, each, found, 0)
        if ctx.zero is not None:
            of_raw.masked_fill_(ctx.zero, 0)
            of_norms.masked_fill_(ctx.zero, 0)
        return of_raw, of_norms.view(-1), None


def _gradients(raw: Tensor, norms: Tensor, zero: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass in operations that can be differentiated again."""
    dims = tuple(range(1, raw.dim()))
    norm = safe_norm(raw, dims, keepdim=True)
    inverse = norm.masked_fill(norm == 0 if zero is None else zero, torch.inf).reciprocal()
    direction = raw * inverse
    along = (grad * direction).sum(dims, keepdim=True)
    return norms * inverse * (grad - direction * along), along.flatten()


def _each(norms: Tensor, raw: Tensor) -> Tensor:
    return norms.view(-1, *[1] * (raw.dim() - 1))
