"""The Gram matrix of a weight, from which singular values are read, and angles where filters are its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.geometry.norms import least_norm
from gonio.measuring.blocks import computed_in, tiles

__all__ = ["Block", "Gram", "scale_of"]

PARTS = 4  # blocks of rows
WIDTH = 512  # filters of one block of cosines

Block = tuple[int, Tensor, Tensor]
"""Where a block starts, its cosines (all filters from there on × the first of them), and the filters' numbers."""


@dataclass(frozen=True)
class Gram:
    """W Wᵀ/scale² or WᵀW/scale² of one matrix, whichever is smaller, in float64.

    Attributes:
        lower: right in the blocks on and below the diagonal, of which there are :data:`PARTS` × :data:`PARTS`, which
            is all that `eigvalsh` reads.
        scale: what W was divided by, so that no product over- or underflows.
        of_filters: whether it is W Wᵀ.
        dtype: in which W is computed elsewhere.
    """

    lower: Tensor
    scale: float
    of_filters: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, matrix: Tensor) -> Gram:
        """That of a matrix with finite entries."""
        n, d = matrix.shape
        scale = scale_of(matrix)
        wide = matrix.double() / scale
        return cls(_lower(wide if n <= d else wide.mT), scale, n <= d, computed_in(matrix.dtype))

    @property
    def has_cosines(self) -> bool:
        """Whether it is that of the filters, and none of them counts as zero."""
        return self.of_filters and bool(self.lower.diagonal().amin() >= (least_norm(self.dtype) / self.scale) ** 2)

    def cosines(self) -> Iterator[Block]:
        """The cosines of all pairs of filters, block by block."""
        inverse = self.lower.diagonal().rsqrt()
        rows = torch.arange(len(inverse), device=inverse.device)
        for top, bottom in _parts(len(inverse)):
            for start in range(top, min(bottom, len(inverse) - 1), WIDTH):
                stop = min(bottom, start + WIDTH)
                scaled = self.lower[start:, start:stop] * inverse[start:, None]
                yield start, scaled.mul_(inverse[start:stop]).to(self.dtype), rows[start:]


def scale_of(matrix: Tensor) -> float:
    """What to divide by so that no product over- or underflows: the largest entry, or 1 if it is of ordinary size."""
    largest = max((float(tile.abs().max()) for _, _, tile in tiles(matrix)), default=0.0)
    return 1.0 if largest == 0 or 1e-10 < largest < 1e10 else largest


def _lower(matrix: Tensor) -> Tensor:
    gram = matrix.new_zeros(len(matrix), len(matrix))
    for start, stop in _parts(len(matrix)):
        torch.mm(matrix[start:stop], matrix[:stop].mT, out=gram[start:stop, :stop])
    return gram


def _parts(n: int) -> list[tuple[int, int]]:
    """Beginnings and ends of the blocks of rows."""
    size = -(-n // PARTS)
    return [(start, min(start + size, n)) for start in range(0, n, size)]
