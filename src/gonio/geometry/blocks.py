"""Stored matrices of any size, read in blocks: norms, non-finite entries, Gram matrix, directions of rows.

This module, `pairs` and `spectra.spectrum_estimate` return the plain numbers that :func:`gonio.measure` reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, inf, isfinite, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gonio.geometry.norms import computed_in, gram, in_range, least_norm, matrix_vector, normalize

BLOCK = 1 << 20  # entries of one block: 4 MiB in float32, which stays in the cache
HELD = 5 * 10**7  # entries up to which a matrix that is read tens of times is held in float32
SMALL = 1e-140  # norm from which on squares are in the range of float64
COSINE_WIDTH = 256  # filters per block of cosines; its square on the diagonal is computed twice

CosineBlock = tuple[int, Tensor, Tensor]
"""(start, cosines, rows): for each matrix of a stack the cosines of all filters from position `start` on (rows) with
the first of them (columns), and the row numbers in the matrix of the filters from `start` on."""


@dataclass(frozen=True, eq=False)
class StoredDifference:
    """after − before of two stored tensors of one shape and dtype: computed where it is read, in float32 at least."""

    before: Tensor
    after: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.before.shape

    @property
    def dtype(self) -> torch.dtype:
        return computed_in(self.before.dtype)

    @property
    def device(self) -> torch.device:
        return self.before.device

    @property
    def mT(self) -> StoredDifference:
        return StoredDifference(self.before.mT, self.after.mT)

    def stride(self, dim: int) -> int:
        return self.before.stride(dim)

    def numel(self) -> int:
        return self.before.numel()

    def flatten(self, start: int = 0, end: int = -1) -> StoredDifference:
        """Some dimensions in one, of both tensors."""
        return StoredDifference(self.before.flatten(start, end), self.after.flatten(start, end))

    def unsqueeze(self, dim: int) -> StoredDifference:
        return StoredDifference(self.before.unsqueeze(dim), self.after.unsqueeze(dim))

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, index: Any) -> Tensor:
        """The values at an index; of all, `[...]`."""
        before, after = self.before[index].to(self.dtype), self.after[index]
        return after - before if after.dtype == self.dtype else after.to(self.dtype).sub_(before)

    def __iter__(self) -> Iterator[StoredDifference]:
        """The change of each matrix of a stack."""
        return (StoredDifference(before, after) for before, after in zip(self.before, self.after, strict=True))


Stored = Tensor | StoredDifference
"""What can be read in blocks."""


def tiles(matrix: Stored, *, longest: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks of a matrix in float32 at least, each with its first row and first column; rows are cut if too long.

    A block is to be read only, until the next one is read: it is a part of the matrix itself where its dtype is that
    of the blocks, and else one buffer that all blocks share.
    """
    n, d = matrix.shape
    width = max(1, min(d, longest or BLOCK))
    height = max(1, min(n, BLOCK // width))
    places = [(slice(i, i + height), slice(j, j + width)) for i in range(0, n, height) for j in range(0, d, width)]
    if isinstance(matrix, Tensor) and matrix.dtype == computed_in(matrix.dtype):
        yield from ((rows.start, columns.start, matrix[rows, columns]) for rows, columns in places)
        return
    buffer = torch.empty(height * width, dtype=computed_in(matrix.dtype), device=matrix.device)
    for place in places:
        part = (matrix.after if isinstance(matrix, StoredDifference) else matrix)[place]
        tile = buffer[: part.numel()].view(part.shape).copy_(part)
        tile = tile.sub_(matrix.before[place].to(tile.dtype)) if isinstance(matrix, StoredDifference) else tile
        yield place[0].start, place[1].start, tile


def row_blocks(matrix: Stored) -> Iterator[tuple[int, Tensor]]:
    """Like :func:`tiles`, but of whole rows, however long, each with its first row."""
    return ((top, rows) for top, _, rows in tiles(matrix, longest=matrix.shape[1]))


def column_blocks(matrix: Stored) -> Iterator[tuple[int, Tensor]]:
    """Like :func:`tiles`, but of whole columns, each with its first column; of a transposed matrix rows are read."""
    if matrix.stride(1) != 1:
        return ((left, rows.mT) for left, rows in row_blocks(matrix.mT))
    return ((left, columns) for _, left, columns in tiles(matrix, longest=max(1, BLOCK // len(matrix))))


def products(matrix: Stored, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Wᵀx and W Wᵀx of W/scale for columns x, from one pass over W."""
    images, total = [], torch.zeros_like(x)
    for _, block in column_blocks(matrix):
        block = block if scale == 1 else block / scale
        image = block.mT @ x
        images.append(image)
        total.addmm_(block, image)
    return torch.cat(images), total


def normal_product(matrix: Stored, v: Tensor, *, scale: float = 1.0) -> Tensor:
    """WᵀW v of W/scale for a vector v, or for each row of a matrix v, from one pass over W."""
    total = torch.zeros_like(v)
    for _, block in row_blocks(matrix):
        block = block if scale == 1 else block / scale
        if v.ndim == 1:
            total += matrix_vector(block.mT, matrix_vector(block, v))
        else:
            total.addmm_(v @ block.mT, block)
    return total


def frobenius_norm(matrix: Stored) -> float:
    """The norm of all entries, in float64."""
    return hypot(*(_norm(tile) for _, _, tile in tiles(matrix)))


def _norm(tile: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tile, dtype=torch.float64))
    if tile.dtype == torch.float64 and not SMALL < norm < inf:
        norm = float(_scaled_norms(tile.reshape(1, -1)))
    return norm


def _scaled_norms(rows: Tensor) -> Tensor:
    """The norms of rows whose squares may leave the range of float64."""
    largest = rows.abs().amax(1, keepdim=True)
    scale = largest.masked_fill(~((largest > 0) & (largest < inf)), 1)
    return torch.linalg.vector_norm(rows / scale, dim=1) * scale[:, 0]


def row_directions(rows: Tensor) -> Tensor:
    """Unit vectors of rows of any size, in float32 at least; a row that counts as zero is 0."""
    return normalize(in_range(rows.to(computed_in(rows.dtype))))


def row_norms(matrix: Tensor) -> Tensor:
    """The norm of each row in float64; 0 only for rows of zeros.

    Squares are summed in float64, at the scale of the row's largest entry where they leave its range.
    """
    # Results go into tensors that are there: small ones between large temporaries would make the heap grow.
    count, width = matrix.shape
    norms, step = torch.empty(count, dtype=torch.float64, device=matrix.device), max(1, BLOCK // width)
    for start in range(0, count, step):
        rows = matrix[start : start + step]
        parts = torch.empty(-(-width // BLOCK), len(rows), dtype=torch.float64, device=matrix.device)
        for part, columns in zip(parts, rows.split(BLOCK, dim=1), strict=True):
            part.copy_(torch.linalg.vector_norm(columns.double(), dim=1))
        norms[start : start + step] = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(parts, dim=0)
    if matrix.dtype == torch.float64:
        for some in (~((norms > SMALL) & (norms < inf))).nonzero().flatten().split(step):
            norms[some] = _scaled_norms(matrix[some])
    return norms


def have_direction(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether rows of these finite norms have a direction: they do not count as zero, see Note [Zero vectors]."""
    return norms >= least_norm(computed_in(dtype))


@dataclass(frozen=True)
class NormSummary:
    """Distribution of the filter norms of a weight."""

    rms: float  # of the entries
    frobenius: float  # norm of the whole weight
    mean: float
    std: float  # with denominator n
    quantiles: tuple[float, ...]  # least, quartiles (nearest order statistic), largest
    nonzero_min: float | None  # None if all are 0
    zeros: int

    @classmethod
    def of(cls, norms: Tensor, dim: int) -> NormSummary:
        """Summary of at least one finite norm, from :func:`row_norms` and on the CPU, of filters of length `dim`."""
        return cls.of_each(norms[None], dim)[0]

    @classmethod
    def of_each(cls, norms: Tensor, dim: int) -> list[NormSummary]:
        """:meth:`of` of each row of norms."""
        ordered = np.sort(norms.numpy(), axis=1)  # on short vectors NumPy takes a third of the time of torch
        n, most, zeros = ordered.shape[1], ordered[:, -1], (ordered == 0).sum(1).tolist()
        scaled = ordered / np.where(most == 0, 1.0, most)[:, None]  # the square of 1e200 overflows
        frobenius, mean = np.sqrt(np.square(scaled).sum(1)) * most, scaled.mean(1)
        std = np.sqrt(np.square(scaled - mean[:, None]).mean(1)) * most
        quantiles = ordered[:, [round(quarter / 4 * (n - 1)) for quarter in range(5)]].tolist()
        columns = (c.tolist() for c in (frobenius / sqrt(n * dim), frobenius, mean * most, std))
        return [
            cls(rms, whole, middle, spread, tuple(five), float(row[zero]) if zero < n else None, zero)
            for rms, whole, middle, spread, five, row, zero in zip(*columns, quantiles, ordered, zeros, strict=True)
        ]


def count_nonfinite(tensor: Tensor) -> tuple[int, tuple[int, ...] | None]:
    """Number of entries that are NaN or infinite, and the index of the first of them."""
    flat = tensor.reshape(-1)
    count, first = 0, None
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        part = part.float() if part.element_size() == 1 else part
        if isfinite(float(part.sum())):  # a non-finite entry makes the sum non-finite: a twentieth of the time
            continue
        bad = (~torch.isfinite(part)).nonzero()  # none where only the sum was out of range
        if first is None and len(bad):
            first = tuple(int(i) for i in torch.unravel_index(bad[0, 0] + start, tensor.shape))
        count += len(bad)
    return count, first


def safe_scale(matrix: Stored) -> float:
    """A divisor that keeps products in range: the largest absolute entry, or 1 if that is between 1e-10 and 1e10."""
    ends = (float(end) for _, _, tile in tiles(matrix) for end in torch.aminmax(tile))
    largest = max(map(abs, ends), default=0.0)
    return 1.0 if largest == 0 or 1e-10 < largest < 1e10 else largest


@dataclass(frozen=True)
class GramMatrix:
    """W Wᵀ/scale² or WᵀW/scale² of each matrix of a stack, whichever is smaller, in float64.

    Singular values and cosines follow from it.
    """

    values: Tensor  # (matrices, s, s)
    scale: Tensor  # (matrices,): :func:`safe_scale` of each
    of_filters: bool  # whether it is W Wᵀ
    dtype: torch.dtype  # in which figures of W are computed otherwise

    @classmethod
    def of(cls, matrices: Tensor) -> GramMatrix:
        """The Gram matrices of (matrices, n, d) with finite entries, in the CPU's memory."""
        n, d = matrices.shape[1:]
        scale = torch.ones(len(matrices), dtype=torch.float64, device="cpu")
        wide = matrices.double().contiguous()
        if matrices.dtype == torch.float64:  # squares of others are in range
            scale = torch.tensor([safe_scale(matrix) for matrix in matrices], dtype=torch.float64, device="cpu")
            wide = wide if bool((scale == 1).all()) else wide / scale[:, None, None]
        wide = wide if n <= d else wide.mT
        values = gram(wide[0])[None] if len(wide) == 1 else gram(wide)
        return cls(values, scale, n <= d, computed_in(matrices.dtype))

    @property
    def has_cosines(self) -> bool:
        """Whether it is W Wᵀ and no filter counts as zero."""
        least = (least_norm(self.dtype) / self.scale[:, None]) ** 2
        return self.of_filters and bool((self.values.diagonal(dim1=1, dim2=2) >= least).all())

    def cosines(self) -> Iterator[CosineBlock]:
        """The cosines of all pairs of filters, block by block."""
        inverse = self.values.diagonal(dim1=1, dim2=2).rsqrt()
        count = inverse.shape[1]
        rows = torch.arange(count, device="cpu")
        for start in range(0, count - 1, COSINE_WIDTH):
            stop = min(count, start + COSINE_WIDTH)
            scaled = self.values[:, start:, start:stop] * inverse[:, start:, None]
            yield start, scaled.mul_(inverse[:, None, start:stop]).to(self.dtype), rows[start:]
