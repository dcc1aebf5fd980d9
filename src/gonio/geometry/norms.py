"""Norms and unit vectors whose values and gradients are finite at zero."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from gonio.geometry.precision import check_matrix, widen

__all__ = ["filter_norms", "least_norm", "normalize", "safe_norm", "unit_vectors"]

# Note [Zero vectors]
# A vector counts as zero, with norm 0, direction 0 and gradient 0, if its norm is below least_norm: 4.5e-13
# in float32 and bfloat16, 5.6e-103 in float64, 6.1e-5 in float16 (its smallest normal number). Above it, first
# and second derivatives of norm and direction, which grow as 1/|x| and 1/|x|², are representable with all
# that is computed on the way (1/|x|³). No eps is added, so that norms of small filters are not biased.


def least_norm(dtype: torch.dtype) -> float:
    """Norm below which a vector of `dtype` counts as zero; see Note [Zero vectors]."""
    computed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    return max(2 * computed.tiny ** (1 / 3), torch.finfo(dtype).tiny)


def safe_norm(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    r"""Euclidean norm :math:`\lVert x \rVert = \sqrt{\sum x_i^2}` with a finite gradient at 0.

    The gradient is :math:`x / \lVert x \rVert`, and the subgradient 0 where the norm is 0. Unlike
    ``torch.linalg.vector_norm`` it is fast over a channel dimension on CPU (plain multiply and sum).

    Args:
        x: any floating-point tensor. Norms above 1.8e19 in float32 overflow to infinity, and those
            below :func:`least_norm` (4.5e-13 in float32) count as 0.
        dim: the dimension(s) summed over.
        keepdim: keep them with size 1.

    Returns:
        The norm, in float32 if `x` is narrower (the norm of float16 numbers may exceed float16).

    Example:
        >>> x = torch.zeros(3, requires_grad=True)
        >>> gonio.geometry.safe_norm(x, 0).backward(); x.grad
        tensor([0., 0., 0.])
    """
    root, zero = _root(widen(x), dim, keepdim, least_norm(x.dtype))
    return root.masked_fill(zero, 0)


def _root(x: Tensor, dim: int | tuple[int, ...], keepdim: bool, least: float) -> tuple[Tensor, Tensor]:
    """The norm, 1 where it counts as zero; and where that is."""
    square = (x * x).sum(dim, keepdim)
    zero = square < least * least
    return square.masked_fill(zero, 1).sqrt(), zero


def normalize(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Unit vectors :math:`x / \lVert x \rVert`; a zero vector stays zero.

    The gradient is :math:`(I - \hat x \hat x^\top) / \lVert x \rVert`, and 0 at zero, where
    ``F.normalize`` has one of size 1e12. A norm beyond 1.8e19 in float32 overflows as in :func:`safe_norm`,
    and such a vector becomes 0 as with ``F.normalize``.

    Args:
        x: any floating-point tensor.
        dim: the dimension(s) that form one vector.

    Returns:
        A tensor of the shape and dtype of `x`; the norms are accumulated in float32 at least.

    Invariances:
        Rescaling by a positive factor.

    Example:
        >>> gonio.geometry.normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return unit_vectors(x, dim).to(x.dtype)


def unit_vectors(x: Tensor, dim: int | tuple[int, ...] = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`normalize` with a result in `dtype`, or else in float32 at least.

    What counts as zero is decided by the dtype of `x`, which has to hold the gradient.
    """
    wide = widen(x) if dtype is None else x.to(dtype)
    root, zero = _root(wide, dim, True, least_norm(x.dtype))
    # Divided by infinity, zero vectors and their gradients become 0 without a further pass over them; a
    # product with rsqrt would cube 1/|x| in its derivative.
    return wide / root.masked_fill(zero, inf)


def filter_norms(matrix: Tensor) -> Tensor:
    """Euclidean norm of each filter (row).

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: (n,) or (groups, n), in float32 at least.

    Raises:
        InvalidArgumentError: for a tensor of another rank.

    Example:
        >>> gonio.geometry.filter_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([5., 0.])
    """
    check_matrix(matrix, "filter_norms")
    return safe_norm(matrix, -1)
