"""Pairs of nearly parallel or nearly opposite vectors, in small sets exactly and in large ones by hashing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import acos, ceil, inf, log, log1p, log2, pi
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import least_norm
from gonio.geometry.precision import full_precision, whole, widen
from gonio.geometry.signs import hyperplanes

__all__ = ["NearDuplicates", "near_duplicates"]

EXACT_SIZE = 4096  # below it the Gram matrix is as fast as any index
BLOCK = 1024  # rows and columns of one Gram block
MAX_BANDS = 128  # beyond it the exact search is cheaper
MAX_BITS = 24  # keys are summed in float32, whose integers are exact to 2^24
BUCKET_LIMIT = 256  # neighbours that a vector is compared with in one bucket
CENTRED = 0.2  # length of the mean direction above which vectors are centred before hashing
VERIFY = 1 << 12  # candidate pairs verified at once; small chunks stay in the cache
ROW_CHUNK = 1 << 11  # vectors hashed at once
ROUNDING = 1e-6  # of a float32 cosine
MERGE = 1 << 24  # candidate codes held before repeated ones are dropped


@dataclass(frozen=True)
class NearDuplicates:
    """Result of :func:`near_duplicates`.

    Example:
        >>> found = gonio.geometry.near_duplicates(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-3.0, 0.0]]))
        >>> print(found)
        3 pairs with |cosine| >= 0.95 among 3 vectors (1 parallel, 2 opposite); exact search
    """

    pairs: Tensor  # (count, 2) int64, first < second, sorted
    cosines: Tensor  # (count,), of each pair; negative for opposite vectors
    cosine: float  # the threshold
    vectors: int
    method: Literal["exact", "hashed"]
    recall: float  # expected share of pairs at exactly the threshold that is found; pairs above fare better
    capped: int  # vectors in buckets too large to be compared fully; 0 means none

    def __str__(self) -> str:
        opposite = int((self.cosines < 0).sum())
        head = (
            f"{len(self.pairs)} pairs with |cosine| >= {self.cosine:g} among {self.vectors} vectors "
            f"({len(self.pairs) - opposite} parallel, {opposite} opposite)"
        )
        if self.method == "exact":
            return f"{head}; exact search"
        capped = (
            f", {self.capped} vectors in crowded buckets compared with {BUCKET_LIMIT} neighbours" if self.capped else ""
        )
        return f"{head}; sign hashing, expected recall {self.recall:.4f} at the threshold{capped}"


def near_duplicates(vectors: Tensor, *, cosine: float = 0.95, recall: float = 0.995, seed: int = 0) -> NearDuplicates:
    r"""All pairs of rows with :math:`|\cos\theta| \ge` `cosine`: duplicates and antipodes.

    Small sets, and thresholds too low for hashing to pay, are searched exactly in blocks of the Gram matrix,
    never holding it whole. Larger sets are searched by sign hashing: each of several bands of :math:`k` sign
    bits sorts the vectors into buckets, vectors in one bucket are compared exactly. A pair at angle
    :math:`\theta` is found with probability :math:`1 - (1 - p^k)^L`, :math:`p = 1 - \theta/\pi`; bits and bands
    are chosen for the asked recall at the threshold. What is returned is always verified, so there are no
    false pairs. Vectors with a common direction are centred, for hashing only.

    An antipode computes the same feature up to sign under odd or linear units, and another one under ReLU;
    the sign of the cosine tells which it is. Zero vectors have no direction and are in no pair.

    Args:
        vectors: one per row, (n, d).
        cosine: smallest absolute cosine, in (0, 1]. Cosines have float32 rounding: pairs within 1e-6 of the
            threshold may fall on either side.
        recall: what hashing must expect to find of the pairs at the threshold, in (0, 1).
        seed: of the hyperplanes.

    Returns:
        A :class:`NearDuplicates`; its ``method``, ``recall`` and ``capped`` say how the search was made.

    Raises:
        InvalidArgumentError: for another rank, non-finite entries, or arguments out of range.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 0.02, 0.0]])
        >>> gonio.geometry.near_duplicates(vectors, cosine=0.99).pairs
        tensor([[0, 2]])

    References:
        [1] M. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, §3.
        [2] J. Leskovec, A. Rajaraman, J. Ullman, "Mining of Massive Datasets", §3.4 (banding).
    """
    vectors = whole(vectors)
    _check(vectors, cosine, recall)
    with torch.no_grad(), full_precision(vectors):
        unit = _unit(vectors.detach())
        search = _plan(unit, cosine, recall)
        least = min(cosine, 1 - ROUNDING)  # equal rows have a cosine of 1 up to rounding
        if search is None:
            pairs, cosines = _exact(unit, least)
            return NearDuplicates(pairs, cosines, cosine, len(unit), "exact", 1.0, 0)
        kept = (unit.abs().amax(-1) > 0).nonzero().squeeze(-1)
        dense = unit if len(kept) == len(unit) else unit[kept]  # zero vectors would crowd one bucket
        candidates, capped = _candidates(dense, search, seed)
        pairs, cosines = _verified(dense, candidates, least)
        return NearDuplicates(kept[pairs], cosines, cosine, len(unit), "hashed", search.recall, capped)


def _check(vectors: Tensor, cosine: float, recall: float) -> None:
    if vectors.ndim != 2:
        raise InvalidArgumentError(
            "near_duplicates() takes one matrix (n, d), one vector per row",
            f"shape {tuple(vectors.shape)}",
            "Search each group of a layer on its own, with gonio.geometry.matrix_view().",
        )
    if not 0 < cosine <= 1 or not 0 < recall < 1:
        raise InvalidArgumentError(
            "near_duplicates() needs 0 < cosine <= 1 and 0 < recall < 1",
            f"cosine={cosine}, recall={recall}",
            "Use for example cosine=0.95, recall=0.995.",
        )


def _unit(vectors: Tensor) -> Tensor:
    """Unit rows, zero where a row is; few passes, for sets of gigabytes."""
    wide = widen(vectors)
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    unit = wide / norms.masked_fill(norms < least_norm(vectors.dtype), inf)
    if not bool(unit.sum().isfinite()):  # infinite entries became NaN
        raise InvalidArgumentError("near_duplicates() needs finite entries", "NaN or infinity", "Remove those rows.")
    return unit


def _exact(unit: Tensor, cosine: float) -> tuple[Tensor, Tensor]:
    """Blocks of the upper triangle; only hits are kept."""
    pairs, cosines = [unit.new_zeros(0, 2, dtype=torch.long)], [unit.new_zeros(0)]
    for i in range(0, len(unit), BLOCK):
        for j in range(i, len(unit), BLOCK):
            gram = unit[i : i + BLOCK] @ unit[j : j + BLOCK].mT
            hit = (gram.abs() >= cosine).nonzero()
            if i == j:
                hit = hit[hit[:, 0] < hit[:, 1]]
            pairs.append(hit + torch.tensor([i, j], device=hit.device))
            cosines.append(gram[hit[:, 0], hit[:, 1]])
    return _in_order(torch.cat(pairs), torch.cat(cosines), len(unit))


def _in_order(pairs: Tensor, cosines: Tensor, n: int) -> tuple[Tensor, Tensor]:
    order = (pairs[:, 0] * n + pairs[:, 1]).argsort()
    return pairs[order], cosines[order].clamp(-1, 1)


@dataclass(frozen=True)
class _Search:
    bits: int  # per band
    bands: int
    recall: float
    mean: Tensor | None  # subtracted before hashing


def _plan(unit: Tensor, cosine: float, recall: float) -> _Search | None:
    """Bits and bands for the asked recall, or None if the exact search is the better one."""
    n = len(unit)
    if n <= EXACT_SIZE:
        return None
    mean = unit.mean(0)
    length = float(mean.norm())
    centred = length > CENTRED
    # Centring leaves differences as they are and shortens the vectors, which widens their angle.
    seen = 1 - (1 - cosine) / (1 - length * length) if centred else cosine
    if seen <= 0:
        return None
    bits = min(MAX_BITS, ceil(log2(n)) + 4)  # about n/16 occupied buckets per vector: few chance meetings
    together = (1 - acos(seen) / pi) ** bits
    bands = 1 if together == 1 else ceil(log(1 - recall) / log1p(-together))
    if bands > MAX_BANDS:
        return None
    return _Search(bits, bands, 1 - (1 - together) ** bands, mean if centred else None)


def _candidates(unit: Tensor, search: _Search, seed: int) -> tuple[Tensor, int]:
    """Distinct codes i·n + j, i < j, of vectors that share a bucket; how many were in crowded buckets."""
    n = len(unit)
    capped = torch.zeros(n, dtype=torch.bool, device=unit.device)
    codes: list[Tensor] = []
    for keys in _keys(unit, search, seed):
        found, crowded = _meetings(keys, n)
        codes.append(found)
        capped[crowded] = True
        if sum(map(len, codes)) > MERGE:  # crowded buckets yield the same pairs in every band
            codes = [torch.unique(torch.cat(codes))]
    return torch.unique(torch.cat(codes)), int(capped.sum())


def _keys(unit: Tensor, search: _Search, seed: int) -> Iterator[Tensor]:
    """Integer keys of each band, (n,), or (2n,) with those of the negated vectors after those of the vectors.

    Without centring a negated vector has the complementary bits, so key and complement share the smaller of
    the two as bucket, and antipodes meet without a second copy.
    """
    normals = hyperplanes(unit.shape[-1], search.bits * search.bands, unit, seed)
    powers = 2.0 ** torch.arange(search.bits, dtype=unit.dtype, device=unit.device)
    rows = []
    signed = [unit] if search.mean is None else [unit - search.mean, -unit - search.mean]
    for part in (p for vectors in signed for p in vectors.split(ROW_CHUNK)):
        bits = (part @ normals >= 0).to(unit.dtype).unflatten(-1, (search.bands, search.bits))
        rows.append((bits @ powers).to(torch.int32))
    keys = torch.cat(rows).mT.contiguous()  # (bands, count)
    if search.mean is None:
        keys = torch.minimum(keys, (1 << search.bits) - 1 - keys)
    return iter(keys)


def _meetings(keys: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Codes of pairs in equal buckets, and the vectors of buckets above the limit."""
    ordered, order = keys.sort(stable=True)  # stable: crowded buckets then yield the same pairs in every band
    codes: list[Tensor] = []
    for shift in range(1, min(BUCKET_LIMIT, len(keys) - 1) + 1):
        same = (ordered[shift:] == ordered[:-shift]).nonzero().squeeze(-1)
        if not len(same):
            return torch.cat(codes) if codes else order[:0], order[:0]
        codes.append(_codes(order[same], order[same + shift], n))
    crowded = (ordered[BUCKET_LIMIT + 1 :] == ordered[: -BUCKET_LIMIT - 1]).nonzero().squeeze(-1)
    return torch.cat(codes), order[crowded] % n


def _codes(a: Tensor, b: Tensor, n: int) -> Tensor:
    """i·n + j for entries of which at most one is a negated copy (index ≥ n) of another vector."""
    useful = ((a < n) | (b < n)) & (a % n != b % n)
    a, b = a[useful] % n, b[useful] % n
    return torch.minimum(a, b) * n + torch.maximum(a, b)


def _verified(unit: Tensor, codes: Tensor, cosine: float) -> tuple[Tensor, Tensor]:
    """The candidates that are pairs, with exact cosines."""
    pairs, cosines = [unit.new_zeros(0, 2, dtype=torch.long)], [unit.new_zeros(0)]
    for part in codes.split(VERIFY):
        i, j = part // len(unit), part % len(unit)
        dots = (unit[i] * unit[j]).sum(-1)
        hit = dots.abs() >= cosine
        pairs.append(torch.stack([i[hit], j[hit]], -1))
        cosines.append(dots[hit])
    return _in_order(torch.cat(pairs), torch.cat(cosines), len(unit))
