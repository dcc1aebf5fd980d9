"""Gram matrices of filters, on whichever side of the matrix is smaller.

Note [Half of a Gram matrix]
    On CPU only the blocks on and above the diagonal are multiplied, with 4 blocks (1 + 1/4)/2 of the full product.
    Where the entries of a row follow one another in memory, the blocks on and below the diagonal are: BLAS
    multiplies many rows by few faster there than few by many, by a fifth to a half.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["accumulate_symmetric", "mirror", "product", "small_side", "symmetric_product"]

# Below this many rows the blocks are too small for their products to be efficient.
BLOCKED_FROM = 64
FOUR_FROM = 128


def small_side(matrix: Tensor) -> Tensor:
    """The matrices turned so that rows are the smaller side: W or its transpose; a view."""
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def symmetric_product(matrix: Tensor) -> Tensor:
    r""":math:`A A^\top` for each matrix of a stack. Not differentiable: for use inside a closed form.

    Note [Half of a Gram matrix]
    """
    count, rows, _ = matrix.shape
    if not _in_turn(matrix):
        return matrix @ matrix.mT
    return mirror(accumulate_symmetric(matrix.new_zeros(count, rows, rows), matrix))


def accumulate_symmetric(gram: Tensor, matrix: Tensor) -> Tensor:
    r"""Add :math:`A A^\top` to half of the blocks of `gram`, which began as zeros; in place.

    The rest of `gram` is right only after :func:`mirror`.
    """
    if not _in_turn(matrix):
        return gram.baddbmm_(matrix, matrix.mT)
    half = gram.mT if matrix.stride(-1) == 1 else gram
    for a, g in zip(matrix, half, strict=True):
        for start, stop in _blocks(len(a)):
            g[start:stop, start:].addmm_(a[start:stop], a[start:].T)
    return gram


def mirror(gram: Tensor) -> Tensor:
    """Make a Gram matrix whole of which one half of the blocks is there and the other zero; in place."""
    if not _in_turn(gram):
        return gram
    for start, stop in _blocks(gram.shape[-1]):
        above, below = gram[:, start:stop, stop:], gram[:, stop:, start:stop]
        below.copy_(above.add_(below.mT).mT)
    return gram


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a @ b for each matrix of two stacks; not differentiable.

    On CPU torch's batched product is slower than the single one where there is little to batch.
    """
    if not _in_turn(a):
        return torch.bmm(a, b, out=out)
    out = a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out
    for x, y, z in zip(a, b, out, strict=True):
        torch.mm(x, y, out=z)
    return out


def _in_turn(matrix: Tensor) -> bool:
    """Whether the matrices of a stack are multiplied one after another."""
    return matrix.device.type == "cpu" and (len(matrix) == 1 or matrix.shape[-2] >= BLOCKED_FROM)


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    count = 4 if rows >= FOUR_FROM else 2 if rows >= BLOCKED_FROM else 1
    size = max(1, -(-rows // count))
    return ((start, min(start + size, rows)) for start in range(0, rows, size))
