"""A weight and the dimensions along which one of its filters runs, without moving memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gonio.geometry.views import Layout

__all__ = ["by_filter", "filter_size", "from_matrices", "matrices_of"]


def by_filter(weight: Tensor, layout: Layout) -> tuple[Tensor, tuple[int, ...]]:
    """A view of `weight`, and its dimensions that belong to one filter; the others number the filters.

    Reductions over these dimensions with ``keepdim=True`` have one number per filter, broadcast against
    the view, and in row-major order count filters as :func:`gonio.geometry.matrix_view` does. Unlike that
    function this never copies, so the memory format of the weight survives.

    Shape:
        - output: the weight itself, or (groups, in, out, *kernel) if the layout is transposed.
    """
    if not layout.transposed:
        return weight, tuple(range(1, weight.dim()))
    split = weight.unflatten(0, (layout.matrices, -1))
    return split, (1, *range(3, split.dim()))


def filter_size(weight: Tensor, layout: Layout) -> int:
    """Entries of one filter: the fan-in of the layer."""
    filters = layout.matrices * weight.shape[1] if layout.transposed else weight.shape[0]
    return weight.numel() // filters


def matrices_of(weight: Tensor, layout: Layout) -> Tensor:
    """:func:`gonio.geometry.matrix_view` of a weight whose shape was checked when it was bound."""
    if layout.matrices == 1 and not layout.transposed:
        return weight.flatten(1).unsqueeze(0)
    filters = weight.unflatten(0, (layout.matrices, -1))
    return (filters.transpose(1, 2) if layout.transposed else filters).flatten(2)


def from_matrices(matrices: Tensor, shape: torch.Size, layout: Layout) -> Tensor:
    """The weight of `shape` with these matrices."""
    if not layout.transposed:
        return matrices.reshape(shape)
    filters = matrices.reshape(*matrices.shape[:2], shape[0] // layout.matrices, *shape[2:])
    return filters.transpose(1, 2).reshape(shape)
