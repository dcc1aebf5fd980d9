"""A figure as data, and the SVG of a figure: all path data of pages is written here and in `charts`.

A picture has two axes, and marks in the coordinates of its data. :func:`svg` draws it with ticks and a legend,
:func:`spark` as a small chart in a table; :mod:`gonio.plots` draws the same picture with Matplotlib. Colours are names
of variables of the style sheet, so that one SVG is legible on a light page, on a dark page and on paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import Any, Literal

from gonio.escaping import redact, shorten
from gonio.pages import environment

Values = Sequence[float | None]
Label = tuple[float, str]

SPARK = (180, 120)  # width and height of a spark, in units of its SVG
_CHARACTER = 6.9  # mean width of a character of the font, in pixels, rounded up
_LINE = 16  # height of a line of text


@dataclass(frozen=True)
class Axis:
    """One axis from `low` to `high`.

    Attributes:
        label: text beside the axis.
        log: logarithmic. whole: ticks at whole numbers only. down: the smaller value is at the top.
        ticks: value and text of each tick; None: round values.
        form: of the text of a round value, such as `"{}°"`.
        opposite: value and text of labels on the other side of the picture.
        inside: the labels are above their values in the picture, not beside it.
        grid: with a line across the picture at each tick.
    """

    low: float
    high: float
    label: str = ""
    log: bool = False
    whole: bool = False
    down: bool = False
    ticks: tuple[Label, ...] | None = None
    form: str = "{}"
    opposite: tuple[Label, ...] = ()
    inside: bool = False
    grid: bool = False

    def share(self, value: float) -> float:
        """The place of a value: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The ticks with their texts."""
        if self.ticks is not None:
            return self.ticks
        rounded = ticks(self.low, self.high, log=self.log, whole=self.whole)
        return tuple((value, self.form.format(f"{value:.12g}".replace("-", "−"))) for value in rounded)


@dataclass(frozen=True)
class Line:
    """A line through points; a missing value interrupts it. `label`: its name in the legend."""

    xs: Sequence[float]
    ys: Values
    color: str = "c1"
    width: float = 2.0
    dash: bool = False
    label: str = ""


@dataclass(frozen=True)
class Area:
    """The area between two lines."""

    xs: Sequence[float]
    lows: Values
    highs: Values
    color: str = "c1"
    opacity: float = 0.2


@dataclass(frozen=True)
class Dots:
    """Single points; a triangle points at values outside of the picture."""

    xs: Sequence[float]
    ys: Sequence[float]
    color: str = "c1"
    radius: float = 3.0
    opacity: float = 1.0
    shape: Literal["dot", "cross", "left", "right"] = "dot"


Mark = Line | Area | Dots


@dataclass(frozen=True)
class Picture:
    """A figure as data.

    Attributes:
        title: what it shows, for readers who do not see it. description: its numbers in words.
        height: in pixels, without the legend.
        ends: of a spark: texts below its axis, separated by `|`.
        series: values under the pointer by name, at the whole numbers from 1 on; empty for none.
    """

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    description: str = ""
    height: int = 230
    ends: str = ""
    series: Mapping[str, Values] | None = None


TICKS = 6  # steps of an axis at most


def ticks(low: float, high: float, *, log: bool = False, whole: bool = False) -> list[float]:
    """At most :data:`TICKS` + 1 round values from `low` to `high`: multiples of 1, 2, 2.5 or 5 times a power of ten.

    Example:
        >>> from gonio.pages.picture import ticks
        >>> ticks(0.0, 1.0), ticks(94.2, 95.7), ticks(0.01, 3.0, log=True)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [94.25, 94.5, 94.75, 95.0, 95.25, 95.5], [0.01, 0.1, 1.0])
    """
    if log and high / low >= 10:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        powers = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / TICKS)))]
        if len(powers) > 2:
            return powers
        return [v for v in (m * 10.0**p for p in range(first - 1, last + 1) for m in (1, 2, 5)) if low <= v <= high]
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    sizes = [size * power for size in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)]
    if whole:
        sizes = [max(1.0, round(size)) for size in sizes]
    step = next((size for size in sizes if span / size <= TICKS), sizes[-1])
    first, last, digits = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9), 9 - math.floor(math.log10(step))
    return [round(i * step, digits) for i in range(first, last + 1)]


def fitted(values: Iterable[float | None], *, pad: float = 0.06, log: bool = False) -> tuple[float, float]:
    """The limits of an axis that shows all finite values, with a margin."""
    known = [value for value in values if value is not None and math.isfinite(value) and (value > 0 or not log)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if log:
        margin = max((high / low) ** pad, 1.05)
        return low / margin, high * margin
    margin = pad * (high - low or abs(high) or 10.0)
    return low - margin, high + margin


def stairs(edges: Sequence[float], heights: Sequence[float]) -> tuple[list[float], list[float]]:
    """The outline of a histogram as points."""
    xs = [edge for pair in pairwise(edges) for edge in pair]
    return xs, [height for height in heights for _ in range(2)]


# --- SVG -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """Where the axes of a picture lie in its SVG, and how coordinates are rounded."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float
    digits: int

    def across(self, value: float) -> float:
        share = self.x.share(value)
        return round(self.left + (self.right - self.left) * share, self.digits)

    def up(self, value: float) -> float:
        share = self.y.share(value)
        share = 1 - share if self.y.down else share
        return round(self.bottom - (self.bottom - self.top) * share, self.digits)


