"""Gram matrices of filters, on whichever side of the matrix is smaller.

Note [Half of a Gram matrix]
    On CPU only the blocks on and above the diagonal are multiplied, with 4 blocks (1 + 1/4)/2 of the full product.
    Where the entries of a row follow one another in memory, the blocks on and below the diagonal are: BLAS
    multiplies many rows by few faster there than few by many, by a fifth to a half. A single product also pays for
    the copy of the other half: below some 200 rows it is faster whole, below some 400 in 2 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["accumulate_symmetric", "add_product_", "mirror", "product", "small_side", "symmetric_product"]

# Below this many rows the blocks are too small for their products to be efficient.
BLOCKED_FROM = 64
FOUR_FROM = 192
# The same for one product that is not added to others.
SINGLE_BLOCKED_FROM = 192
SINGLE_FOUR_FROM = 384
GRAIN = 64  # blocks that begin at its multiples are multiplied faster


def small_side(matrix: Tensor) -> Tensor:
    """The matrices turned so that rows are the smaller side: W or its transpose; a view."""
    return matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT


def symmetric_product(matrix: Tensor) -> Tensor:
    r""":math:`A A^\top` for each matrix of a stack. Not differentiable: for use inside a closed form.

    Note [Half of a Gram matrix]
    """
    count, rows, _ = matrix.shape
    if not _in_turn(matrix) or rows < SINGLE_BLOCKED_FROM:
        return product(matrix, matrix.mT)
    blocks = _blocks(rows, 4 if rows >= SINGLE_FOUR_FROM else 2)
    gram = matrix.new_empty(count, rows, rows)
    for index in range(count):
        a, whole = matrix[index], gram[index]
        half = whole.T if a.stride(-1) == 1 else whole
        for start, stop in blocks:
            torch.mm(a[start:stop], a[start:].T, out=half[start:stop, start:])
        _mirror(half, blocks)
    return gram


def accumulate_symmetric(gram: Tensor, matrix: Tensor) -> None:
    r"""Add :math:`A A^\top` to the blocks on and above the diagonal of `gram`; in place.

    The rest of `gram` is right only after :func:`mirror`. Where the entries of a row of A follow one another, hand
    in the transpose of the memory that is to be filled: Note [Half of a Gram matrix].
    """
    if not _in_turn(matrix):
        gram.baddbmm_(matrix, matrix.mT)
        return
    for a, g in zip(matrix.unbind(), gram.unbind(), strict=True):
        for start, stop in _usual_blocks(a.shape[0]):
            g[start:stop, start:].addmm_(a[start:stop], a[start:].T)


def mirror(gram: Tensor) -> None:
    """Copy the blocks above the diagonal to those below it; in place."""
    _mirror(gram, _usual_blocks(gram.shape[-1]))


def _mirror(gram: Tensor, blocks: Sequence[tuple[int, int]]) -> None:
    for start, stop in blocks[:-1]:
        gram[..., stop:, start:stop] = gram[..., start:stop, stop:].mT


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a @ b for each matrix of two stacks; not differentiable.

    On CPU torch's batched product is slower than the single one where there is little to batch.
    """
    if not _in_turn(a):
        return torch.bmm(a, b, out=out)
    if len(a) == 1:
        return torch.mm(a[0], b[0]).unsqueeze(0) if out is None else torch.mm(a[0], b[0], out=out[0]).unsqueeze(0)
    out = a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out
    for x, y, z in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
        torch.mm(x, y, out=z)
    return out


def add_product_(target: Tensor, a: Tensor, b: Tensor, *, alpha: float) -> None:
    """target ← target + alpha · a @ b for each matrix of the stacks."""
    if not _in_turn(a):
        target.baddbmm_(a, b, alpha=alpha)
        return
    for index in range(len(a)):
        target[index].addmm_(a[index], b[index], alpha=alpha)


def _in_turn(matrix: Tensor) -> bool:
    """Whether the matrices of a stack are multiplied one after another."""
    return matrix.device.type == "cpu" and (matrix.shape[0] == 1 or matrix.shape[-2] >= BLOCKED_FROM)


def _usual_blocks(rows: int) -> list[tuple[int, int]]:
    return _blocks(rows, 4 if rows >= FOUR_FROM else 2 if rows >= BLOCKED_FROM else 1)


def _blocks(rows: int, count: int) -> list[tuple[int, int]]:
    """Beginnings and ends of about as many parts."""
    size = max(1, -(-rows // count))
    if rows >= 4 * count * GRAIN:
        size = -(-size // GRAIN) * GRAIN
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
