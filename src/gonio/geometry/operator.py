"""The dense matrix of a convolution on a grid: small and slow, for checks and for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.precision import widen
from gonio.geometry.views import PLAIN, Layout

__all__ = ["operator_matrix", "unview_operator"]

CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def operator_matrix(weight: Tensor, size: Sequence[int], layout: Layout = PLAIN) -> Tensor:
    r"""The matrix :math:`K` with :math:`\operatorname{vec}(\text{conv}(x)) = K \operatorname{vec}(x)` on a grid.

    Exactly the layer's map without bias, with its stride, padding, padding mode, dilation and groups. Dense:
    memory is (out · out grid) × (in · in grid), so use it for grids of a few hundred pixels.

    Args:
        weight: of a convolution or transposed convolution.
        size: the input's spatial size, one number per kernel dimension.
        layout: how the weight is stored and applied; see :func:`layout_of`.

    Raises:
        InvalidArgumentError: if `size` does not have one number per kernel dimension.

    Example:
        >>> gonio.geometry.operator_matrix(torch.tensor([[[1.0, 2.0]]]), (3,))
        tensor([[1., 2., 0.],
                [0., 1., 2.]])

    See also:
        :func:`unview_operator`, its inverse.
    """
    dims = weight.ndim - 2
    if dims not in CONV or len(size) != dims:
        raise InvalidArgumentError(
            "operator_matrix() needs a convolution's weight and one grid size per kernel dimension",
            f"shape {tuple(weight.shape)} and size {tuple(size)}",
            "Give for example size=(8, 8) with a Conv2d weight.",
        )
    channels = weight.shape[0] if layout.transposed else weight.shape[1] * layout.groups
    count = channels * prod(size)
    basis = torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(count, channels, *size)
    return _apply(basis, weight, layout).reshape(count, -1).mT


def _apply(x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    dims = weight.ndim - 2
    stride, dilation, padding = layout.stride or 1, layout.dilation or 1, layout.padding or 0
    if layout.transposed:
        extra = layout.output_padding or 0
        return CONV_TRANSPOSE[dims](x, weight, None, stride, padding, extra, layout.groups, dilation)
    if layout.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layout.padding_mode == "zeros" else layout.padding_mode
        x, padding = F.pad(x, _pad_sides(weight, layout), mode=mode), 0
    return CONV[dims](x, weight, None, stride, padding, dilation, layout.groups)


def _pad_sides(weight: Tensor, layout: Layout) -> list[int]:
    """Padding of both sides per dimension, last dimension first, as F.pad reads it."""
    kernel = weight.shape[2:]
    dilation = layout.dilation or (1,) * len(kernel)
    if layout.padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(layout.padding, str):
        sides = [(0, 0)] * len(kernel)
    else:
        sides = [(p, p) for p in layout.padding or (0,) * len(kernel)]
    return [side for pair in reversed(sides) for side in pair]


def unview_operator(matrix: Tensor, shape: Sequence[int], size: Sequence[int], layout: Layout = PLAIN) -> Tensor:
    """The weight of `shape` whose :func:`operator_matrix` on the grid `size` is nearest to `matrix`.

    Each weight entry is the mean of the matrix entries that it fills: the exact inverse on operator matrices,
    the orthogonal projection onto them elsewhere. Taps that never touch the grid are 0.

    Raises:
        InvalidArgumentError: if `matrix` has another shape, or where two taps fill one entry of the matrix
            (reflected or replicated padding, or a periodic grid smaller than the dilated kernel).

    Example:
        >>> weight = torch.tensor([[[1.0, 2.0]]])
        >>> gonio.geometry.unview_operator(gonio.geometry.operator_matrix(weight, (3,)), (1, 1, 2), (3,))
        tensor([[[1., 2.]]])
    """
    wide = widen(matrix)  # sums of half-precision entries overflow
    zero = torch.zeros(tuple(shape), dtype=wide.dtype, device=wide.device)
    view, pull = torch.func.vjp(partial(operator_matrix, size=size, layout=layout), zero)[:2]
    if view.shape != matrix.shape:
        raise InvalidArgumentError(
            f"unview_operator() to {tuple(shape)} on the grid {tuple(size)} needs a matrix of {tuple(view.shape)}",
            f"{tuple(matrix.shape)}",
            "Pass what operator_matrix() returned for the same grid and layout.",
        )
    used = operator_matrix(torch.ones_like(zero), size, layout)
    if bool((used > 1.5).any()):
        raise InvalidArgumentError(
            "unview_operator() needs every entry of the operator to come from one tap",
            f"padding_mode={layout.padding_mode!r} on the grid {tuple(size)}, where some are sums of several",
            "Use zero padding, or a periodic grid at least as large as the dilated kernel.",
        )
    (total,) = pull(wide)
    (count,) = pull(used)
    return (total / count.clamp_min(1)).to(matrix.dtype)
