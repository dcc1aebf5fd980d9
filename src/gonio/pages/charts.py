"""Lanes along the depth of a model: one bar per layer, the same layers in every lane.

A lane shows a range and a middle value per layer, and the value for random weights as a step line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any, Literal

from gonio.messages import fixed, say
from gonio.pages.picture import Area, Axis, Line, Mark, Picture, Values, bare
from gonio.pages.tables import number

WIDTH, HEIGHT, MARKS = 1000, 56, 16  # of a lane, in units of its SVG; height of the marks of findings
BARS = 500  # of a chart, at most
_LOG = 30.0  # ratio of the largest to the smallest value from which a lane is logarithmic
_DECADES = 1e4  # of a logarithmic lane, at most; smaller values lie on its lower edge
_WIDEST = 1e12  # the same of a lane that shows every layer
LEVELS = {"": ("quiet", 0.4), "info": ("c1", 0.6), "warn": ("c5", 0.8), "error": ("c2", 1.0)}  # colour, height of mark
_STAGES, _BLOCKS = 12, 64  # names, and names and numbers, of parts of the model below a chart, at most

Range = tuple[float, float]


@dataclass(frozen=True)
class Lane:
    """The figures of one lane, one entry per layer in the order of the model; None where a layer has none.

    Attributes:
        title, note: its heading and what it shows.
        middles: the value, or the median. ranges: smallest and largest value.
        chance: the value for random weights.
        others: the values of the same layers in other models.
        every: whether a logarithmic axis reaches down to the smallest middle value, however far apart they are.
        scale: "linear", or "auto" for a logarithmic one where the values are far apart.
    """

    title: str
    note: str
    middles: Values
    ranges: Sequence[Range | None] = ()
    chance: Values = ()
    others: Sequence[Values] = ()
    every: bool = False
    scale: Literal["linear", "auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("title", "note"):
            object.__setattr__(self, name, fixed(getattr(self, name)))

    def binned(self, bins: Sequence[range]) -> Lane:
        """The lane with one entry for each of these runs of layers: medians, and the whole of the ranges."""

        def medians(values: Values) -> Values:
            return [_median([values[i] for i in run]) for run in bins] if values else ()

        ranges = self.ranges or [None if middle is None else (middle, middle) for middle in self.middles]
        whole = [[r for i in run if (r := ranges[i]) is not None] for run in bins]
        return replace(
            self,
            middles=medians(self.middles),
            ranges=[(min(r[0] for r in rs), max(r[1] for r in rs)) if rs else None for rs in whole],
            chance=medians(self.chance),
            others=[medians(other) for other in self.others],
        )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


def runs(count: int, most: int = BARS) -> list[range]:
    """The layers of each bar: one, or as few as leave at most so many bars.

    Example:
        >>> from gonio.pages.charts import runs
        >>> runs(5, 3)
        [range(0, 2), range(2, 4), range(4, 5)]
    """
    step = -(-count // most) if count else 1
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


@dataclass(frozen=True)
class DrawnLane:
    """A lane as SVG. `top`, `bottom`: the values at its edges, as text."""

    title: str
    note: str
    top: str
    bottom: str
    svg: Any


def depth_lane(lane: Lane, levels: Sequence[str], over: str = "depth") -> DrawnLane | None:
    """The lane as SVG; None if no layer has a value.

    Args:
        levels: of each layer's worst finding, "" for none.
        over: what the bars follow, for the title.
    """
    every = [
        *lane.middles,
        *lane.chance,
        *(v for r in lane.ranges if r for v in r),
        *(v for o in lane.others for v in o),
    ]
    known = [value for value in every if value is not None and math.isfinite(value)]
    if not known:
        return None
    y = _axis(known, lane)
    ground = y.low if y.log else max(y.low, 0.0)  # of bars
    ranges = lane.ranges or [None if middle is None else (ground, middle) for middle in lane.middles]
    marks = _bars([None if r is None else (max(r[0], y.low), max(r[1], y.low)) for r in ranges], levels)
    marks += [_ticks(lane.chance, "ink", 1.0, 0.0)] if lane.chance else []
    marks += [_ticks(other, ("c6", "c3", "c4", "c7")[i % 4], 3.0) for i, other in enumerate(lane.others, start=1)]
    marks += [_ticks(lane.middles, "ink", 2.0)] if lane.ranges else []
    zeros = [y.log and pair is not None and pair[1] == 0 for pair in ranges]  # no place on a logarithmic axis
    marks += [_ticks([y.low if zero else None for zero in zeros], "c2", 4.0)] if any(zeros) else []
    top, bottom = number(y.high), number(y.low)
    cut = any(pair is not None and pair[0] < y.low and not zero for pair, zero in zip(ranges, zeros, strict=True))
    bottom = f"≤ {bottom}" if cut else bottom
    note = say("{note}; orange: 0", note=lane.note) if any(zeros) else lane.note
    title = say(
        "{title} over {over}: {note}; from {bottom} to {top}",
        title=lane.title,
        over=fixed(over),
        note=note,
        bottom=bottom,
        top=top,
    )
    picture = Picture(title, Axis(0.0, len(levels)), y, tuple(marks))
    return DrawnLane(lane.title, note, top, bottom, bare(picture, WIDTH, HEIGHT, digits=1))


def marks(levels: Sequence[str], title: str) -> Any:
    """One bar per layer in the colour of its worst finding: the worse, the higher."""
    bars = _bars([(0.0, LEVELS[level][1]) for level in levels], levels)
    return bare(Picture(title, Axis(0.0, len(levels)), Axis(0.0, 1.0), tuple(bars)), WIDTH, MARKS, digits=1)


def _bars(ranges: Sequence[Range | None], levels: Sequence[str]) -> list[Mark]:
    """The ranges of the layers as bars, in the colours of their levels."""
    made: list[Mark] = []
    for level in dict.fromkeys(levels):
        bars = [(i, r) for i, r in enumerate(ranges) if r is not None and levels[i] == level]
        xs = [x for i, _ in bars for x in (i + 0.15, i + 0.85, i + 1.0)]
        lows, highs = ([v for _, r in bars for v in (r[k], r[k], None)] for k in (0, 1))
        made += [Area(xs, lows, highs, LEVELS[level][0], 1.0)] if bars else []
    return made


def _ticks(values: Values, color: str, width: float, margin: float = 0.15) -> Line:
    """A short line per layer; with a width of 1, dashed."""
    xs = [x for i in range(len(values)) for x in (i + margin, i + 1 - margin, i + 1.0)]
    return Line(xs, [y for value in values for y in (value, value, None)], color, width, dash=width == 1.0)


def _axis(known: Sequence[float], lane: Lane) -> Axis:
    """Logarithmic where values are far apart."""
    low, high = min(known), max(known)
    middle = min((value for value in lane.middles if value is not None and 0 < value < math.inf), default=high)
    edge = max(min(high / _DECADES, middle / 10), high / _WIDEST) if lane.every else high / _DECADES
    least = max(min((value for value in known if value > 0), default=high), edge)
    if lane.scale == "auto" and high > _LOG * least > 0 and low >= 0:
        return Axis(least, high, log=True)
    if not lane.ranges or 0 <= low < 0.4 * high:
        low = min(low, 0.0)
    return Axis(low, high if high > low else low + (abs(low) or 1.0))


def stages(paths: Sequence[str]) -> list[tuple[str, int]]:
    """The parts of a model below a chart: the first words of the layers' names, with their number of layers in a row.

    Where parts are numbered, those are the parts: the first of them has its name, the others their number.

    Example:
        >>> from gonio.pages.charts import stages
        >>> stages(["embed", *(f"model.layers.{i // 2}.{i % 2}.proj" for i in range(6)), "head"])
        [('embed', 1), ('layers.0', 2), ('1', 2), ('2', 2), ('head', 1)]
        >>> stages(["conv1", "conv2", "fc"])
        [('conv1', 1), ('conv2', 1), ('fc', 1)]
    """
    for words in (1, 2, 3, 4, 5):
        parts = _parts(paths, words)
        names = _numbered([part for part, _ in parts])
        numbers = sum(name.isdecimal() for name in names)
        if 1 < len(parts) <= _BLOCKS and numbers > 0 and len(parts) - numbers <= _STAGES:
            return [(name, layers) for name, (_, layers) in zip(names, parts, strict=True)]
    for words in (3, 2, 1):
        parts = _parts(paths, words)
        if 1 < len(parts) <= _STAGES:
            return parts
    return []


def _parts(paths: Sequence[str], words: int) -> list[tuple[str, int]]:
    """The first words of the names, with the number of layers in a row that share them."""
    starts = (".".join(path.split(".")[:words]) for path in paths)
    return [(start, len(list(members))) for start, members in groupby(starts)]


def _numbered(parts: Sequence[str]) -> list[str]:
    """Short names: of numbered parts in a row the last two words for the first, and the number for the others."""
    names, before = [], None
    for part in parts:
        stem, _, last = part.rpartition(".")
        number = last.isdecimal()
        names.append(part if not number else last if stem == before else ".".join(part.split(".")[-2:]))
        before = stem if number else None
    return names
