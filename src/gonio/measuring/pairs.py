"""Angles between the filters of a weight, in bounded memory: all pairs, or those of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from gonio.measuring.blocks import BLOCK, computed_in, directions_of, rows_at
from gonio.measuring.neighbours import NEAR, near_pairs
from gonio.seeding import generator

__all__ = ["Pairs", "measure_pairs"]

SAMPLE = 4096  # filters per matrix; of more, this many are drawn
LENGTH = 1 << 24  # entries of the drawn filters, in float32 at once: 64 MiB
FEWEST = 16  # drawn, however long they are
LONG = 1 << 20  # length from which the drawn filters are not held in float32 either
BINS = 180  # degrees


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


def measure_pairs(matrices: Tensor, *, name: str) -> Pairs | None:
    """The pairs within each matrix of (groups, n, d); None where no matrix has two directions.

    A zero filter has no direction and is left out, as is one with a non-finite entry. Memory is bounded by
    :data:`LENGTH` and a block of cosines, whatever n and d are.

    Args:
        name: seeds the sample that is drawn of many or long filters, so that it is the same every time.
    """
    total = _Totals()
    n, d = matrices.shape[1:]
    drawn = _drawn(n, d)
    for index, matrix in enumerate(matrices):
        order = _sample(n, drawn, f"{name}/{index}").to(matrix.device)
        total.add(matrix, order, index * n)
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


def _cosines(matrix: Tensor, order: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where a block starts, its cosines (some rows from there on × all columns), and the numbers of the columns."""
    if matrix.shape[1] > LONG:
        yield _from_gram(matrix, order)
        return
    unit, order = _directions(matrix, order)
    n, start = len(unit), 0
    while start < n - 1:
        stop = min(n, start + max(1, min(512, BLOCK // (n - start))))
        yield start, unit[start:stop] @ unit[start:].mT, order[start:]
        start = stop


def _directions(matrix: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of these rows, without those that have no direction, and which rows are left."""
    unit = torch.empty(len(order), matrix.shape[1], dtype=computed_in(matrix.dtype), device=matrix.device)
    alive = torch.zeros(len(order), dtype=torch.bool, device=matrix.device)
    step = max(1, BLOCK // max(1, matrix.shape[1]))
    for start in range(0, len(order), step):
        part = directions_of(rows_at(matrix, order[start : start + step]))
        unit[start : start + step] = part
        alive[start : start + step] = part.any(-1) & torch.isfinite(part).all(-1)
    if bool(alive.all()):
        return unit, order
    return unit[alive], order[alive]


def _from_gram(matrix: Tensor, order: Tensor) -> tuple[int, Tensor, Tensor]:
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


class _Totals:
    """Running sums over blocks, in float64."""

    def __init__(self) -> None:
        self.count = self.near = self.opposite = self.matrices = 0
        self.angle = self.square_angle = self.square_cosine = self.fourth = self.coherence = 0.0
        self.closest = (0, 0)
        self.histogram = torch.zeros(BINS, dtype=torch.float64)
        self.spread = 0.0  # variance over filters of the mean square cosine with the others, over all matrices

    def add(self, matrix: Tensor, order: Tensor, offset: int) -> None:
        """One matrix: the rows of these numbers, which are counted from `offset` over all matrices."""
        sums = torch.zeros(len(order), dtype=torch.float64)
        for start, cosines, rows in _cosines(matrix, order):
            self._block(cosines, rows + offset, start, sums)
        if len(order) > 2:
            self.spread += float((sums / (len(order) - 1)).var())
        self.matrices += 1

    def _block(self, cosines: Tensor, rows: Tensor, start: int, sums: Tensor) -> None:
        """A block whose first columns are its own rows: what lies right of their diagonal counts."""
        height = len(cosines)
        own = cosines[:, :height].contiguous()
        upper = torch.ones_like(own, dtype=torch.bool).triu_(1)
        squares = own.square()
        sums[start : start + height] += (squares.sum(1) - squares.diagonal()).double().cpu()
        if height > 1:
            self._part(own[upper], lambda at: tuple(int(rows[v]) for v in upper.nonzero()[at]))
        if cosines.shape[1] > height:
            width = cosines.shape[1] - height
            rest = cosines[:, height:].contiguous()
            squares = rest.square()
            sums[start : start + height] += squares.sum(1).double().cpu()
            sums[start + height : start + height + width] += squares.sum(0).double().cpu()
            self._part(rest, lambda at: (int(rows[at // width]), int(rows[height + at % width])))

    def _part(self, cosines: Tensor, filters: Callable[[int], tuple[int, ...]]) -> None:
        """Count these cosines, which are overwritten; `filters` says whose the one at some place is."""
        cosines.clamp_(-1.0, 1.0)
        low, high = (float(v) for v in torch.aminmax(cosines))
        if max(-low, high) > self.coherence:
            self.coherence = max(-low, high)
            first, second = sorted(filters(int(cosines.argmax() if high >= -low else cosines.argmin())))
            self.closest = (first, second)
        if max(-low, high) >= NEAR:
            self.near += int((cosines.abs() >= NEAR).sum())
            self.opposite += int((cosines <= -NEAR).sum())
        self.count += cosines.numel()
        squares = cosines.square()
        self.square_cosine += float(squares.sum())
        self.fourth += float(squares.square_().sum())
        shifted = torch.asin(cosines, out=cosines).mul_(-180 / torch.pi)  # degrees from 90: no digits are lost
        self.angle += float(shifted.sum(dtype=torch.float64))
        self.square_angle += float(torch.linalg.vector_norm(shifted, dtype=torch.float64)) ** 2
        self.histogram += torch.histc(shifted.add_(90).clamp_(0, 180), BINS, 0, 180).double().cpu()

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
