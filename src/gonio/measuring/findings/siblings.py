"""A matrix beside those of the same name in other layers: how far its norm is from theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

FACTOR = 10.0  # of the norm from the median of the siblings
DISTANCE = 8.0  # in units of the siblings' spread
LEAST_SPREAD = 0.05  # of log norms: those of fresh layers are equal to a fraction of a per cent
SIBLINGS = 3  # without a tensor itself


@dataclass(frozen=True)
class Place:
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
        others = f"its {self.siblings} siblings of other layers"
        if self.ratio == 0:
            return f"every value is 0, unlike in {others}"
        if (self.distance or 0) < DISTANCE or 1 / FACTOR < self.ratio < FACTOR:
            return None
        return f"its norm is {self.ratio:.3g} times the median of {others}, {self.distance:.3g} times their spread away"


def places(norms: Iterable[tuple[str, tuple[int, ...], float]]) -> dict[str, Place]:
    """The places of tensors that have at least three siblings, by name; vectors have none.

    Args:
        norms: name, shape and norm of each.

    Example:
        >>> from gonio.measuring.findings.siblings import places
        >>> norms = [(f"layers.{i}.down", (8, 8), 100.0 if i == 3 else 1.0) for i in range(6)]
        >>> places(norms)["layers.3.down"].found
        'its norm is 100 times the median of its 5 siblings of other layers, 92.1 times their spread away'
    """
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[str, float]]] = {}
    for name, shape, norm in norms:
        if len(shape) > 1:
            groups.setdefault((re.sub(r"\d+", "#", name), shape), []).append((name, norm))
    return {
        name: _place(norm, [other for other_name, other in group if other_name != name])
        for group in groups.values()
        if len(group) > SIBLINGS
        for name, norm in group
    }


def _place(norm: float, others: list[float]) -> Place:
    """The spread is 1.4826 times the median absolute deviation, a standard deviation for normal numbers (P. Rousseeuw,
    C. Croux, 'Alternatives to the median absolute deviation', JASA 88, 1993, section 1).
    """
    logs = [math.log(other) for other in others if other]
    if len(logs) < len(others):  # a sibling that is 0: nothing to compare with
        return Place(len(others))
    if not norm:
        return Place(len(others), ratio=0.0)
    middle = median(logs)
    spread = max(1.4826 * median(abs(log - middle) for log in logs), LEAST_SPREAD)
    away = math.log(norm) - middle
    return Place(len(others), math.exp(away), abs(away) / spread)