def path(points: Sequence[tuple[float, float] | None]) -> str:
    """Path data through points; None interrupts it, and points between two others on a level line are left out."""
    made, last = "", None
    for i, point in enumerate(points):
        ahead = points[i + 1] if i + 1 < len(points) else None
        if point is None or last is None:
            made += "" if point is None else f"M{point[0]:g} {point[1]:g}"
        elif any(last[k] == point[k] and ahead and ahead[k] == point[k] for k in (0, 1)):
            continue
        elif point[1] == last[1]:
            made += f"H{point[0]:g}"
        else:
            made += f"V{point[1]:g}" if point[0] == last[0] else f"L{point[0]:g} {point[1]:g}"
        last = point
    return made


def _shape(mark: Mark, frame: _Frame) -> Any:
    """The path data of a mark; markup, or a page would cut it as it cuts the long texts of others."""
    from markupsafe import Markup

    def points(xs: Sequence[float], ys: Values) -> list[tuple[float, float] | None]:
        known = (y is not None and math.isfinite(y) for y in ys)
        return [(frame.across(x), frame.up(y or 0.0)) if is_known else None
                for x, y, is_known in zip(xs, ys, known, strict=True)]  # fmt: skip

    if isinstance(mark, Line):
        return Markup(path(points(mark.xs, mark.ys)))
    if isinstance(mark, Area):
        edges = zip(points(mark.xs, mark.highs), points(mark.xs, mark.lows), strict=True)
        runs = [list(run) for known, run in groupby(edges, key=lambda pair: None not in pair) if known]
        return Markup("".join(f"{path([high for high, _ in run] + [low for _, low in run[::-1]])}Z" for run in runs))
    r = mark.radius
    form = {
        "dot": f"m{-r:g} 0a{r:g} {r:g} 0 1 0 {2 * r:g} 0a{r:g} {r:g} 0 1 0 {-2 * r:g} 0",
        "cross": f"m{-r:g} {-r:g}l{2 * r:g} {2 * r:g}m0 {-2 * r:g}l{-2 * r:g} {2 * r:g}",
        "left": f"l{2 * r:g} {-r:g}v{2 * r:g}z",
        "right": f"l{-2 * r:g} {-r:g}v{2 * r:g}z",
    }[mark.shape]
    return Markup("".join(f"M{x:g} {y:g}{form}" for x, y in filter(None, points(mark.xs, mark.ys))))


def bare(picture: Picture, width: int, height: int, *, digits: int = 0) -> Any:
    """A picture without axes as an `<svg>` element that a page stretches; lines keep their width.

    A thick line is what was measured, a thin one what is expected.
    """
    frame, paths = _Frame(picture.x, picture.y, 0, width, 2, height - 1, digits), []
    for mark in picture.marks:
        kind, usual = ("area", "fill:var(--c1)") if isinstance(mark, Area) else ("dots", "stroke:var(--c1)")
        if isinstance(mark, Line) and mark.width < 2:
            kind, usual = "dash" if mark.dash else "law", "stroke:var(--ink)"
        style = f"{usual.partition(':')[0]}:var(--{mark.color})"
        style = "" if style == usual else style
        style += ";fill-opacity:1" if isinstance(mark, Area) and mark.opacity == 1 else ""
        paths.append((kind, style, _shape(mark, frame)))
    return _macros().bare(picture, width, height, paths)


def spark(picture: Picture | None) -> Any:
    """A picture as a small chart in a table; empty for None."""
    return "" if picture is None else bare(picture, *SPARK)


