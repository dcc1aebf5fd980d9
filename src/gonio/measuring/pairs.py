"""Angles between all filters of a weight, in bounded memory, and what random directions would show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, expm1, lgamma, log, pi, sqrt

import torch
from torch import Tensor

from gonio.geometry import near_duplicates, normalize, random_angle_density
from gonio.seeding import generator

__all__ = ["NEAR", "SAMPLE", "Pairs", "angle_std_at_random", "coherence_at_random", "expected_above", "measure_pairs"]

SAMPLE = 4096  # filters per matrix; of more, this many are drawn
HASHED = 1 << 27  # entries of a weight up to which all its filters are searched for near duplicates
BLOCK = 1 << 21  # entries of one block of cosines: 8 MiB in float32, which stays in the cache
NEAR = 0.95  # |cosine| from which two filters count as nearly the same
BINS = 180  # degrees


@dataclass(frozen=True)
class Pairs:
    """All unordered pairs of filters that share their inputs; angles in degrees.

    Attributes:
        mean_square_cosine: 1/d for random directions.
        coherence: largest absolute cosine; `closest`: the two filters that have it, counted over all groups.
        near: pairs with an absolute cosine of at least :data:`NEAR`.
        histogram: pairs per degree.
        sampled: filters drawn from each matrix, where there are more than :data:`SAMPLE`; else None.
        hashed: whether, beside the sample, all filters were searched for near duplicates by hashing.
    """

    count: int
    angle_mean: float
    angle_std: float
    mean_square_cosine: float
    coherence: float
    closest: tuple[int, int]
    near: int
    histogram: tuple[int, ...]
    sampled: int | None
    hashed: bool = False


def measure_pairs(matrices: Tensor, *, name: str) -> Pairs | None:
    """The pairs within each matrix of (groups, n, d); None where no matrix has two directions.

    A zero filter has no direction and is left out. Memory is bounded by a block of cosines, whatever n is.

    Args:
        name: seeds the sample that is drawn of very many filters, so that it is the same every time.
    """
    total = _Totals()
    n = matrices.shape[1]
    for index, matrix in enumerate(matrices):
        order = _sample(n, f"{name}/{index}").to(matrix.device) if n > SAMPLE else None
        unit, numbers = _directions(matrix if order is None else matrix[order])
        numbers = index * n + (numbers if order is None else order[numbers])
        for cosines, i, j in _blocks(unit):
            total.add(cosines, numbers, i, j)
    found = total.pairs()
    if found is None or n <= SAMPLE:
        return found
    found = replace(found, sampled=SAMPLE)
    return _search_all(matrices, found) if matrices.numel() <= HASHED else found


def _search_all(matrices: Tensor, found: Pairs) -> Pairs:
    """Near duplicates among all filters, of which the sample holds only some."""
    near, coherence, closest = 0, found.coherence, found.closest
    for index, matrix in enumerate(matrices):
        pairs = near_duplicates(matrix, cosine=NEAR)
        near += len(pairs.pairs)
        if len(pairs.pairs) and float(pairs.cosines.abs().max()) >= coherence:
            best = int(pairs.cosines.abs().argmax())
            coherence = float(pairs.cosines[best].abs())
            i, j = (int(v) + index * matrices.shape[1] for v in pairs.pairs[best])
            closest = (i, j)
    return replace(found, near=near, coherence=coherence, closest=closest, hashed=True)


def _sample(n: int, name: str) -> Tensor:
    return torch.randperm(n, generator=generator(0, "measure", name))[:SAMPLE]


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of the rows that are not 0, and which rows these are; one copy of them in memory."""
    unit = torch.empty(rows.shape, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    step = max(1, BLOCK // max(1, rows.shape[-1]))
    alive = []
    for start in range(0, len(rows), step):
        part = normalize(rows[start : start + step].to(unit.dtype))
        unit[start : start + step] = part
        alive.append(part.any(-1))
    kept = torch.cat(alive).nonzero().squeeze(-1) if alive else rows.new_zeros(0, dtype=torch.long)
    return (unit if len(kept) == len(unit) else unit[kept]), kept


def _blocks(unit: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The cosines of all unordered pairs of rows, a flat block at a time, with both rows of each."""
    n = len(unit)
    start = 0
    while start < n - 1:
        stop = min(n, start + max(1, BLOCK // (n - start)))
        block = unit[start:stop] @ unit[start:].mT
        upper = torch.ones_like(block, dtype=torch.bool).triu_(1)
        i, j = upper.nonzero(as_tuple=True)
        yield block[i, j].clamp_(-1.0, 1.0), i + start, j + start
        start = stop


class _Totals:
    """Running sums over blocks, in float64."""

    def __init__(self) -> None:
        self.count = self.near = 0
        self.angle = self.square_angle = self.square_cosine = self.coherence = 0.0
        self.closest = (0, 0)
        self.histogram = torch.zeros(BINS, dtype=torch.float64)

    def add(self, cosines: Tensor, numbers: Tensor, i: Tensor, j: Tensor) -> None:
        if not cosines.numel():
            return
        size = cosines.abs()
        degrees = torch.rad2deg(torch.acos(cosines))
        self.count += cosines.numel()
        self.near += int((size >= NEAR).sum())
        best = size.argmax()
        if float(size[best]) > self.coherence:
            self.coherence = float(size[best])
            self.closest = (int(numbers[i[best]]), int(numbers[j[best]]))
        self.square_cosine += float(cosines.square().sum(dtype=torch.float64))
        shifted = degrees - 90  # a spread of 1° about 90° would lose digits in a sum of squares
        self.angle += float(shifted.sum(dtype=torch.float64))
        self.square_angle += float(shifted.square().sum(dtype=torch.float64))
        self.histogram += torch.histc(degrees, BINS, 0, 180).double().cpu()

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
            histogram=counts,
            sampled=None,
        )


@lru_cache(maxsize=4096)
def angle_std_at_random(dim: int) -> float:
    r"""Standard deviation in degrees of the angle between random directions, about :math:`57.3/\sqrt{d}`.

    Example:
        >>> from gonio.measuring.pairs import angle_std_at_random
        >>> round(angle_std_at_random(2), 2), round(angle_std_at_random(576), 2)
        (51.96, 2.39)
    """
    if dim < 2:
        return 90.0
    theta = (torch.arange(20_000, dtype=torch.float64) + 0.5) * (pi / 20_000)
    weight = random_angle_density(theta, dim)
    weight = weight / weight.sum()
    return float(torch.rad2deg((weight * (theta - pi / 2).square()).sum().sqrt()))


@lru_cache(maxsize=4096)
def coherence_at_random(pairs: int, dim: int, *, quantile: float = 0.5) -> float:
    r"""The largest :math:`|\cos|` that so many pairs of random directions show; its median by default.

    :math:`t` with :math:`(1 - P(|\cos| > t))^N = q` (all pairs treated as independent; any two of them
    are), where :math:`P(|\cos| > t) = I_{1-t^2}(\tfrac{d-1}{2}, \tfrac12)`.

    Example:
        >>> from gonio.measuring.pairs import coherence_at_random
        >>> round(coherence_at_random(64 * 63 // 2, 576), 3)
        0.149
    """
    if dim < 2 or pairs < 1:
        return 1.0
    target = -expm1(log(quantile) / pairs)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, dim) > target else (low, middle)
    return (low + high) / 2


def expected_above(cosine: float, pairs: int, dim: int) -> float:
    """How many of so many pairs of random directions have an absolute cosine above `cosine`, on average."""
    return pairs * _tail(cosine, dim) if dim > 1 else float(pairs)


def _tail(cosine: float, dim: int) -> float:
    """P(|cos θ| > cosine), as twice the integral of the angle's density from 0 to the arc cosine."""
    # Substituting x = sin θ makes the integrand x^(d−2)/√(1−x²); scaled by its end point it cannot underflow.
    end = sqrt(max(0.0, 1.0 - cosine * cosine))
    if end == 0.0:
        return 0.0
    if end == 1.0:
        return 1.0
    # x = end·(1 − s)^(1/(d−1)) turns x^(d−2) dx into a constant: ∫ = end^(d−1)/(d−1) · mean of 1/√(1−x²).
    s = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    x = end * (1 - s).pow(1 / (dim - 1))
    mean = float((1 - x * x).rsqrt().mean())
    log_constant = lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * log(pi)
    return min(1.0, 2 * exp(log_constant + (dim - 1) * log(end)) / (dim - 1) * mean)
