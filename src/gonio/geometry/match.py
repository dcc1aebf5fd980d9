"""Filters of one model paired with their counterparts in another: the best permutation, beside chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, import_extra
from gonio.geometry.blocks import row_directions
from gonio.geometry.chance import random_coherence
from gonio.geometry.norms import Array, as_matrices, check_finite, full_precision, whole
from gonio.seeding import normal

SIMULATED = 1024  # rows on each side, at most, of the random directions that give the chance level
CERTAINTY = 0.99  # with which no pair of random directions exceeds `limit`


@dataclass(frozen=True)
class Matching:
    """Result of :func:`match`.

    Example:
        >>> turned = torch.eye(32)[[1, 0, *range(2, 32)]]
        >>> print(gonio.geometry.match(torch.eye(32), turned))
        32 pairs, mean cosine 1.00 (by chance 0.31); 32 above 0.69, which random directions do not reach
    """

    first: Tensor  # (pairs,) int64, rows of the first set, ascending
    second: Tensor  # (pairs,) int64, the row of the second set paired with each
    cosines: Tensor  # (pairs,), of each pair
    chance: float  # mean cosine that the best pairing of random directions reaches
    limit: float  # not reached by any pair of random directions, with a probability of 0.99

    @property
    def recognised(self) -> Tensor:
        """Whether each pair is nearer than chance explains: its absolute cosine is above `limit`."""
        return self.cosines.abs() > self.limit

    def __str__(self) -> str:
        mean = float(self.cosines.abs().mean()) if len(self.cosines) else 0.0
        return (
            f"{len(self.first)} pairs, mean cosine {mean:.2f} (by chance {self.chance:.2f}); "
            f"{int(self.recognised.sum())} above {self.limit:.2f}, which random directions do not reach"
        )


@torch.no_grad()
def match(a: Array, b: Array, *, signs: Literal["same", "either"] = "same", seed: int = 0) -> Matching:
    r"""The one-to-one pairing of the rows of two matrices with the largest sum of cosines (Hungarian method).

    Two trainings of one architecture have their filters in another order; this finds the order. Each row of the smaller
    set has a partner in the larger one. The best of many pairs of random directions are near too, so `chance` is the
    mean cosine of the best pairing of random directions of the same numbers (at most 1024 on a side) and the same
    length, and `limit` a cosine that no pair of random directions reaches. A zero row has cosine 0 with every other.

    Args:
        a, b: one vector per row, (n, d) and (m, d); or weights (n, in, *kernel) of ungrouped 2-d or 3-d convolutions.
        signs: `same`; or `either`, to pair opposite rows too, by the absolute cosine (odd or linear units, dictionaries
            whose signs are free).
        seed: of the random directions.

    Raises:
        InvalidArgumentError: for another rank, different lengths d, no rows, non-finite entries, or unknown signs.
        MissingExtraError: without SciPy.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> filters, order = torch.randn(64, 576, generator=generator), torch.randperm(64, generator=generator)
        >>> found = gonio.geometry.match(filters, filters[order])
        >>> torch.equal(order[found.second], found.first), bool(found.recognised.all())
        (True, True)

    References: [1] H. Kuhn, "The Hungarian method for the assignment problem", Naval Res. Logist. Quart. 2, 1955. [2]
        S. Ainsworth, J. Hayase, S. Srinivasa, "Git Re-Basin: merging models modulo permutation symmetries", 2022,
        arXiv 2209.04836, §3.2 (pairing by weights).
    """
    rows = [whole(as_matrices(x, "match", stacks=False)) for x in (a, b)]
    rows = [x.to(torch.promote_types(rows[0].dtype, rows[1].dtype)) for x in rows]
    if not all(x.numel() for x in rows) or rows[0].shape[1] != rows[1].shape[1]:
        raise InvalidArgumentError(
            "match() takes two matrices (n, d) and (m, d), one vector per row",
            f"shapes {tuple(rows[0].shape)} and {tuple(rows[1].shape)}",
            "Pass the filters of the same layer of two models.",
        )
    if signs not in ("same", "either"):
        raise InvalidArgumentError("match() needs signs 'same' or 'either'", repr(signs), "Choose one of them.")
    for x in rows:
        check_finite(x, "match")
    with full_precision(rows[0]):
        first, second, cosines = _paired(rows[0], rows[1], signs)
        d = rows[0].shape[1]
        random = [normal((min(len(x), SIMULATED), d), seed, "match", n) for x, n in zip(rows, "ab", strict=True)]
        chance = float(_paired(random[0], random[1], signs)[2].abs().mean())
    limit = random_coherence(len(rows[0]) * len(rows[1]), d, quantile=CERTAINTY)
    return Matching(first, second, cosines, chance, limit)


def _paired(a: Tensor, b: Tensor, signs: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of both sets and their cosines."""
    assign = import_extra("scipy.optimize", "match()", package="scipy", extra="lab").linear_sum_assignment
    cosines = row_directions(a) @ row_directions(b).mT
    profit = cosines.abs() if signs == "either" else cosines
    first, second = (torch.from_numpy(x) for x in assign(profit.cpu().numpy(), maximize=True))
    return first, second, cosines[first, second].clamp(-1, 1)
