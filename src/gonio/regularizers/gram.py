"""Gram matrices of filters, on whichever side of the matrix is smaller."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

__all__ = ["accumulate_symmetric", "mirror", "product_like", "small_side", "symmetric_product"]

# Below this many rows the blocks are too small for their products to be efficient.
BLOCKED_FROM = 192
BLOCKS = 4


def small_side(matrix: Tensor) -> Tensor:
    """The matrices turned so that rows are the smaller side: W or its transpose; a view."""
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def symmetric_product(matrix: Tensor) -> Tensor:
    r""":math:`A A^\top` for each matrix of a stack. Not differentiable: for use inside a closed form.

    On CPU only the blocks on and above the diagonal are multiplied: (1 + 1/4)/2 of the full product.
    """
    count, rows, _ = matrix.shape
    if not _blocked(matrix):
        return matrix @ matrix.mT
    return mirror(accumulate_symmetric(matrix.new_zeros(count, rows, rows), matrix))


def accumulate_symmetric(gram: Tensor, matrix: Tensor) -> Tensor:
    r"""Add :math:`A A^\top` to the blocks on and above the diagonal of `gram`; in place.

    The rest of `gram` is right only after :func:`mirror`.
    """
    if not _blocked(matrix):
        return gram.baddbmm_(matrix, matrix.mT)
    for a, g in zip(matrix, gram, strict=True):
        for start, stop in _blocks(len(a)):
            g[start:stop, start:].addmm_(a[start:stop], a[start:].T)
    return gram


def mirror(gram: Tensor) -> Tensor:
    """Copy the blocks above the diagonal to those below it; in place."""
    for start, stop in _blocks(gram.shape[-1]):
        gram[:, stop:, start:stop] = gram[:, start:stop, stop:].mT
    return gram


def product_like(like: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a @ b with rows or columns running through memory as they do in `like`.

    Elementwise work on two tensors that lie differently costs more than the product itself.
    """
    return (b.mT @ a.mT).mT if like.stride(-2) == 1 else a @ b


def _blocked(matrix: Tensor) -> bool:
    return matrix.shape[-2] >= BLOCKED_FROM and matrix.device.type == "cpu"


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    size = -(-rows // BLOCKS)
    return ((start, min(start + size, rows)) for start in range(0, rows, size))
