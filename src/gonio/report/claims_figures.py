"""One picture per claim: scores by arm with each seed as a line, curves over levels, or histograms of angles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gonio.claims import Finding
from gonio.compare.judging.filter_summary import ANGLE_EDGES
from gonio.escaping import plain, shorten
from gonio.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 420, 230
_COLUMNS, _LINE = 3, 17  # entries in a line of the legend; its height
_MANY = 6  # arms whose names stand on two lines
_COLORS = ("base", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
_LOG = 8.0  # ratio of the largest to the smallest level from which their axis is logarithmic


def claim_picture(found: Finding, *, name: str) -> Any:
    """The picture of a claim as an SVG element; empty if it was not tried.

    Args:
        name: prefix of the ids in the picture, unique on the page.
    """
    if not any(found.scores.values()):
        return ""
    draw = {"pairs": _pairs, "levels": _levels, "angles": _angles}[found.claim.picture]
    extra = _LINE * (math.ceil(_legends(found) / _COLUMNS) - 1) if _legends(found) else 0
    with figures.drawing():
        made = figures.figure(_WIDTH, _HEIGHT + extra)
        axes = figures.panel(made, 58, 44, 12, 22 + extra)
        draw(axes, found)
        return figures.inline(made, name=name, label=_label(found), css="fill")


def _legends(found: Finding) -> int:
    """Number of entries of the picture's legend."""
    if found.claim.picture == "angles":
        return len(found.histograms)
    return len({arm.series or arm.name for arm in found.setting.arms if arm.level is not None}) if found.setting else 0


def _label(found: Finding) -> str:
    means = ", ".join(f"{arm} {found.mean(arm):.3g}" for arm in found.scores or {} if found.mean(arm) is not None)
    return plain(f"{found.claim.measure} of each arm, mean over seeds in {found.unit or 'its own unit'}: {means}")


def _pairs(axes: Axes, found: Finding) -> None:
    """A column of dots per arm; the dots of one seed are joined."""
    arms = {arm: values for arm, values in found.scores.items() if values}
    lines = 1 if len(arms) < _MANY else 2
    for at, (arm, values) in enumerate(arms.items()):
        color = figures.COLORS[_COLORS[at % len(_COLORS)]]
        axes.plot([at] * len(values), list(values.values()), "o", color=color, markersize=4.5, alpha=0.65, zorder=3)
        axes.plot([at - 0.16, at + 0.16], [statistics.fmean(values.values())] * 2, color=color, linewidth=3, zorder=4)
        last = lines > 1 and at == len(arms) - 1
        axes.annotate(shorten(plain(arm), longest=22), (at, 0), (22 if last else 0, -6 - 13 * (at % lines)),
                      xycoords=("data", "axes fraction"), textcoords="offset points", ha="right" if last else "center",
                      va="top", fontsize=10.5, color=figures.COLORS["muted"])  # fmt: skip
    for (at, first), second in zip(enumerate(arms.values()), list(arms.values())[1:], strict=False):
        for seed in first.keys() & second.keys():
            axes.plot([at, at + 1], [first[seed], second[seed]], color=figures.COLORS["rule"], linewidth=0.8, zorder=1)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_xticks([])
    axes.margins(y=0.12)
    if len({value for values in arms.values() for value in values.values()}) == 1:
        axes.set_ylim(axes.dataLim.y0 - 1, axes.dataLim.y0 + 1)
    if len(arms) == 1:
        axes.axhline(0.0, color=figures.COLORS["muted"], linewidth=1)
    _unit(axes, found)


def _levels(axes: Axes, found: Finding) -> None:
    """A curve per series over the levels: the mean, and the range of the seeds."""
    from matplotlib.ticker import FixedLocator, NullLocator

    arms = found.setting.arms if found.setting else ()
    series: dict[str, list[tuple[float, Mapping[int, float]]]] = {}
    for arm in arms:
        values = found.scores.get(arm.name)
        if arm.level is not None and values:
            series.setdefault(arm.series or arm.name, []).append((arm.level, values))
    levels = sorted({level for points in series.values() for level, _ in points})
    for at, (label, points) in enumerate(series.items()):
        color = figures.COLORS[_COLORS[at % len(_COLORS)]]
        points.sort(key=lambda point: point[0])
        xs = [level for level, _ in points]
        means = [statistics.fmean(values.values()) for _, values in points]
        lows, highs = ([edge(values.values()) for _, values in points] for edge in (min, max))
        axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
        axes.plot(xs, means, "o-", color=color, linewidth=2, markersize=5, label=shorten(plain(label), longest=28))
    if levels and levels[0] > 0 and levels[-1] / levels[0] >= _LOG:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel(plain(found.claim.axis))
    axes.margins(y=0.12)
    _legend(axes)
    _unit(axes, found)


def _angles(axes: Axes, found: Finding) -> None:
    """The angles between filters of each arm, pooled over layers and seeds, with the first arm filled."""
    histograms: Mapping[str, Sequence[int]] = found.histograms
    held = np.zeros(len(ANGLE_EDGES) - 1, dtype=bool)
    for at, (arm, counts) in enumerate(histograms.items()):
        density = np.asarray(counts, dtype=float)
        density /= max(density.sum(), 1.0) * np.diff(ANGLE_EDGES)
        held |= density > 0.001
        color = figures.COLORS[_COLORS[at % len(_COLORS)]]
        label = shorten(plain(arm), longest=28)
        if at == 0:
            axes.stairs(density, ANGLE_EDGES, fill=True, color=figures.COLORS["band"], linewidth=0)
        axes.stairs(density, ANGLE_EDGES, color=color, linewidth=1.8, label=label, baseline=None if at else 0)
    edges = [(low, high) for (low, high), shown in zip(pairwise(ANGLE_EDGES), held, strict=True) if shown]
    if edges:
        axes.set_xlim(edges[0][0] - 2, edges[-1][1] + 2)
    axes.set_ylim(bottom=0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}°")
    axes.set_xlabel("angle between two filters of a layer")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=10.5, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=_COLUMNS,
                borderaxespad=0, handlelength=1.4, columnspacing=1.2, labelcolor=figures.COLORS["ink"])  # fmt: skip


def _unit(axes: Axes, found: Finding) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=figures.COLORS["band"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel(f"{found.claim.measure.replace('_', ' ')}{f', {found.unit}' if found.unit else ''}")
