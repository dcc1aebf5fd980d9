"""The page of `gonio measure --widths`: each figure over the width, beside the power of it that μP promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, floor, isfinite, log2
from statistics import mean
from typing import Any

from gonio.measuring.showing.page import More, layer_map, render
from gonio.measuring.showing.sparks import Spark
from gonio.measuring.showing.table import Column
from gonio.pages.charts import Lane

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 330, 210, 44, 10, 8, 34  # of a chart and its margins
_SPARK = (180, 120, 8)  # width, height and margin
FIGURES = {
    "activation": ("output", "RMS of each layer's output at initialisation"),
    "gradient": ("gradient", "RMS of the gradient at each layer's output, at initialisation"),
    "change": ("change", "RMS of the change of each layer's output by training"),
}
RULE = {"activation": "G601", "gradient": "", "change": "G602"}  # that judges the figure


@dataclass(frozen=True)
class WidthChart:
    """One figure of all layers over the width, both logarithmic, as SVG path data.

    Attributes:
        fitted: the range of the exponents. `promised`: those of μP, in words.
        lines: path data of the fitted lines by level of the finding on this figure, "" for none.
        promise: path data of the promised ones.
        across, up: ticks: (position, label).
    """

    title: str
    note: str
    fitted: str
    promised: str
    lines: dict[str, str]
    promise: str
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]


def widths_page(found: Any, columns: Sequence[Column[Any]], *, whole: bool, made: tuple[tuple[str, str], ...]) -> str:
    """The page as HTML: charts over the width, exponents over depth, findings, and a table of layers.

    Args:
        found: a :class:`gonio.measuring.Widths`.
    """
    shown = layer_map(found.tensors, found.findings, [_lane(figure, found.tensors) for figure in FIGURES])
    charts = [_chart(figure, found, shown.codes) for figure in FIGURES]
    return render(
        "widths.html.j2",
        whole=whole,
        w=found,
        columns=columns,
        more=tuple(_column(figure, found.sizes) for figure in FIGURES),
        charts=[chart for chart in charts if chart is not None],
        map=shown,
        made=made,
        size=(WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM),
    )


def _lane(figure: str, layers: Sequence[Any]) -> Lane:
    values = [getattr(layer, figure) for layer in layers]
    promised = [None if v is None else layer.promised(figure) for v, layer in zip(values, layers, strict=True)]
    note = "exponent of the width with its 95 % interval; dashed: promised by μP"
    return Lane(FIGURES[figure][0], note, values, [getattr(t, f"{figure}_interval") for t in layers], promised,
                scale="linear")  # fmt: skip


def _signed(value: float) -> str:
    return "0" if abs(value) < 0.005 else f"{value:+.2f}".replace("-", "−")


# --- charts of all layers --------------------------------------------------------------------------------------------


def _chart(figure: str, found: Any, codes: Mapping[str, Sequence[tuple[str, str, str]]]) -> WidthChart | None:
    """Lines through 1 at the smallest width, so that layers of any size share a chart; None without exponents."""
    slopes = {i: slope for i, t in enumerate(found.tensors) if (slope := getattr(t, figure)) is not None}
    if not slopes:
        return None
    whose = {t.promised(figure): "for the last layer" if t.last else "for the others" for t in found.tensors[::-1]}
    promises = [*whose]
    first, reach = log2(min(found.sizes)), log2(max(found.sizes) / min(found.sizes))
    step = max(1, ceil(max(abs(s) for s in (*slopes.values(), *promises)) * reach / 3))  # octaves between ticks
    low = min(0.0, *slopes.values(), *promises) * reach
    high = max(0.0, *slopes.values(), *promises) * reach
    bottom, top = step * floor(low / step), step * max(ceil(high / step), floor(low / step) + 1)

    def x(octaves: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * octaves / reach, 1)

    def y(octaves: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (octaves - bottom) / (top - bottom), 1)

    def drawn(slope: float) -> str:
        return f"M{x(0):g} {y(0):g}L{x(reach):g} {y(slope * reach):g}"

    lines: dict[str, str] = {}
    for i, slope in slopes.items():
        level = next((level for code, level, _ in codes.get(found.tensors[i].path, ()) if RULE[figure] == code), "")
        lines[level] = lines.get(level, "") + drawn(slope)
    return WidthChart(
        *FIGURES[figure],
        fitted=" to ".join(dict.fromkeys((_signed(min(slopes.values())), _signed(max(slopes.values()))))),
        promised=", ".join(f"{_signed(a)} {who}" for a, who in whose.items())
        if len(whose) > 1
        else _signed(promises[0]),
        lines=dict(sorted(lines.items())),
        promise="".join(map(drawn, promises)),
        across=tuple((x(log2(size) - first), f"{size}") for size in found.sizes),
        up=tuple((y(at), str(Fraction(2) ** at)) for at in range(bottom, top + 1, step)),
    )


# --- charts of one layer ---------------------------------------------------------------------------------------------


def _column(figure: str, sizes: Sequence[int]) -> More:
    title, note = FIGURES[figure]
    told = f"{note} over the width, both logarithmic: ticks: models; thick: fitted; thin: promised"
    return f"{title} over width", told, "spark", partial(_spark, figure, sizes)


def _spark(figure: str, sizes: Sequence[int], layer: Any) -> Spark | None:
    """The figure of each model as a tick, the fitted line, and one of the promised exponent through the same middle."""
    slope, values = getattr(layer, figure), getattr(layer, f"{figure}_rms")
    points = [(log2(n), log2(v)) for n, of in zip(sizes, values, strict=False) for v in of if v and isfinite(v)]
    if slope is None or not points:
        return None
    middle, centre = mean(x for x, _ in points), mean(y for _, y in points)
    left, right = (log2(size) - middle for size in (min(sizes), max(sizes)))
    promise = layer.promised(figure)
    heights = [y for _, y in points] + [centre + s * end for s in (slope, promise) for end in (left, right)]
    low, spread = min(heights), max(max(heights) - min(heights), 1.0)
    width, height, margin = _SPARK

    def at(x: float, y: float) -> str:
        across = margin + (width - 2 * margin) * (x - left) / (right - left)
        return f"{across:.0f} {height - margin - (height - 2 * margin) * (y - low) / spread:.0f}"

    def drawn(power: float) -> str:
        return f"M{at(left, centre + power * left)}L{at(right, centre + power * right)}"

    ticks = "".join(f"M{at(x - middle, y)}h6" for x, y in points)
    label = f"{FIGURES[figure][0]}: fitted exponent {_signed(slope)}, promised {_signed(promise)}"
    ends = f"{min(sizes)}|width, logarithmic|{max(sizes)}"
    return Spark(label, ends, law=drawn(promise), dots=drawn(slope) + ticks)
