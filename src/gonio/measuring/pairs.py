"""Angles between the filters of a weight, in bounded memory: all pairs, or those of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import pi, sqrt

import torch
from torch import Tensor

from gonio.measuring.blocks import BLOCK, computed_in, directions_of, rows_at
from gonio.measuring.gram import Block, Gram
from gonio.measuring.neighbours import NEAR, near_pairs
from gonio.seeding import generator

__all__ = ["Pairs", "measure_pairs"]

SAMPLE = 4096  # filters per matrix; of more, this many are drawn
LENGTH = 1 << 24  # entries of the drawn filters, in float32 at once: 64 MiB
FEWEST = 16  # drawn, however long they are
LONG = 1 << 20  # length from which the drawn filters are not held in float32 either
BINS = 180  # degrees
DEGREES = 180 / pi
PRODUCT = 1 << 21  # entries of one product of directions, at most
PART = 1 << 19  # entries of it that are counted at once: 2 MiB, which stays in the cache


@dataclass(frozen=True)
class Pairs:
    """All unordered pairs of filters that share their inputs; angles in degrees.

    Attributes:
        mean_square_cosine: 1/d for random directions. `error`: its standard error where filters were drawn.
        coherence: largest absolute cosine; `closest`: the two filters that have it, counted over all groups.
        near: pairs with an absolute cosine of at least :data:`NEAR`; `opposite`: those of them with a negative one.
        histogram: pairs per degree.
        sampled: filters drawn from each matrix, where there are too many for all pairs; else None.
        searched: whether, beside the sample, all filters were searched for near duplicates.
    """

    count: int
    angle_mean: float
    angle_std: float
    mean_square_cosine: float
    coherence: float
    closest: tuple[int, int]
    near: int
    opposite: int
    histogram: tuple[int, ...]
    sampled: int | None
    error: float = 0.0
    searched: bool = False


def measure_pairs(matrices: Tensor, *, name: str, gram: Gram | None = None) -> Pairs | None:
    """The pairs within each matrix of (groups, n, d); None where no matrix has two directions.

    A zero filter has no direction and is left out, as is one with a non-finite entry. Memory is bounded by
    :data:`LENGTH` and a block of cosines, whatever n and d are.

    Args:
        name: seeds the sample that is drawn of many or long filters, so that it is the same every time.
        gram: of the matrix, where there is one and its Gram matrix is known.
    """
    total = _Totals()
    n, d = matrices.shape[1:]
    drawn = _drawn(n, d)
    for index, matrix in enumerate(matrices):
        order = _sample(n, drawn, f"{name}/{index}").to(matrix.device)
        known = gram if gram is not None and drawn == n and gram.has_cosines else None
        total.add(_cosines(matrix, order) if known is None else known.cosines(), len(order), index * n)
    found = total.pairs()
    if found is None or drawn == n:
        return found
    found = replace(found, sampled=drawn, error=total.error(n, drawn))
    return _search_all(matrices, found, name)


def _drawn(n: int, d: int) -> int:
    return min(n, SAMPLE, max(FEWEST, LENGTH // max(1, d)))


def _sample(n: int, drawn: int, name: str) -> Tensor:
    return torch.arange(n) if drawn == n else torch.randperm(n, generator=generator(0, "measure", name))[:drawn]


def _search_all(matrices: Tensor, found: Pairs, name: str) -> Pairs:
    """Near duplicates among all filters, of which the sample holds only some."""
    if found.near > found.count // 100:  # most filters are alike: the sample says it
        return found
    near, opposite, coherence, closest = 0, 0, found.coherence, found.closest
    for index, matrix in enumerate(matrices):
        pairs = near_pairs(matrix, name=f"{name}/{index}")
        if pairs is None:
            return found
        near += len(pairs.cosines)
        opposite += int((pairs.cosines < 0).sum())
        if len(pairs.cosines) and float(pairs.cosines.abs().max()) >= coherence:
            best = int(pairs.cosines.abs().argmax())
            coherence = float(pairs.cosines[best].abs())
            i, j = (int(v) + index * matrices.shape[1] for v in pairs.pairs[best])
            closest = (i, j)
    return replace(found, near=near, opposite=opposite, coherence=coherence, closest=closest, searched=True)


def _cosines(matrix: Tensor, order: Tensor) -> Iterator[Block]:
    """Where a block starts, its cosines (all filters from there on × the first of them), and the filters' numbers.

    In this order of the factors BLAS multiplies faster, and what lies below the block's square is contiguous.
    """
    if matrix.shape[1] > LONG:
        yield _from_gram(matrix, order)
        return
    unit, order = _directions(matrix, order)
    n, start = len(unit), 0
    while start < n - 1:
        stop = min(n, start + max(1, min(512, PRODUCT // (n - start))))
        yield start, unit[start:] @ unit[start:stop].mT, order[start:]
        start = stop


def _directions(matrix: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of these rows, without those that have no direction, and which rows are left."""
    unit = torch.empty(len(order), matrix.shape[1], dtype=computed_in(matrix.dtype), device=matrix.device)
    alive = torch.zeros(len(order), dtype=torch.bool, device=matrix.device)
    step = max(1, BLOCK // max(1, matrix.shape[1]))
    for start in range(0, len(order), step):
        part = directions_of(rows_at(matrix, order[start : start + step]))
        unit[start : start + step] = part
        norms = torch.linalg.vector_norm(part, dim=-1)  # 1, or 0 for a zero row, or not finite
        alive[start : start + step] = (norms > 0) & torch.isfinite(norms)
    if bool(alive.all()):
        return unit, order
    return unit[alive], order[alive]


def _from_gram(matrix: Tensor, order: Tensor) -> Block:
    """The same for a few very long filters, whose cosines are one block, from products of their parts."""
    rows = order.sort().values
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=matrix.device)
    for start in range(0, matrix.shape[1], BLOCK // FEWEST):
        part = rows_at(matrix[:, start : start + BLOCK // FEWEST], rows).double()
        gram += part @ part.mT
    norms = gram.diagonal().sqrt()
    alive = (norms > 0) & torch.isfinite(norms)
    scaled = gram[alive][:, alive] / norms[alive, None] / norms[None, alive]
    return 0, scaled.to(computed_in(matrix.dtype)), rows[alive]


@lru_cache(maxsize=8)  # blocks of one size are all but the last of a weight, and a mask takes ten times as long
def _below_diagonal(size: int, device: torch.device) -> Tensor:
    """Where the entries below the diagonal of a square block lie."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril_(-1).flatten().nonzero().flatten()


def _filters_at(rows: Tensor, width: int, top: int, place: int) -> tuple[int, int]:
    """Whose the cosine at this place of a part is that begins `top` rows down a block of `width` columns."""
    return int(rows[place % width]), int(rows[top + place // width])


def _counts(shifted: Tensor) -> Tensor:
    """How many lie in each degree; 180 counts to the last. A fifth of the time that `torch.histc` takes on CPU."""
    degrees = torch.add(shifted.new_full((), 90.0), shifted, alpha=-DEGREES)
    found = torch.bincount(degrees.flatten().to(torch.uint8), minlength=BINS + 1).double().cpu()
    found[BINS - 1] += found[BINS]
    return found[:BINS]


class _Totals:
    """Running sums over blocks, in float64."""

    def __init__(self) -> None:
        self.count = self.near = self.opposite = self.matrices = 0
        self.angle = self.square_angle = self.square_cosine = self.fourth = self.coherence = 0.0
        self.closest = (0, 0)
        self.histogram = torch.zeros(BINS, dtype=torch.float64)
        self.spread = 0.0  # variance over filters of the mean square cosine with the others, over all matrices

    def add(self, blocks: Iterable[Block], count: int, offset: int) -> None:
        """One matrix by the cosines of `count` filters, whose numbers are counted from `offset` over all matrices."""
        sums = torch.zeros(count, dtype=torch.float64)
        for start, cosines, rows in blocks:
            self._block(cosines, rows + offset, start, sums)
        if count > 2:
            self.spread += float((sums / (count - 1)).var())
        self.matrices += 1

    def _block(self, cosines: Tensor, rows: Tensor, start: int, sums: Tensor) -> None:
        """A block whose first rows are its own columns: what lies below their diagonal counts."""
        width = cosines.shape[1]
        own = cosines[:width]
        squares = own.square()
        sums[start : start + width] += (squares.sum(0) - squares.diagonal()).double().cpu()
        if width > 1:
            places = _below_diagonal(width, own.device)
            below = own.reshape(-1).index_select(0, places)
            self._part(below, below.square(), lambda at: _filters_at(rows, width, 0, int(places[at])))
        step = max(1, PART // width)
        for top in range(width, len(cosines), step):
            part = cosines[top : top + step]
            squares = part.square()
            sums[start : start + width] += squares.sum(0).double().cpu()
            sums[start + top : start + top + len(part)] += squares.sum(1).double().cpu()
            self._part(part, squares, partial(_filters_at, rows, width, top))

    def _part(self, cosines: Tensor, squares: Tensor, filters: Callable[[int], tuple[int, ...]]) -> None:
        """Count these cosines, which are overwritten; `filters` says whose the one at some place is."""
        low, high = (float(v) for v in torch.aminmax(cosines))
        if max(-low, high) > 1:
            cosines.clamp_(-1.0, 1.0)
            low, high = max(low, -1.0), min(high, 1.0)
        if max(-low, high) > self.coherence:
            self.coherence = max(-low, high)
            first, second = sorted(filters(int(cosines.argmax() if high >= -low else cosines.argmin())))
            self.closest = (first, second)
        if max(-low, high) >= NEAR:
            self.near += int((cosines.abs() >= NEAR).sum())
            self.opposite += int((cosines <= -NEAR).sum())
        self.count += cosines.numel()
        self.square_cosine += float(squares.sum())
        self.fourth += float(torch.linalg.vector_norm(squares, dtype=torch.float64)) ** 2
        shifted = torch.asin(cosines, out=cosines)  # radians from 90 degrees, with the other sign: no digits are lost
        self.angle -= DEGREES * float(shifted.sum(dtype=torch.float64))
        self.square_angle += (DEGREES * float(torch.linalg.vector_norm(shifted, dtype=torch.float64))) ** 2
        self.histogram += _counts(shifted)

    def error(self, n: int, drawn: int) -> float:
        """Standard error of the mean square cosine of `drawn` of n filters: Hoeffding's two terms, estimated."""
        single = max(0.0, self.fourth / self.count - (self.square_cosine / self.count) ** 2)
        shared = max(0.0, self.spread / self.matrices - single / (drawn - 1))
        variance = 4 * shared / drawn + 2 * single / (drawn * (drawn - 1))
        return sqrt((1 - drawn / n) * variance / self.matrices)

    def pairs(self) -> Pairs | None:
        if not self.count:
            return None
        shift = self.angle / self.count
        variance = max(0.0, self.square_angle / self.count - shift * shift)
        counts = tuple(int(v) for v in self.histogram.tolist())
        return Pairs(
            count=self.count,
            angle_mean=90 + shift,
            angle_std=sqrt(variance),
            mean_square_cosine=self.square_cosine / self.count,
            coherence=self.coherence,
            closest=self.closest,
            near=self.near,
            opposite=self.opposite,
            histogram=counts,
            sampled=None,
        )
