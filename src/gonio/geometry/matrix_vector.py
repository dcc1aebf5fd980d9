"""Products of a matrix with a vector that all cores share."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["matrix_vector"]

SHARED_FROM = 2**18  # entries, 1 MiB in float32: below, one core is as fast as several with what it costs to call them


def matrix_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix @ vector for a matrix (rows, columns); for its transpose pass ``matrix.T``.

    BLAS multiplies a matrix with a vector on a single core, which cannot read as fast as memory gives. As a batch of
    as many blocks as there are threads, each core reads its own: up to twice as fast on two.

    Example:
        >>> from gonio.geometry.matrix_vector import matrix_vector
        >>> matrix = torch.arange(6.0).view(2, 3)
        >>> matrix_vector(matrix, torch.ones(3)), matrix_vector(matrix.T, torch.ones(2))
        (tensor([ 3., 12.]), tensor([3., 5., 7.]))
    """
    if not matrix.is_cpu or matrix.numel() < SHARED_FROM or torch.compiler.is_compiling():
        return torch.mv(matrix, vector)
    stored = matrix if matrix.stride(1) == 1 else matrix.T
    parts = _parts(len(stored), torch.get_num_threads())
    if parts == 1:
        return torch.mv(matrix, vector)
    blocks = stored.unflatten(0, (parts, -1))
    if stored is matrix:
        return torch.bmm(vector.expand(parts, 1, -1), blocks.mT).view(-1)
    return torch.bmm(vector.view(parts, 1, -1), blocks).sum((0, 1))


@lru_cache(maxsize=256)
def _parts(rows: int, threads: int) -> int:
    """The largest number of equal blocks of rows that has a thread for each."""
    return max(parts for parts in range(1, max(1, min(rows, threads)) + 1) if rows % parts == 0)
