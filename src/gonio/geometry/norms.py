"""Norms and unit vectors whose values and gradients are finite at zero."""

from __future__ import annotations

import torch
from torch import Tensor

from gonio.geometry.precision import check_matrix, widen

__all__ = ["filter_norms", "normalize", "safe_norm"]

# Note [Zero vectors]
# A vector whose squares sum to less than the smallest normal number of its dtype (a norm below 1.1e-19
# in float32) counts as zero: norm 0, direction 0, both with gradient 0. Above it, first and second
# derivatives are representable. No eps is added, so that norms of small filters are not biased.


def safe_norm(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    r"""Euclidean norm :math:`\lVert x \rVert = \sqrt{\sum x_i^2}` with a finite gradient at 0.

    The gradient is :math:`x / \lVert x \rVert`, and the subgradient 0 where the norm is 0. Unlike
    ``torch.linalg.vector_norm`` it is fast over a channel dimension on CPU (plain multiply and sum).

    Args:
        x: any floating-point tensor. Entries above 1.8e19 in float32 overflow to infinity.
        dim: the dimension(s) summed over.
        keepdim: keep them with size 1.

    Returns:
        The norm, in float32 if `x` is narrower (the norm of float16 numbers may exceed float16).

    Example:
        >>> x = torch.zeros(3, requires_grad=True)
        >>> gonio.geometry.safe_norm(x, 0).backward(); x.grad
        tensor([0., 0., 0.])
    """
    x = widen(x)
    square = (x * x).sum(dim, keepdim)
    zero = square < torch.finfo(square.dtype).tiny
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def normalize(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Unit vectors :math:`x / \lVert x \rVert`; a zero vector stays zero.

    The gradient is :math:`(I - \hat x \hat x^\top) / \lVert x \rVert`, and 0 at zero, where
    ``F.normalize`` has one of size 1e12.

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
    wide = widen(x)
    square = (wide * wide).sum(dim, keepdim=True)
    zero = square < torch.finfo(square.dtype).tiny
    scale = square.masked_fill(zero, 1).rsqrt().masked_fill(zero, 0)
    return (wide * scale).to(x.dtype)


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
