"""A weight and the dimensions along which one of its filters runs, without moving memory."""

from __future__ import annotations

from math import prod

from torch import Tensor

from gonio.geometry.views import Layout

__all__ = ["by_filter", "filter_size"]


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
    view, dims = by_filter(weight, layout)
    return prod(view.shape[d] for d in dims)
