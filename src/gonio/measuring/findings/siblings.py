"""A matrix beside those of the same name in other layers: how far its norm is from theirs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from gonio.measuring.reading.order import SIBLINGS, families
from gonio.messages import say

FACTOR = 10.0  # of the norm from the median of the siblings
DISTANCE = 8.0  # in units of the siblings' spread
FEWEST = 2  # siblings that tell that a matrix should not be 0
LEAST_SPREAD = 0.05  # of log norms: those of fresh layers are equal to a fraction of a per cent


@dataclass(frozen=True)
class AmongSiblings:
    """One tensor among its siblings, which have the same name up to numbers in it, and the same shape.

    Attributes:
        siblings: their number.
        ratio: of its norm to their median; None if one of them is 0.
        distance: |log ratio| in units of their spread.
    """

    siblings: int
    ratio: float | None = None
    distance: float | None = None

    @property
    def found(self) -> str | None:
        """What is unusual about the norm; None if it is not."""
        if self.ratio is None:
            return None
        if self.ratio == 0:
            return say("every value is 0, unlike in its {n} siblings of other layers", n=self.siblings)
        if (self.distance or 0) < DISTANCE or 1 / FACTOR < self.ratio < FACTOR:
            return None
        return say(
            "its norm is {ratio:.3g} times the median of its {n} siblings of other layers, "
            "{distance:.3g} times their spread away",
            ratio=self.ratio,
            n=self.siblings,
            distance=self.distance,
        )


def places(norms: Iterable[tuple[str, tuple[int, ...], float]]) -> dict[str, AmongSiblings]:
    """The places of tensors that have at least three siblings, by name; vectors have none.

    A tensor that is 0 beside others that are not has a place among two siblings already.

    Args:
        norms: name, shape and norm of each.

    Example:
        >>> from gonio.measuring.findings.siblings import places
        >>> norms = [(f"layers.{i}.down", (8, 8), 100.0 if i == 3 else 1.0) for i in range(6)]
        >>> places(norms)["layers.3.down"].found
        'its norm is 100 times the median of its 5 siblings of other layers, 92.1 times their spread away'
    """
    known = {name: (shape, norm) for name, shape, norm in norms}
    return {
        name: place
        for names in families({name: shape for name, (shape, _) in known.items()}, siblings=FEWEST)
        for name, place in zip(names, _among([known[name][1] for name in names]), strict=True)
        if len(names) > SIBLINGS or place.ratio == 0
    }


def _among(norms: list[float]) -> list[AmongSiblings]:
    """Each of the norms among the others.

    The spread is 1.4826 times the median absolute deviation, a standard deviation for normal numbers (P. Rousseeuw,
    C. Croux, 'Alternatives to the median absolute deviation', JASA 88, 1993, section 1). The median without one of the
    norms is one of three numbers, so that sorting the deviations from each of them once is enough.
    """
    siblings, zeros = len(norms) - 1, sum(norm == 0 for norm in norms)
    logs = sorted(math.log(norm) for norm in norms if norm)
    deviations: dict[float, list[float]] = {}

    def place(norm: float) -> AmongSiblings:
        if zeros > (norm == 0):  # a sibling that is 0: nothing to compare with
            return AmongSiblings(siblings)
        if not norm:
            return AmongSiblings(siblings, ratio=0.0)
        log = math.log(norm)
        middle = _median_without(logs, log)
        if middle not in deviations:
            deviations[middle] = sorted(abs(other - middle) for other in logs)
        spread = max(1.4826 * _median_without(deviations[middle], abs(log - middle)), LEAST_SPREAD)
        return AmongSiblings(siblings, math.exp(log - middle), abs(log - middle) / spread)

    return [place(norm) for norm in norms]


def _median_without(ordered: list[float], value: float) -> float:
    """The median of sorted numbers without one that has this value."""
    left_out, count = bisect_left(ordered, value), len(ordered) - 1

    def at(k: int) -> float:
        return ordered[k + (k >= left_out)]

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2
