"""Charts along the depth of a model, as SVG path data: one stroke per layer, the same layers in every lane.

A lane shows a range and a middle value per layer, and the value for random weights as a step line. Path data of a few
bytes per layer keep a page of 1,000 layers small; the template gives them colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

WIDTH, HEIGHT = 1000, 56  # of a lane, in units of its SVG
_LOG = 30.0  # ratio of the largest to the smallest value from which a lane is logarithmic
_DECADES = 1e4  # of a logarithmic lane, at most; smaller values lie on its lower edge
_RISE = {"error": 0, "warn": 3, "info": 6, "": 9}  # top of a layer's mark, so that levels differ without colours
_STAGES = 12  # names of parts of the model below a chart, at most

Range = tuple[float, float]


@dataclass(frozen=True)
class Lane:
    """The figures of one lane, one entry per layer in the order of the model; None where a layer has none.

    Attributes:
        title, note: its heading and what it shows.
        ranges: smallest and largest value. `middles`: the value, or the median.
        chance: the value for random weights.
        others: the values of the same layers in other models.
        scale: "linear", or "auto" for a logarithmic one where the values are far apart.
    """

    title: str
    note: str
    middles: Sequence[float | None]
    ranges: Sequence[Range | None] = ()
    chance: Sequence[float | None] = ()
    others: Sequence[Sequence[float | None]] = ()
    scale: Literal["linear", "auto"] = "auto"


@dataclass(frozen=True)
class Drawn:
    """A lane as path data.

    Attributes:
        top, bottom: the values at the edges, as text.
        strokes: path data of ranges (or of bars from the bottom) by level of finding, "" for none.
        middles, chance: path data. `others`: that of each other model.
        width: of a stroke.
    """

    title: str
    note: str
    top: str
    bottom: str
    strokes: dict[str, str]
    middles: str
    chance: str
    others: tuple[str, ...]
    width: float


def depth_lane(lane: Lane, levels: Sequence[str]) -> Drawn | None:
    """The lane as path data; None if no layer has a value.

    Args:
        levels: of each layer's worst finding, "" for none.
    """
    ranges = lane.ranges or [None] * len(lane.middles)
    chance = lane.chance or [None] * len(lane.middles)
    every = [*lane.middles, *chance, *(v for r in ranges if r for v in r), *(v for other in lane.others for v in other)]
    known = [value for value in every if value is not None and math.isfinite(value)]
    if not known:
        return None
    scale = _Scale.of(known, lane)
    step = WIDTH / len(levels)
    strokes: dict[str, list[str]] = {}
    middles, steps = [], []
    for i, level in enumerate(levels):
        x = f"{(i + 0.5) * step:.4g}"
        middle, law = scale.y(lane.middles[i]), scale.y(chance[i])
        low, high = (scale.y(v) for v in ranges[i] or (None, None))
        if low is not None and high is not None:
            strokes.setdefault(level, []).append(f"M{x} {min(low + 0.5, HEIGHT):g}V{max(high - 0.5, 0):g}")
        elif middle is not None and not lane.ranges:
            strokes.setdefault(level, []).append(f"M{x} {HEIGHT}V{min(middle, HEIGHT - 1):g}")
        if middle is not None and lane.ranges:
            middles.append(_tick(i, middle, step))
        if law is not None:
            steps.append(f"M{i * step:.4g} {law:g}h{step:.4g}")
    others = ([_tick(i, y, step) for i, v in enumerate(one) if (y := scale.y(v)) is not None] for one in lane.others)
    return Drawn(
        lane.title,
        lane.note,
        top=f"{scale.high:.3g}",
        bottom=f"{scale.low:.3g}",
        strokes={level: "".join(paths) for level, paths in strokes.items()},
        middles="".join(middles),
        chance="".join(steps),
        others=tuple("".join(ticks) for ticks in others),
        width=round(0.7 * step, 2),
    )


def _tick(i: int, y: float, step: float) -> str:
    return f"M{(i + 0.15) * step:.4g} {y:g}h{0.7 * step:.3g}"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], lane: Lane) -> _Scale:
        low, high = min(values), max(values)
        least = max(min((value for value in values if value > 0), default=high), high / _DECADES)
        if lane.scale == "auto" and high > _LOG * least > 0 and low >= 0:
            return cls(least, high, log=True)
        if not lane.ranges or 0 <= low < 0.4 * high:
            low = min(low, 0.0)
        return cls(low, high if high > low else low + (abs(low) or 1.0), log=False)

    def y(self, value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - 1 - (HEIGHT - 2) * share, 1)


def marks(levels: Sequence[str]) -> dict[str, str]:
    """One stroke per layer by level of finding: the worse, the higher."""
    step, made = WIDTH / len(levels), dict[str, list[str]]()
    for i, level in enumerate(levels):
        made.setdefault(level, []).append(f"M{(i + 0.5) * step:.4g} 16V{_RISE[level]}")
    return {level: "".join(paths) for level, paths in made.items()}


def stages(paths: Sequence[str]) -> list[tuple[str, int]]:
    """The parts of a model below a chart: the first words of the layers' names, with their number of layers in a row.

    Example:
        >>> from gonio.pages.charts import stages
        >>> stages(["conv1", *(f"layer{i // 8}.{i % 8}.conv1" for i in range(16)), "fc"])
        [('conv1', 1), ('layer0', 8), ('layer1', 8), ('fc', 1)]
    """
    for words in (3, 2, 1):
        parts = (".".join(path.split(".")[:words]) for path in paths)
        made = [(part, len(list(members))) for part, members in groupby(parts)]
        if 1 < len(made) <= _STAGES:
            return made
    return []


def line(xs: Sequence[float], ys: Sequence[float]) -> str:
    """A line through points in whole numbers, without those on a level line between their neighbours."""
    points = [(round(x), round(y)) for x, y in zip(xs, ys, strict=True)]
    kept = [
        point
        for i, point in enumerate(points)
        if not (0 < i < len(points) - 1 and points[i - 1][1] == point[1] == points[i + 1][1])
    ]
    return "M" + "L".join(f"{x} {y}" for x, y in kept) if kept else ""
