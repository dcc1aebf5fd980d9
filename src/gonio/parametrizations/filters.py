"""A weight as filters and as matrices, without copies, and filters of given norms."""

from __future__ import annotations

import torch
from torch import Tensor

from gonio.geometry.norms import safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations import kernels

__all__ = ["by_filter", "filter_size", "from_matrices", "matrices_of", "rescaled"]


def by_filter(weight: Tensor, layout: Layout) -> tuple[Tensor, tuple[int, ...]]:
    """A view of `weight`, and its dimensions that belong to one filter; the other dimensions number the filters.

    Reductions over these dimensions with ``keepdim=True`` have one number per filter, broadcast against
    the view, and in row-major order count filters as :func:`gonio.geometry.matrix_view` does. Unlike that
    function this one never copies, so it keeps the memory format of the weight.

    Shape:
        - output: the weight itself, or (groups, in, out, *kernel) if the layout is transposed.
    """
    if not layout.transposed:
        return weight, tuple(range(1, weight.dim()))
    split = weight.unflatten(0, (layout.matrices, -1))
    return split, (1, *range(3, split.dim()))


def filter_size(weight: Tensor, layout: Layout) -> int:
    """The number of entries of one filter, which is the fan-in of the layer."""
    filters = layout.matrices * weight.shape[1] if layout.transposed else weight.shape[0]
    return weight.numel() // filters


def matrices_of(weight: Tensor, layout: Layout) -> Tensor:
    """:func:`gonio.geometry.matrix_view` of a weight whose shape was checked when it was bound."""
    if layout.matrices == 1 and not layout.transposed:
        return weight.flatten(1).unsqueeze(0)
    filters = weight.unflatten(0, (layout.matrices, -1))
    return (filters.transpose(1, 2) if layout.transposed else filters).flatten(2)


def from_matrices(matrices: Tensor, shape: torch.Size, layout: Layout) -> Tensor:
    """The inverse of :func:`matrices_of`: the weight of `shape` with these matrices."""
    if not layout.transposed:
        return matrices.reshape(shape)
    filters = matrices.reshape(*matrices.shape[:2], shape[0] // layout.matrices, *shape[2:])
    return filters.transpose(1, 2).reshape(shape)


def rescaled(raw: Tensor, norms: Tensor, layout: Layout, *, floor: Tensor | None = None) -> Tensor:
    r"""Filters of given norms, :math:`w_i = g_i v_i / \lVert v_i \rVert`; a zero filter stays zero, with gradient 0.

    A filter counts as zero as in Note [Zero vectors] of :mod:`gonio.geometry.norms`, or if its norm is at most
    its floor.

    Args:
        raw: the stored tensor.
        norms: one number per filter, in the order of the matrix view.
        layout: how the tensor is stored.
        floor: one number per filter: norms up to this value are rounding errors.
    """
    if not layout.transposed and kernels.apply_to(raw, norms):
        found = kernels.rescaled(raw, norms, floor)
        if found is not None:
            return found
    filters, dims = by_filter(raw, layout)
    each = [1 if d in dims else n for d, n in enumerate(filters.shape)]
    norm = safe_norm(filters, dims, keepdim=True)
    zero = norm == 0 if floor is None else (norm == 0) | (norm <= floor.view(each))
    return (filters * (norms.view(each) * norm.masked_fill(zero, torch.inf).reciprocal())).view_as(raw)
