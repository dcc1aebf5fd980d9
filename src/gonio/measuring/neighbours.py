"""Nearly parallel or opposite filters among very many, or very long, ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.geometry import near_duplicates
from gonio.measuring.blocks import BLOCK, directions_of, row_blocks, rows_at
from gonio.seeding import generator

__all__ = ["NEAR", "NearPairs", "near_pairs"]

NEAR = 0.95  # |cosine| from which two filters count as nearly the same
SEARCHED = 1 << 26  # entries of the searched vectors, in float32 at once, up to which the search is made
SKETCH = 256  # directions onto which longer filters are projected for the search
CANDIDATE = 0.92  # |cosine| of the projections from which a pair is looked at

# Note [Sketch]
# Projected onto k Gaussian directions, a pair with the cosine c has one with mean c and standard deviation
# (1 − c²)/√k: at 0.95 and k = 256 that is 0.006, so the candidates miss fewer than one pair in 10⁶ at the
# threshold, and none that is nearer. Random directions in 256 dimensions never reach 0.92. Every candidate is
# then computed from the filters themselves, so that no pair is wrong.


@dataclass(frozen=True)
class NearPairs:
    """Pairs of filters, first < second, and their cosines, of at least :data:`NEAR` in absolute value."""

    pairs: Tensor
    cosines: Tensor


def near_pairs(matrix: Tensor, *, name: str) -> NearPairs | None:
    """All near pairs among the rows; None where there are too many rows to look.

    Args:
        name: seeds the projection.
    """
    n, d = matrix.shape
    if n * min(d, SKETCH) > SEARCHED:
        return None
    if d <= SKETCH:
        found = near_duplicates(_finite(matrix.float()), cosine=NEAR)
        return NearPairs(found.pairs, found.cosines)
    candidates = near_duplicates(_sketch(matrix, name), cosine=CANDIDATE).pairs
    return _verified(matrix, candidates)


def _finite(rows: Tensor) -> Tensor:
    """Rows with a non-finite entry become 0, and have no direction."""
    fine = torch.isfinite(rows).all(-1, keepdim=True)
    return rows if bool(fine.all()) else torch.where(fine, rows, torch.zeros_like(rows))


def _sketch(matrix: Tensor, name: str) -> Tensor:
    """The rows' directions, projected."""
    d = matrix.shape[1]
    onto = torch.randn(d, SKETCH, generator=generator(0, "near_pairs", name)).to(matrix.device)
    made = torch.empty(len(matrix), SKETCH, device=matrix.device)
    for start, rows in row_blocks(matrix):
        made[start : start + len(rows)] = directions_of(_finite(rows)).float() @ onto
    return made


def _verified(matrix: Tensor, candidates: Tensor) -> NearPairs:
    kept, cosines = [], []
    for part in candidates.split(max(1, BLOCK // matrix.shape[1])):
        first, second = (directions_of(rows_at(matrix, part[:, side])) for side in (0, 1))
        dots = (first * second).sum(-1)
        near = dots.abs() >= NEAR
        kept.append(part[near])
        cosines.append(dots[near])
    empty = matrix.new_zeros(0, dtype=torch.float32)
    return NearPairs(torch.cat([candidates[:0], *kept]), torch.cat([empty, *cosines]))
