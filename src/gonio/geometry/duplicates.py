"""Pairs of nearly parallel or nearly opposite vectors, in small sets exactly and in large ones by hashing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.banding import BUCKET_LIMIT, candidates, cheapest_search
from gonio.geometry.norms import least_norm
from gonio.geometry.precision import full_precision, whole, widen

__all__ = ["NearDuplicates", "near_duplicates"]

EXACT_SIZE = 8192  # up to it the Gram matrix costs no more than planning a search
BLOCK = 1024  # rows and columns of one Gram block
VERIFY = 1 << 12  # candidate pairs verified at once; small chunks stay in the cache
ROUNDING = 1e-6  # of a float32 cosine


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
    capped: int  # vectors that were not compared with all candidates, because too many are alike; 0 means none

    def __str__(self) -> str:
        opposite = int((self.cosines < 0).sum())
        head = (
            f"{len(self.pairs)} pairs with |cosine| >= {self.cosine:g} among {self.vectors} vectors "
            f"({len(self.pairs) - opposite} parallel, {opposite} opposite)"
        )
        if self.method == "exact":
            return f"{head}; exact search" + (f", ended before the last {self.capped} vectors" if self.capped else "")
        crowds = f", {self.capped} vectors in crowded buckets compared with {BUCKET_LIMIT} neighbours"
        expected = f"sign hashing, expected recall {self.recall:.4f} at the threshold"
        return f"{head}; {expected}{crowds if self.capped else ''}"


def near_duplicates(vectors: Tensor, *, cosine: float = 0.95, recall: float = 0.999, seed: int = 0) -> NearDuplicates:
    r"""All pairs of rows with :math:`|\cos\theta| \ge` `cosine`: duplicates and antipodes.

    Small sets, and those in which hashing would cost more, are searched exactly in blocks of the Gram matrix,
    never holding it whole. Others are searched by sign hashing: of a pool of :math:`m` sign bits each of
    :math:`L` bands reads :math:`k` and sorts the vectors into buckets; vectors in one bucket are compared
    exactly, so there are no false pairs. A pair at angle :math:`\theta` is found with probability

    .. math::
        1 - E_h\Big(1 - \tbinom{m-h}{k} \big/ \tbinom{m}{k}\Big)^L, \qquad h \sim \text{Binomial}(m, \theta/\pi),

    and the cheapest :math:`m, k, L` of the asked recall at the threshold are taken, foreseen from a sample of
    the vectors' own pairs. Vectors with a common direction are centred, for hashing only, where that is
    cheaper. Of more than 256 copies of one vector each is compared with 256 others, which the result says.

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
        unit, kept = _directions(vectors.detach())
        least = min(cosine, 1 - ROUNDING)  # equal rows have a cosine of 1 up to rounding
        search = cheapest_search(unit, cosine, recall, seed) if len(unit) > EXACT_SIZE else None
        if search is None:
            pairs, cosines, capped = _exact(unit, least)
            return NearDuplicates(kept[pairs], cosines, cosine, len(vectors), "exact", 1.0, capped)
        codes, capped = candidates(unit, search, seed)
        pairs, cosines = _verified(unit, codes, least)
        return NearDuplicates(kept[pairs], cosines, cosine, len(vectors), "hashed", search.recall, capped)


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


def _directions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows, and which rows these are: zero rows have none. Few passes, for sets of gigabytes."""
    wide = widen(vectors)
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    if not bool(norms.isfinite().all()):  # NaN and infinity, or squares beyond the dtype
        if not bool(wide.isfinite().all()):
            raise InvalidArgumentError("near_duplicates() needs finite entries", "NaN or infinity", "Remove such rows.")
        wide = wide / wide.abs().amax(-1, keepdim=True).clamp_min(1)
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    kept = (norms >= least_norm(vectors.dtype)).nonzero()[:, 0]
    return (wide / norms if len(kept) == len(wide) else wide[kept] / norms[kept]), kept


def _exact(unit: Tensor, cosine: float) -> tuple[Tensor, Tensor, int]:
    """Blocks of the upper triangle; only hits are kept. Also how many rows were left when memory had no room."""
    n = len(unit)
    pairs, cosines = [unit.new_zeros(0, 2, dtype=torch.long)], [unit.new_zeros(0)]
    room, left = max(EXACT_SIZE**2 // 2, n * BUCKET_LIMIT), 0
    for i, j in combinations_with_replacement(range(0, n, BLOCK), 2):
        if room < 0:
            left = n - i
            break
        gram = unit[i : i + BLOCK] @ unit[j : j + BLOCK].mT
        # Most rows have no hit; two reductions find those that have in a quarter of the time.
        rows = ((gram.amax(1) >= cosine) | (gram.amin(1) <= -cosine)).nonzero()
        hit = (gram[rows[:, 0]].abs() >= cosine).nonzero()
        hit[:, :1] = rows[hit[:, 0]]
        if i == j:
            hit = hit[hit[:, 0] < hit[:, 1]]
        pairs.append(hit + hit.new_tensor([i, j]))
        cosines.append(gram[hit[:, 0], hit[:, 1]])
        room -= len(hit)
    return *_in_order(torch.cat(pairs), torch.cat(cosines), n), left


def _in_order(pairs: Tensor, cosines: Tensor, n: int) -> tuple[Tensor, Tensor]:
    order = (pairs[:, 0] * n + pairs[:, 1]).argsort()
    return pairs[order], cosines[order].clamp(-1, 1)


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
