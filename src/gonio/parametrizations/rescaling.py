"""Filters of given norms: w_i = g_i v_i / ‖v_i‖, by torch's fused kernels where they apply."""

from __future__ import annotations

import torch
from torch import Tensor

from gonio.geometry.norms import safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations.eager import is_eager
from gonio.parametrizations.filters import by_filter

__all__ = ["rescaled"]

_ONES = (1,) * 8
_SMALLEST = {dtype: torch.finfo(dtype).tiny ** 0.5 for dtype in (torch.float32, torch.float64)}


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
    if not raw.is_cpu or layout.transposed or not is_eager(raw, norms):
        return _formula(raw, norms, layout, floor)
    if raw.dim() == 4 and not raw.is_contiguous():
        # channels_last: a filter is a sum over its entries in whatever order they lie
        return _fused(raw.permute(0, 2, 3, 1).contiguous(), norms, floor).permute(0, 3, 1, 2)
    return _fused(raw.contiguous(), norms, floor)


def _formula(raw: Tensor, norms: Tensor, layout: Layout, floor: Tensor | None) -> Tensor:
    """In plain operations: for compiled graphs, transforms of functions, other devices and layouts."""
    filters, dims = by_filter(raw, layout)
    each = [1 if d in dims else n for d, n in enumerate(filters.shape)]
    norm = safe_norm(filters, dims, keepdim=True)
    zero = norm == 0 if floor is None else (norm == 0) | (norm <= floor.view(each))
    return (filters * (norms.view(each) * norm.masked_fill(zero, torch.inf).reciprocal())).view_as(raw)


def _fused(raw: Tensor, norms: Tensor, floor: Tensor | None) -> Tensor:
    """By torch's kernels, which read the weight once and write it once; plain operations take three times as long.

    The kernels are NaN at a zero filter, which plain operations are not; there seldom is one, and to look costs
    little on CPU. Their own second derivative takes the norms for constants (gradgradcheck fails, torch 2.13), so
    gradients that are to be differentiated again are replaced by those of the formula.
    """
    each = norms.view(-1, *_ONES[: raw.dim() - 1])
    weight, found = torch._weight_norm_interface(raw, each, 0)
    excess = found if floor is None else found - floor.view_as(found)
    if not excess.min().item() > _SMALLEST[found.dtype]:
        return _formula(raw, norms, Layout(), floor)
    if weight.grad_fn is not None:
        weight.grad_fn.register_hook(_Differentiable(raw, each))
    return weight


class _Differentiable:
    """After the backward kernel, if its results will be differentiated: the same from operations that can be.

    An object, and not an autograd function around the kernels, which would cost as much as they do on small layers.
    """

    __slots__ = ("each", "raw")

    def __init__(self, raw: Tensor, each: Tensor) -> None:
        self.raw, self.each = raw, each

    def __call__(self, found: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            return None
        ours = _gradients(self.raw, self.each, grads[0])
        return tuple(None if theirs is None else mine for mine, theirs in zip(ours, found, strict=True))


def _gradients(raw: Tensor, norms: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass, without zero filters, in operations that can be differentiated again."""
    dims = tuple(range(1, raw.dim()))
    inverse = safe_norm(raw, dims, keepdim=True).reciprocal()
    direction = raw * inverse
    along = (grad * direction).sum(dims, keepdim=True)
    return norms * inverse * (grad - direction * along), along
