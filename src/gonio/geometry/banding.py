"""Banded sign hashing: which vectors of a large set are worth comparing.

A pool of random hyperplanes gives each vector a string of sign bits; each band reads a few of them, at
places of its own, as the number of a bucket. Near vectors share a bucket in some band with a known
probability, other vectors rarely do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from gonio.geometry.signs import hyperplanes
from gonio.seeding import generator

__all__ = ["BUCKET_LIMIT", "Search", "candidates", "cheapest_search"]

BUCKET_LIMIT = 256  # neighbours that a vector is compared with in one bucket
POOLS = (256, 512, 1024)
BITS = range(8, 25, 2)  # per band; keys are summed in float32, whose integers are exact to 2^24
MAX_BANDS = 512
SAMPLE = 512  # vectors on each side of the pairs from which the cost is foreseen
STEPS = 16  # of the angles at the threshold every such one counts
ROW_CHUNK = 1 << 11  # vectors hashed at once
MERGE = 1 << 24  # candidate codes held before repeated ones are dropped

# Note [Costs]
# In multiplications inside a matrix product (13 ps on one core of a Zen 4): testing one entry of a Gram
# block; sorting and comparing one key; gathering and verifying one candidate, in all and per dimension.
# On another machine the ratios differ, which moves the change between exact and hashed search, and no result.
ENTRY, KEY, CANDIDATE, GATHER = 25.0, 1800.0, 6000.0, 190.0


@dataclass(frozen=True)
class Search:
    """How to hash, and what to expect of it."""

    pool: int  # hyperplanes
    bits: int  # read by one band
    bands: int
    mean: Tensor | None  # subtracted before hashing
    recall: float  # expected share of the pairs at the threshold
    cost: float  # per vector, see Note [Costs]


def cheapest_search(unit: Tensor, cosine: float, recall: float, seed: int) -> Search | None:
    """The cheapest way of hashing with the asked recall, or None where comparing all pairs costs less.

    How many random pairs will meet is foreseen from pairs in a sample of the vectors, so a set that crowds
    into few buckets gets more bits, or is centred, or is searched exactly.
    """
    n, d = unit.shape
    order = torch.randperm(n, generator=generator(seed, "sample", n)).to(unit.device)
    left, right = unit[order[:SAMPLE]].float(), unit[order[-SAMPLE:]].float()
    mean = unit.mean(0).float()
    plain = _Pairs.of(left, right, left.new_full((1,), cosine).acos())
    # Centring leaves the distance of two vectors as it is and shortens them, which widens their angle.
    half = ((1 - cosine) / 2) ** 0.5 / torch.linalg.vector_norm(left - mean, dim=-1)
    centred = _Pairs.of(left - mean, right - mean, 2 * half.clamp_max(1).asin(), negated=-right - mean)
    found = [*_searches(plain, n, d, recall, None), *_searches(centred, n, d, recall, mean)]
    best = min(found, key=lambda search: search.cost, default=None)
    return best if best is not None and best.cost < (n - 1) / 2 * (d + ENTRY) else None


@dataclass(frozen=True)
class _Pairs:
    """What a random hyperplane does to pairs of vectors."""

    apart: Tensor  # probability that it separates pairs at the threshold
    together: tuple[Tensor, Tensor]  # that it does not separate random pairs, and pairs of which one is negated

    @classmethod
    def of(cls, left: Tensor, right: Tensor, angles: Tensor, *, negated: Tensor | None = None) -> _Pairs:
        same = _together(left, right)
        opposite = 1 - same if negated is None else _together(left, negated)
        return cls((angles.sort().values[::STEPS] / pi).cpu().double(), (same, opposite))


def _together(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30) for x in (a, b))
    return 1 - (a @ b.mT).clamp(-1, 1).acos() / pi


def _searches(pairs: _Pairs, n: int, d: int, recall: float, mean: Tensor | None) -> Iterator[Search]:
    """One search per pool and number of bits that reaches the recall."""
    copies = 1 if mean is None else 2  # without a mean a negated vector has the complementary bits
    shares = {pool: _separating(pairs.apart, pool) for pool in POOLS}
    for bits in BITS:
        met = (n - 1) / 2 * sum(float(p.pow(bits).mean()) for p in pairs.together)
        for pool in POOLS:
            bands, expected = _bands(shares[pool], pool, bits, recall)
            hashing = copies * (pool * (d + bands) + KEY * bands)
            cost = hashing + bands * met * (CANDIDATE + GATHER * d)
            if expected >= recall:
                yield Search(pool, bits, bands, mean, expected, cost)


def _separating(apart: Tensor, pool: int) -> Tensor:
    """Probability that 0, 1, … `pool` hyperplanes separate a pair: binomial, averaged over `apart`."""
    h = torch.arange(pool + 1, dtype=torch.float64)
    log_count = torch.lgamma(h.new_tensor(pool + 1.0)) - torch.lgamma(h + 1) - torch.lgamma(pool - h + 1)
    p = apart.clamp(1e-300, 1 - 1e-12)[:, None]
    return torch.exp(log_count + h * p.log() + (pool - h) * torch.log1p(-p)).mean(0)


def _bands(share: Tensor, pool: int, bits: int, recall: float) -> tuple[int, float]:
    r"""Fewest bands with the asked recall (or the largest number), and their recall.

    A band of `k` bits reads none of the `h` hyperplanes that separate a pair with probability
    :math:`\binom{m - h}{k} / \binom{m}{k}`, independently of the other bands once h is given.
    """
    h = torch.arange(pool + 1, dtype=torch.float64)
    taken = torch.arange(bits, dtype=torch.float64)[:, None]
    meet = ((pool - h - taken).clamp_min(0) / (pool - taken)).prod(0)
    miss = torch.log1p(-meet)  # −∞ at h = 0: such a pair meets in every band

    def expected(bands: int) -> float:
        return 1 - float((share * torch.exp(bands * miss)).sum())

    low, high = 0, MAX_BANDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if expected(middle) >= recall else (middle, high)
    return high, expected(high)


def candidates(unit: Tensor, search: Search, seed: int) -> tuple[Tensor, int]:
    """Distinct codes i·n + j, i < j, of vectors that share a bucket; how many were in crowded buckets."""
    n = len(unit)
    keys = _keys(unit, search, seed)
    entries = torch.arange(keys.shape[1], device=unit.device)
    # Copies of one vector share every bucket. Those that agree in many bands are compared once, and all
    # but the last of a crowd left out of the bands.
    together = range(min(len(keys), 62 // search.bits))
    several = torch.stack([keys[k].long() << (k * search.bits) for k in together]).sum(0)
    first, crowd = _meetings(several.unique(return_inverse=True)[1], entries, n)
    capped = torch.zeros(n, dtype=torch.bool, device=unit.device)
    capped[crowd] = True
    kept = (~capped[entries % n]).nonzero().squeeze(-1)
    codes = [first]
    for band in keys if len(kept) == len(entries) else keys[:, kept]:
        found, crowd = _meetings(band, entries[kept], n)
        codes.append(found)
        capped[crowd] = True
        if sum(map(len, codes)) > MERGE:  # crowded buckets yield the same pairs in every band
            codes = [torch.unique(torch.cat(codes))]
    return torch.unique(torch.cat(codes)), int(capped.sum())


def _keys(unit: Tensor, search: Search, seed: int) -> Tensor:
    """Buckets of each band, (bands, n), or (bands, 2n) with those of the negated vectors after the others.

    Without centring a negated vector has the complementary bits, so key and complement share the smaller of
    the two as bucket, and antipodes meet without a second copy.
    """
    normals = hyperplanes(unit.shape[-1], search.pool, unit, seed)
    places = torch.rand(search.bands, search.pool, generator=generator(seed, "bands", search.bands, search.pool))
    places = places.topk(search.bits).indices
    powers = 2.0 ** torch.arange(search.bits).expand_as(places)
    reading = torch.zeros(search.bands, search.pool).scatter_(1, places, powers).mT.to(unit)
    signed = [unit] if search.mean is None else [unit - search.mean, -unit - search.mean]
    parts = (part for vectors in signed for part in vectors.split(ROW_CHUNK))
    keys = torch.cat([(_bits(part @ normals) @ reading).to(torch.int32) for part in parts])
    keys = keys.mT.contiguous()
    return torch.minimum(keys, (1 << search.bits) - 1 - keys) if search.mean is None else keys


def _bits(projections: Tensor) -> Tensor:
    """1 where a projection is ≥ 0, else 0, as numbers; over the projections."""
    return torch.ge(projections, 0, out=projections)


def _meetings(keys: Tensor, entries: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Codes of pairs in equal buckets, and the vectors of buckets above the limit."""
    # Key and entry in one number: sorting numbers alone is faster than sorting with indices, and buckets are in
    # the order of the entries, so that crowded ones yield the same pairs in every band.
    width = (2 * n).bit_length()
    ordered = _sorted_((keys.long() << width).bitwise_or_(entries))
    codes = [entries[:0]]
    for shift in range(1, BUCKET_LIMIT + 1):
        same = _same(ordered, shift, width)
        if not len(same):
            return torch.cat(codes), entries[:0]
        a, b = ordered[same], ordered[same + shift]
        codes.append(_codes(a & ((1 << width) - 1), b & ((1 << width) - 1), n))
    crowded = ordered[_same(ordered, BUCKET_LIMIT + 1, width)]
    return torch.cat(codes), (crowded & ((1 << width) - 1)) % n


def _same(ordered: Tensor, shift: int, width: int) -> Tensor:
    """Places whose key is that of the place `shift` further on."""
    return ((ordered[shift:] ^ ordered[:-shift]) < 1 << width).nonzero().squeeze(-1)


def _sorted_(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x.sort().values
    x.numpy().sort()  # in place; torch's sort always makes indices too
    return x


def _codes(a: Tensor, b: Tensor, n: int) -> Tensor:
    """i·n + j for entries of which at most one is a negated copy (index ≥ n) of another vector."""
    useful = ((a < n) | (b < n)) & (a % n != b % n)
    a, b = a[useful] % n, b[useful] % n
    return torch.minimum(a, b) * n + torch.maximum(a, b)
