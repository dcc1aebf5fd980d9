"""The page of `gonio measure --widths`: each figure over the width, beside the power of it that μP promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil, floor, isfinite, log2
from statistics import mean
from typing import Any

from gonio.measuring.showing.page import More, layer_map, render
from gonio.measuring.showing.table import Column
from gonio.messages import joined, say
from gonio.pages.charts import LEVELS, Lane
from gonio.pages.picture import Axis, Dots, Line, Mark, Picture, spark, svg

FIGURES = {
    "activation": (say("output"), say("RMS of each layer's output at initialisation")),
    "gradient": (say("gradient"), say("RMS of the gradient at each layer's output, at initialisation")),
    "change": (say("change"), say("RMS of the change of each layer's output by training")),
}
RULE = {"activation": "G601", "gradient": "", "change": "G602"}  # that judges the figure


def widths_page(found: Any, columns: Sequence[Column[Any]], *, whole: bool, made: tuple[tuple[str, str], ...]) -> str:
    """The page as HTML: charts over the width, exponents over depth, findings, and a table of layers.

    Args:
        found: a :class:`gonio.measuring.Widths`.
    """
    shown = layer_map(found.tensors, found.findings, [_lane(figure, found.tensors) for figure in FIGURES])
    charts = [(*FIGURES[figure], *_chart(figure, found, shown.codes)) for figure in FIGURES]
    return render(
        "widths.html.j2",
        whole=whole,
        w=found,
        columns=columns,
        more=tuple(_column(figure, found.sizes) for figure in FIGURES),
        charts=[chart for chart in charts if chart[2]],
        map=shown,
        made=made,
    )


def _lane(figure: str, layers: Sequence[Any]) -> Lane:
    values = [getattr(layer, figure) for layer in layers]
    promised = [None if v is None else layer.promised(figure) for v, layer in zip(values, layers, strict=True)]
    note = say("exponent of the width with its 95 % interval; dashed: promised by μP")
    return Lane(FIGURES[figure][0], note, values, [getattr(t, f"{figure}_interval") for t in layers], promised,
                scale="linear")  # fmt: skip


def _signed(value: float) -> str:
    return "0" if abs(value) < 0.005 else f"{value:+.2f}".replace("-", "−")


def _chart(figure: str, found: Any, codes: Mapping[str, Sequence[tuple[str, str, str]]]) -> tuple[Any, str]:
    """Lines through 1 at the smallest width, so that layers of any size share a chart; and its numbers in words."""
    layers = [layer for layer in found.tensors if getattr(layer, figure) is not None]
    if not layers:
        return "", ""
    least, ratio = min(found.sizes), max(found.sizes) / min(found.sizes)
    slopes = [getattr(layer, figure) for layer in layers]
    whose = {
        t.promised(figure): say("for the last layer") if t.last else say("for the others") for t in found.tensors[::-1]
    }
    ends = [least, least * ratio]
    marks: list[Mark] = []
    for layer, slope in zip(layers, slopes, strict=True):
        level = next((level for code, level, _ in codes.get(layer.path, ()) if code == RULE[figure]), "")
        marks.append(Line(ends, [1.0, ratio**slope], LEVELS[level][0], 2.5 if level else 1.5))
    marks += [Line(ends, [1.0, ratio**slope], "ink", 1.0, dash=True) for slope in whose]
    powers = [0.0, *(slope * log2(ratio) for slope in (*slopes, *whose))]
    step = max(1, ceil(max(map(abs, powers)) / 3))  # octaves between ticks
    bottom = step * floor(min(powers) / step)
    top = max(step * ceil(max(powers) / step), bottom + step)
    up = tuple((2.0**at, str(Fraction(2) ** at)) for at in range(bottom, top + 1, step))
    x = Axis(least, least * ratio, say("width"), log=True, ticks=tuple((size, f"{size}") for size in found.sizes))
    y = Axis(2.0**bottom, 2.0**top, log=True, ticks=up, grid=True)
    fitted = joined(list(dict.fromkeys((_signed(min(slopes)), _signed(max(slopes))))), last=" to ")
    promised = joined([say("{power} {whose}", power=_signed(a), whose=who) for a, who in whose.items()])
    promised = promised if len(whose) > 1 else joined([_signed(*whose)])
    said = say("fitted exponents {fitted}; promised {promised}", fitted=fitted, promised=promised)
    title = say("{figure} over the width: {said}", figure=FIGURES[figure][0], said=said)
    return svg(Picture(title, x, y, tuple(marks), height=210), width=330), said


def _column(figure: str, sizes: Sequence[int]) -> More:
    title, note = FIGURES[figure]
    explanation = say(
        "{note} over the width, both logarithmic: ticks: models; thick: fitted; thin: promised", note=note
    )
    return say("{figure} over width", figure=title), explanation, "spark", partial(_spark, figure, sizes)


def _spark(figure: str, sizes: Sequence[int], layer: Any) -> Any:
    """The figure of each model as a dot, the fitted line, and one of the promised exponent through the same middle."""
    slope, values = getattr(layer, figure), getattr(layer, f"{figure}_rms")
    points = [(log2(n), log2(v)) for n, of in zip(sizes, values, strict=False) for v in of if v and isfinite(v)]
    if slope is None or not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ends, promise = [log2(min(sizes)), log2(max(sizes))], layer.promised(figure)
    fitted, promised = ([mean(ys) + power * (end - mean(xs)) for end in ends] for power in (slope, promise))
    low, high = min(ys + fitted + promised), max(ys + fitted + promised)
    exponents = {"fitted": _signed(slope), "promised": _signed(promise)}
    title = say("{figure}: fitted exponent {fitted}, promised {promised}", figure=FIGURES[figure][0], **exponents)
    marks = (Line(ends, promised, "ink", 1.0), Line(ends, fitted), Dots(xs, ys, radius=3.0))
    axes = Axis(ends[0] - 0.1, ends[1] + 0.1), Axis(low, max(high, low + 1.0))
    return spark(
        Picture(title, *axes, marks, ends=say("{low}|width, logarithmic|{high}", low=min(sizes), high=max(sizes)))
    )