def svg(picture: Picture, *, width: int, css: str = "fill", legend: bool = False) -> Any:
    """A picture with its axes as an `<svg>` element for an HTML page.

    Args:
        width: in pixels; the page may show it larger or smaller.
        css: classes of the element.
        legend: with the names of the lines above the picture.
    """
    x, y, head = picture.x, picture.y, 8 + _LINE * bool(picture.x.opposite)
    named = [(mark, shorten(mark.label)) for mark in picture.marks if legend and isinstance(mark, Line) and mark.label]
    keys = list(_in_lines([28 + _wide(text) for _, text in named], width - 10))
    top = head + _LINE * (1 + max(line for _, line in keys)) if keys else head
    left, right = _side(y.labels, y) + _LINE * bool(y.label) + 8, _side(y.opposite, y) + 10
    across = _Frame(x, y, left, width - right, 0, 1, 1).across
    below = list(_placed([(across(value), text) for value, text in x.labels], width, named=x.ticks is not None))
    lines = 1 + max((line for _, line, _ in below), default=-1)
    height = picture.height + top - head
    frame = _Frame(x, y, left, width - right, top, height - 6 - _LINE * lines - (_LINE + 2) * bool(x.label), 1)
    texts = [(at + 28, _LINE * line + 14.0, text, "start", "ink") for (_, text), (at, line) in
             zip(named, keys, strict=True)]  # fmt: skip
    texts += [(at, frame.bottom + 16 + _LINE * line, text, "middle", "muted") for at, line, text in below]
    texts += _labels(picture, frame, frame.bottom + 18 + _LINE * lines)
    ground = "".join(f"M{across(value):g} {frame.bottom:g}v4" for value, _ in x.labels)
    return _macros().framed(
        picture, css, width, height,
        box=[left - 5, top - 5, frame.right - left + 10, frame.bottom - top + 10],
        grid="".join(f"M{left:g} {frame.up(value):g}H{frame.right:g}" for value, _ in y.labels) if y.grid else "",
        axis=f"M{left:g} {frame.bottom:g}H{frame.right:g}{ground}",
        marks=[(_shape(mark, frame), mark, _stroke_width(mark)) for mark in picture.marks],
        keys=[(f"M{at + 4:g} {_LINE * line + 10}h18", mark) for (mark, _), (at, line) in zip(named, keys, strict=True)],
        texts=[text for text in texts if text[2]],
        curve=_curve(picture, left, right),
    )  # fmt: skip


def _labels(picture: Picture, frame: _Frame, low: float) -> list[tuple[float, float, str, str, str]]:
    """Place, text, anchor and colour of the labels of both axes but those of the ticks below the picture."""
    x, y = picture.x, picture.y
    left, right, shift = (frame.left, frame.right, -10) if y.inside else (frame.left - 8, frame.right + 10, 4)
    near, far = ("start", "end") if y.inside else ("end", "start")
    return [
        ((frame.left + frame.right) / 2, low, x.label, "middle", "muted"),
        (12.0, (frame.top + frame.bottom) / 2, y.label, "turned", "muted"),
        *((frame.across(value), frame.top - 6, text, "middle", "muted") for value, text in x.opposite),
        *((left, frame.up(value) + shift, text, near, "ink" if y.down else "muted") for value, text in y.labels),
        *((right, frame.up(value) + shift, text, far, "muted") for value, text in y.opposite),
    ]


@cache
def _macros() -> Any:
    return environment("gonio.pages").get_template("picture.svg.j2").module


def _stroke_width(mark: Mark) -> float:
    """0 for a mark that is filled."""
    return mark.width if isinstance(mark, Line) else 1.8 if isinstance(mark, Dots) and mark.shape == "cross" else 0.0


def _curve(picture: Picture, left: float, right: float) -> Any:
    """The values under the pointer for the page's script: medians, margins and limits; empty without."""
    from markupsafe import escape

    if not picture.series:
        return ""
    series = {redact(name): values for name, values in picture.series.items()}
    ends = {"left": left, "right": right, "low": picture.x.low, "high": picture.x.high, "over": picture.x.label}
    return escape(json.dumps({**ends, "series": series, "x": [*range(1, 1 + max(map(len, series.values())))]}))


def _wide(text: str) -> float:
    return _CHARACTER * len(text)


def _side(labels: Sequence[Label], axis: Axis) -> float:
    """Width of the labels beside a picture."""
    return 0.0 if axis.inside else 6 + max((_wide(text) for _, text in labels), default=-6)


def _in_lines(widths: Sequence[float], most: float) -> Iterator[tuple[float, int]]:
    """Place and line of texts one after the other."""
    at, line = 0.0, 0
    for wide in widths:
        if at and at + wide > most:
            at, line = 0.0, line + 1
        yield at, line
        at += wide + 12


def _placed(labels: Sequence[Label], width: float, *, named: bool) -> Iterator[tuple[float, int, str]]:
    """Centre, line and text of each label below an axis; names take more lines, numbers without room go."""
    ends: list[float] = []
    for value, text in labels:
        half = _wide(text) / 2
        centre = min(max(value, half + 1), width - half - 1)
        line = next((i for i, end in enumerate(ends) if end + 6 < centre - half), len(ends))
        if line and not named:
            continue
        ends[line:] = [centre + half, *ends[line + 1 :]]
        yield centre, line, text
