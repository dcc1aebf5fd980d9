"""Rows of points with intervals: the forest plot of effects, the costs, the filter norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gonio.escaping import shorten
from gonio.report import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Axis", "Row", "intervals"]


@dataclass(frozen=True)
class Row:
    """One row: a point, an interval (thin), an inner interval (thick), single values (small dots)."""

    label: str
    color: str
    middle: float | None
    outer: tuple[float, float] | None = None
    inner: tuple[float, float] | None = None
    dots: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis: what it shows, the value that means "no difference" and a band around it."""

    label: str
    reference: float | None = None
    band: tuple[float, float] | None = None
    band_label: str = ""
    log: bool = False
    ends: tuple[str, str] = ("", "")


def intervals(
    rows: Sequence[Row], axis: Axis, *, width: int, name: str, label: str, css: str = "", step: int = 42
) -> str:
    """The rows as one SVG; labels stand beside the intervals where there is room, above them where not."""
    beside = width >= 600
    head = 26 if axis.band_label or any(axis.ends) else 8
    height = head + step * len(rows) + 46
    with svg.drawing():
        made = svg.figure(width, height)
        margins = (220, 46, 190, head) if beside else (10, 46, 18, head)
        axes = svg.panel(made, *margins)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        low, high = limits(rows, axis)
        _scale(axes, axis, low, high)
        lanes = [(-0.5, len(rows) - 0.5)] if beside else [(at - 0.05, at + 0.42) for at in range(len(rows))]
        _reference(axes, axis, lanes)
        for at, row in enumerate(rows):
            _row(axes, row, at + (0.0 if beside else 0.18), (low, high))
            _words(axes, row, at, beside=beside)
        return svg.inline(made, name=name, label=label, css=css)


def limits(rows: Sequence[Row], axis: Axis) -> tuple[float, float]:
    """Limits that show every interval, the band and all single values that are not far outside."""
    near = [value for row in rows for pair in (row.outer, row.inner) if pair for value in pair]
    near += [row.middle for row in rows if row.middle is not None]
    near += axis.band or ()
    near += [axis.reference] if axis.reference is not None else []
    near = [value for value in near if math.isfinite(value) and (value > 0 or not axis.log)] or [1.0]
    low, high = min(near), max(near)
    if axis.log:
        return min(low / 1.06, 0.94), max(high * 1.06, 1.06)
    span = (high - low) or abs(high) or 1.0
    dots = [d for row in rows for d in row.dots if low - 0.4 * span <= d <= high + 0.4 * span]
    return min([low, *dots]) - 0.05 * span, max([high, *dots]) + 0.05 * span


def _scale(axes: Axes, axis: Axis, low: float, high: float) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if axis.log:
        if high / low > 4:  # below that a linear axis reads better and differs little
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(base=2.0))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"×{x:.3g}")
    axes.set_xlim(low, high)
    axes.set_xlabel(axis.label)


def _reference(axes: Axes, axis: Axis, lanes: Sequence[tuple[float, float]]) -> None:
    """The band and the line of no difference, in the lanes that hold no text."""
    for top, bottom in lanes:
        if axis.band:
            axes.fill_betweenx((top, bottom), *axis.band, color=svg.COLORS["band"], alpha=0.55, linewidth=0, zorder=0)
        if axis.reference is not None:
            axes.plot([axis.reference] * 2, (top, bottom), color=svg.COLORS["muted"], linewidth=1.0, zorder=1)
    if axis.band:
        axes.annotate(
            axis.band_label, (sum(axis.band) / 2, 1.0), (0, 5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=10.5, color=svg.COLORS["muted"],
        )  # fmt: skip
    for text, x, side in zip(axis.ends, (0.0, 1.0), ("left", "right"), strict=True):
        if text:
            axes.annotate(text, (x, 0.0), (0, -34), xycoords="axes fraction", textcoords="offset points",
                          ha=side, va="bottom", fontsize=10.5, color=svg.COLORS["muted"])  # fmt: skip


def _row(axes: Axes, row: Row, y: float, shown: tuple[float, float]) -> None:
    color = svg.COLORS[row.color]
    for pair, thick in ((row.outer, 1.8), (row.inner, 4.6)):
        if pair:
            axes.plot(pair, [y, y], color=color, linewidth=thick, solid_capstyle="round", zorder=3)
    if row.middle is not None:
        axes.plot([row.middle], [y], "o", color=color, markersize=8, markeredgecolor=svg.COLORS["paper"],
                  markeredgewidth=1.4, zorder=4)  # fmt: skip
    _dots(axes, row.dots, y + 0.24, shown, color)


def _dots(axes: Axes, dots: tuple[float, ...], y: float, shown: tuple[float, float], color: str) -> None:
    """Single values below the line; those outside of the plot as triangles at its edge."""
    inside = [dot for dot in dots if shown[0] <= dot <= shown[1]]
    axes.plot(inside, [y] * len(inside), "o", color=color, markersize=3.6, alpha=0.6, markeredgewidth=0, zorder=2)
    for edge, symbol, beyond in ((shown[0], "<", min), (shown[1], ">", max)):
        if dots and beyond(edge, *dots) != edge:
            axes.plot([edge], [y], symbol, color=color, markersize=5, alpha=0.8, clip_on=False, zorder=2)


def _words(axes: Axes, row: Row, at: float, *, beside: bool) -> None:
    label = shorten(row.label, longest=30 if beside else 26)
    places = (
        ((label, -220, "left", 0.0, "ink"), (row.note, 10, "left", 1.0, "muted"))
        if beside
        else ((label, 0, "left", 0.0, "ink"), (row.note, 0, "right", 1.0, "muted"))
    )
    for text, shift, side, x, color in places:
        axes.annotate(
            text, (x, at if beside else at - 0.22), (shift, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha=side, va="center", fontsize=12 if beside else 11.5,
            color=svg.COLORS[color], annotation_clip=False,
        )  # fmt: skip
