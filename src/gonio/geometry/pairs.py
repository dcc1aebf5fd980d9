"""Statistics of the angles between the filters of a weight, in bounded memory: over all pairs, or over a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf, pi, sqrt

import torch
from torch import Tensor

from gonio.geometry.blocks import (
    BLOCK,
    COSINE_WIDTH,
    CosineBlock,
    GramMatrix,
    have_direction,
    row_directions,
    row_norms,
)
from gonio.geometry.chance import alignment_variance
from gonio.geometry.duplicates import NEAR, near_pairs
from gonio.geometry.norms import computed_in
from gonio.seeding import generator

SAMPLE = 1024  # filters drawn of each matrix that has more than twice as many
LENGTH = 1 << 24  # entries of the drawn filters, in float32 at once: 64 MiB
FEWEST = 16  # filters drawn, however long they are
LONG = 1 << 20  # length from which the drawn filters are not held in float32 either
MANY = 1 << 22  # expected near pairs from which they are not searched among all filters
BINS = 180  # one per degree
DEGREES = 180 / pi
PRODUCT = 1 << 21  # entries of one product of directions, at most
PART = 1 << 19  # entries of a product counted at once: 2 MiB, which stays in the cache


@dataclass(frozen=True)
class PairStatistics:
    """Statistics over all unordered pairs of filters that share their inputs; angles in degrees."""

    count: int
    dim: int  # length of a filter
    angle_mean: float
    angle_std: float
    mean_square_cosine: float  # 1/dim for random directions
    coherence: float  # largest absolute cosine
    closest: tuple[int, int]  # the two filters that have it, counted over all groups
    near: int  # pairs with an absolute cosine of at least NEAR
    opposite: int  # those of them with a negative cosine
    histogram: tuple[int, ...]  # pairs per degree
    sampled: int | None = None  # filters drawn from each matrix, if there are too many for all pairs
    error: float = 0.0  # standard error of mean_square_cosine if filters were drawn
    searched: bool = False  # whether near duplicates were searched among all filters instead of the sample

    @property
    def alignment(self) -> float:
        """See :func:`gonio.geometry.alignment`."""
        return self.dim * self.mean_square_cosine

    @property
    def alignment_error(self) -> float:
        """Standard error of `alignment` from sampling; 0 if all pairs were counted."""
        return self.dim * self.error

    @property
    def alignment_zscore(self) -> float:
        """See :func:`gonio.geometry.alignment_zscore`."""
        deviation = sqrt(alignment_variance(self.count, self.dim))
        return (self.alignment - 1) / deviation if deviation else 0.0


def pair_statistics(
    matrices: Tensor, *, name: str, gram: GramMatrix | None = None, deep: bool = False
) -> PairStatistics | None:
    """Statistics of the pairs within each matrix of (groups, n, d); None if no matrix has two directions.

    Zero filters have no direction and are left out, as are filters with a non-finite entry. Memory is bounded by
    :data:`LENGTH` and one block of cosines, for any n and d. `name` seeds the sample drawn from many or long filters;
    `gram` is the Gram matrix of the only matrix, if it is known. With `deep` all pairs are counted, and memory holds
    all directions.
    """
    n, d = matrices.shape[1:]
    most = n if n <= 2 * SAMPLE else SAMPLE
    drawn = n if deep else min(most, max(FEWEST, LENGTH // max(1, d)))
    totals = _Totals(sampled=drawn < n)
    for index, matrix in enumerate(matrices):
        if gram is not None and drawn == n and gram.has_cosines:
            totals.add(gram.cosines(), n, index * n)
            continue
        order = torch.arange(n, device="cpu")
        if drawn < n:
            order = torch.randperm(n, generator=generator(0, "measure", f"{name}/{index}"), device="cpu")[:drawn]
        totals.add(_cosines(matrix, order.to(matrix.device)), drawn, index * n)
    if not totals.count:
        return None
    (found,) = totals.statistics(d)
    if drawn == n:
        return found
    found = replace(found, sampled=drawn, error=totals.error(n, drawn))
    return _search_all(matrices, found, name)


def pair_statistics_of_each(matrices: Tensor, gram: GramMatrix) -> list[PairStatistics | None]:
    """:func:`pair_statistics` of each matrix of a stack of small ones, all of whose filters have a direction.

    Args:
        matrices: (matrices, n, d), with n up to :data:`COSINE_WIDTH`. `gram`: their Gram matrices.
    """
    n, d = matrices.shape[1:]
    totals = _Totals(sampled=False, matrices=len(matrices))
    if gram.has_cosines:
        totals.add(gram.cosines(), n, 0)
    elif n > 1:
        unit = row_directions(matrices)
        totals.add([(0, unit @ unit.mT, torch.arange(n, device="cpu"))], n, 0)
    return [*totals.statistics(d)] if totals.count else [None] * len(matrices)


@torch.no_grad()
def neighbour_ratio(matrix: Tensor, mean_square_cosine: float) -> tuple[float, float]:
    r"""The mean distance of consecutive rows relative to that of all pairs, and its deviation in a random order.

    .. math:: (1 - \overline{\cos\theta_{i,i+1}}) / (1 - \overline{\cos\theta_{ij}})

    of squared distances between directions: 1 in a random order, 0 for rows that change slowly. Rows that count as 0 or
    are not finite are left out; 1 and infinity with fewer than three others, or where all directions are the same.

    Args:
        matrix: (n, d). `mean_square_cosine`: over all pairs of rows.

    Example:
        >>> from gonio.geometry.pairs import neighbour_ratio
        >>> angles = torch.linspace(0, 3.14, 64)
        >>> rows = torch.stack([angles.cos(), angles.sin()], 1)
        >>> [round(value, 3) for value in neighbour_ratio(rows, 0.5)]
        [0.002, 0.121]

    References: [1] J. von Neumann, "Distribution of the ratio of the mean square successive difference to the
    variance", Annals of Mathematical Statistics 12, 1941, equation (1).
    """
    norms = row_norms(matrix)
    kept = (torch.isfinite(norms) & have_direction(norms, matrix.dtype)).nonzero().flatten()
    n = len(kept)
    total, following, last = torch.zeros(matrix.shape[1], dtype=torch.float64, device="cpu"), 0.0, None
    for rows in kept.split(max(1, PRODUCT // max(1, matrix.shape[1]))):
        unit = row_directions(matrix[rows]).double().cpu()
        joined = unit if last is None else torch.cat([last, unit])
        following += float((joined[1:] * joined[:-1]).sum())
        total, last = total + unit.sum(0), unit[-1:]
    if n < 3:
        return 1.0, inf
    mean = (float(total.square().sum()) - n) / (n * (n - 1))
    if 1 - mean < 1e-6:
        return 1.0, inf
    deviation = sqrt(max(mean_square_cosine - mean**2, 0.0) / (n - 1))
    return (1 - following / (n - 1)) / (1 - mean), deviation / (1 - mean)


def _search_all(matrices: Tensor, found: PairStatistics, name: str) -> PairStatistics:
    """The statistics with near duplicates searched among all filters instead of the sample."""
    groups, n = matrices.shape[:2]
    share = found.near / found.count
    if share > 0.01 or share * groups * n * (n - 1) / 2 > MANY:  # of pairs that are not rare the sample says enough
        return found
    near, opposite, coherence, closest = 0, 0, found.coherence, found.closest
    for index, matrix in enumerate(matrices):
        searched = near_pairs(matrix, name=f"{name}/{index}")
        if searched is None:
            return found
        pairs, cosines = searched
        near += len(cosines)
        opposite += int((cosines < 0).sum())
        if len(cosines) and float(cosines.abs().max()) >= coherence:
            best = int(cosines.abs().argmax())
            coherence = float(cosines[best].abs())
            i, j = (int(v) + index * matrices.shape[1] for v in pairs[best])
            closest = (i, j)
    return replace(found, near=near, opposite=opposite, coherence=coherence, closest=closest, searched=True)


def _cosines(matrix: Tensor, order: Tensor) -> Iterator[CosineBlock]:
    """Cosines of all pairs of these rows, block by block; rows without direction are left out."""
    if matrix.shape[1] > LONG:
        yield _cosines_of_long_rows(matrix, order)
        return
    unit = torch.empty(len(order), matrix.shape[1], dtype=computed_in(matrix.dtype), device=matrix.device)
    alive = torch.zeros(len(order), dtype=torch.bool, device=matrix.device)
    step = max(1, BLOCK // max(1, matrix.shape[1]))
    for start in range(0, len(order), step):
        part = row_directions(matrix[order[start : start + step]])
        unit[start : start + step] = part
        norms = torch.linalg.vector_norm(part, dim=-1)  # 1, or 0 for a zero row, or not finite
        alive[start : start + step] = (norms > 0) & torch.isfinite(norms)
    if not bool(alive.all()):
        unit, order = unit[alive], order[alive]
    n, start = len(unit), 0
    while start < n - 1:  # with the factors in this order BLAS is faster, and entries below a square are contiguous
        stop = min(n, start + max(1, min(COSINE_WIDTH, PRODUCT // (n - start))))
        yield start, (unit[start:] @ unit[start:stop].mT)[None], order[start:]
        start = stop


def _cosines_of_long_rows(matrix: Tensor, order: Tensor) -> CosineBlock:
    """One block of cosines of a few very long rows, from products of their parts."""
    rows = order.sort().values
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=matrix.device)
    for start in range(0, matrix.shape[1], BLOCK // FEWEST):
        part = matrix[:, start : start + BLOCK // FEWEST][rows].double()
        gram += part @ part.mT
    norms = gram.diagonal().sqrt()
    alive = (norms > 0) & torch.isfinite(norms)
    scaled = gram[alive][:, alive] / norms[alive, None] / norms[None, alive]
    return 0, scaled.to(computed_in(matrix.dtype))[None], rows[alive]


class _Totals:
    """Running sums over blocks of cosines, in float64, for each matrix of a stack; for `error` only of a sample."""

    def __init__(self, *, sampled: bool, matrices: int = 1) -> None:
        self.sampled = sampled
        self.count = self.added = 0
        zeros = partial(torch.zeros, matrices, dtype=torch.float64, device="cpu")
        self.angle, self.square_angle, self.square_cosine, self.coherence = zeros(), zeros(), zeros(), zeros()
        self.near, self.opposite = (torch.zeros(matrices, dtype=torch.long, device="cpu") for _ in range(2))
        self.closest = [(0, 0)] * matrices
        self.histogram = torch.zeros(matrices, BINS + 1, dtype=torch.long, device="cpu")
        self.fourth = self.spread = 0.0  # spread: variance over filters of the mean square cosine with the others

    def add(self, blocks: Iterable[CosineBlock], count: int, offset: int) -> None:
        """Add the cosines of `count` filters of one matrix, whose rows are counted from `offset` over all matrices."""
        if self.sampled:
            self.sums = torch.zeros(count, dtype=torch.float64, device="cpu")  # of each filter's squared cosines
        for start, cosines, rows in blocks:
            self._add_block(cosines, rows + offset if offset else rows, start)
        if self.sampled and count > 2:
            self.spread += float((self.sums / (count - 1)).var())
        self.added += 1

    def _add_block(self, cosines: Tensor, rows: Tensor, start: int) -> None:
        """Add the entries below the diagonal of a block whose first rows are also its columns."""
        matrices, height, width = cosines.shape
        own = cosines[:, :width]
        if self.sampled:
            squares = own[0].square()
            self.sums[start : start + width] += (squares.sum(0) - squares.diagonal()).double().cpu()
        if width > 1:
            places = _below_diagonal(width, own.device)
            below = own.reshape(matrices, -1).index_select(1, places)
            self._count(below, lambda at: divmod(int(places[at]), width), rows)
        step = max(1, PART // (matrices * width))
        for top in range(width, height, step):
            part = cosines[:, top : top + step]
            if self.sampled:
                squares = part[0].square()
                self.sums[start : start + width] += squares.sum(0).double().cpu()
                self.sums[start + top : start + top + part.shape[1]] += squares.sum(1).double().cpu()
            self._count(part.flatten(1), lambda at: divmod(at, width), rows, top)

    def _count(self, cosines: Tensor, place: Callable[[int], tuple[int, int]], rows: Tensor, top: int = 0) -> None:
        """Count cosines of each matrix, and overwrite them; `place` has row, from `top` on, and column of an entry."""
        low, high = cosines.amin(1).double().cpu(), cosines.amax(1).double().cpu()
        largest = torch.maximum(-low, high)
        if bool((largest > 1).any()):
            cosines.clamp_(-1.0, 1.0)
            largest.clamp_(max=1.0)
        better = (largest > self.coherence).nonzero().flatten()
        if len(better):
            self.coherence[better] = largest[better]
            chosen = cosines if len(better) == len(cosines) else cosines[better.to(cosines.device)]
            for matrix, at in zip(better.tolist(), chosen.abs().argmax(1).tolist(), strict=True):
                row, column = place(at)
                first, second = sorted((int(rows[column]), int(rows[top + row])))
                self.closest[matrix] = (first, second)
        if bool((largest >= NEAR).any()):
            self.near += (cosines.abs() >= NEAR).sum(1).cpu()
            self.opposite += (cosines <= -NEAR).sum(1).cpu()
        self.count += cosines.shape[1]
        self.square_cosine += cosines.double().square().sum(1).cpu()
        if self.sampled:
            self.fourth += float(torch.linalg.vector_norm(cosines.square(), dtype=torch.float64)) ** 2
        shifted = torch.asin(cosines, out=cosines)  # π/2 − θ in radians, without the loss of digits of acos
        self.angle -= DEGREES * shifted.sum(1, dtype=torch.float64).cpu()
        self.square_angle += (DEGREES * shifted.double().square().sum(1).sqrt().cpu()) ** 2
        degrees = torch.add(shifted.new_full((), 90.0), shifted, alpha=-DEGREES).to(torch.uint8)
        # a fifth of the time of torch.histc on CPU; 180 is counted to the last bin
        self.histogram += torch.stack([torch.bincount(each, minlength=BINS + 1) for each in degrees]).cpu()

    def error(self, n: int, drawn: int) -> float:
        """Standard error of the mean square cosine of `drawn` of n filters: Hoeffding's two terms, estimated."""
        single = max(0.0, self.fourth / self.count - (float(self.square_cosine) / self.count) ** 2)
        shared = max(0.0, self.spread / self.added - single / (drawn - 1))
        variance = 4 * shared / drawn + 2 * single / (drawn * (drawn - 1))
        return sqrt((1 - drawn / n) * variance / self.added)

    def statistics(self, dim: int) -> Iterator[PairStatistics]:
        """The statistics of at least one pair, of each matrix."""
        shift = self.angle / self.count
        variance = (self.square_angle / self.count - shift * shift).clamp(min=0)
        self.histogram[:, -2] += self.histogram[:, -1]
        columns = (c.tolist() for c in (90 + shift, variance.sqrt(), self.square_cosine / self.count, self.coherence))
        found = zip(
            self.closest, self.near.tolist(), self.opposite.tolist(), self.histogram[:, :-1].tolist(), strict=True
        )
        for mean, std, square, coherence, (closest, near, opposite, bins) in zip(*columns, found, strict=True):
            yield PairStatistics(
                self.count, dim, mean, std, square, coherence, closest, near, opposite, histogram=tuple(bins)
            )


@lru_cache(maxsize=8)  # all blocks of a weight but the last have one size, and making a mask takes ten times as long
def _below_diagonal(size: int, device: torch.device) -> Tensor:
    """Flat indices of the entries below the diagonal of a square block."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril_(-1).flatten().nonzero().flatten()
