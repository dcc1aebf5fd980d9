"""A matrix beside those of the same name in other layers: how far its norm is from theirs, and which it equals."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from gonio.measuring.reading.entry import holds_variances
from gonio.measuring.reading.order import SIBLINGS, families, families_of_vectors, natural, parted
from gonio.messages import say

FACTOR = 10.0  # of the norm from the median of the siblings
DISTANCE = 8.0  # in units of the siblings' spread
VECTORS = 1e4  # the norm of a vector, and its ratio to the median, above which it is named; of variances the squares
FEWEST = 2  # siblings that tell that a matrix should not be 0
_LARGEST_LOG = 709.0  # of a ratio that float64 can hold; faults in exponents exceed it
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
    """The places of tensors that have at least three siblings, by name.

    A matrix that is 0 beside others that are not has a place among two siblings already. A vector has a place only if
    it is 0 beside three that are not, or as large as after a fault in an exponent: norms of biases and gains differ too
    much from layer to layer for more.

    Args:
        norms: name, shape and norm of each.

    Example:
        >>> from gonio.measuring.findings.siblings import places
        >>> norms = [(f"layers.{i}.down", (8, 8), 100.0 if i == 3 else 1.0) for i in range(6)]
        >>> places(norms)["layers.3.down"].found
        'its norm is 100 times the median of its 5 siblings of other layers, 92.1 times their spread away'
    """
    known = {name: (shape, norm) for name, shape, norm in norms}
    shapes = {name: shape for name, (shape, _) in known.items()}

    def placed(alike: list[list[str]]) -> Iterator[tuple[str, AmongSiblings]]:
        for names in alike:
            yield from zip(names, _among([known[name][1] for name in names]), strict=True)

    matrices, vectors = placed(families(shapes, siblings=FEWEST)), placed(families_of_vectors(shapes))
    found = {name: place for name, place in matrices if place.siblings >= SIBLINGS or place.ratio == 0}
    return found | {name: place for name, place in vectors if place.ratio == 0 or _vast(name, place, known[name][1])}


def _vast(name: str, place: AmongSiblings, norm: float) -> bool:
    """Whether no training leaves a vector so large beside its siblings."""
    return min(place.ratio or 0.0, norm) >= (VECTORS**2 if holds_variances(name) else VECTORS)


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
        ratio = math.exp(min(log - middle, _LARGEST_LOG))
        return AmongSiblings(siblings, ratio, abs(log - middle) / spread)

    return [place(norm) for norm in norms]


def _median_without(ordered: list[float], value: float) -> float:
    """The median of sorted numbers without one that has this value."""
    left_out, count = bisect_left(ordered, value), len(ordered) - 1

    def at(k: int) -> float:
        return ordered[k + (k >= left_out)]

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2


def copies(shapes: Mapping[str, tuple[int, ...]], marks: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Matrices that equal those of an earlier layer, by (layer, earlier layer).

    At least half of a layer's matrices must be copies, or one alone of its whole family: tables that no training
    changes, such as angles of positions, are alike in many layers. Siblings that are all alike are clones at their
    start, or shared, and no copies.

    Args:
        shapes: of the matrices. marks: the same for matrices that are equal.

    Example:
        >>> from gonio.measuring.findings.siblings import copies
        >>> shapes = {f"layers.{i}.{name}": (8, 8) for i in range(4) for name in ("up", "down")}
        >>> copies(shapes, {name: name.replace("3", "2") for name in shapes})
        {('layers.3', 'layers.2'): ['layers.3.up', 'layers.3.down']}
    """
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    alone, layers = set(), Counter[str]()
    known = families(shapes, siblings=FEWEST)
    for names in known:
        alike = defaultdict(list)
        for name in names:
            alike[marks[name]].append(name)
        several = [sorted(group, key=natural) for group in alike.values() if len(group) > 1]
        groups = [group for group in several if not _all_of(group, names)]
        for first, *others in groups:
            for name in others:
                found[_layer_of(name, first), _layer_of(first, name)].append(name)
        if len(groups) == 1 and len(groups[0]) == 2:
            alone.add(groups[0][1])
    for name in chain.from_iterable(known) if found else ():
        layers.update(_layers(name))
    return {
        pair: names for pair, names in found.items() if 2 * len(names) >= layers[pair[0]] or alone.issuperset(names)
    }


def _all_of(group: list[str], names: list[str]) -> bool:
    """Whether a group is all of a family, or all of it with the same first numbers, as the experts of one layer."""
    same = 0
    while len({parted(name)[same] for name in group}) == 1:
        same += 1
    start = parted(group[0])[:same]
    return sum(parted(name)[:same] == start for name in names) == len(group)


def _layer_of(name: str, other: str) -> str:
    """The name up to the first number that differs in the other one."""
    parts = parted(name)
    differs = next(place for place, pair in enumerate(zip(parts, parted(other), strict=True)) if len({*pair}) > 1)
    return "".join(parts[: differs + 1])


def _layers(name: str) -> list[str]:
    """All layers that a tensor lies in: its name up to each number."""
    parts = parted(name)
    return ["".join(parts[: place + 1]) for place in range(1, len(parts), 2)]
