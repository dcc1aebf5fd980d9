"""The kinds of figures: one function per quantity turns its numbers into a picture, wherever it is shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gonio.escaping import shorten
from gonio.geometry import marchenko_pastur, random_angle_density
from gonio.messages import fixed, joined, say
from gonio.pages.picture import Area, Axis, Dots, Line, Mark, Picture, Values, fitted, stairs
from gonio.pages.tables import number

Floats = NDArray[np.float64]
Function = Callable[[torch.Tensor], torch.Tensor]

_BARS = 32  # of the histogram of one layer, at most
_QUANTILES = 17  # of a spectrum
_LOG = 8.0  # ratio of the largest to the smallest level from which their axis is logarithmic
_WIDE = 30.0  # the same of norms
_COLUMNS = 6  # arms that are shown beside each other, at most


def colors(names: Iterable[str]) -> dict[str, str]:
    """A colour per name, in order; the first, which the others are compared with, is grey."""
    return {name: "base" if at == 0 else f"c{(at - 1) % 7 + 1}" for at, name in enumerate(names)}


# --- functions -----------------------------------------------------------------------------------------


def curves(xs: Sequence[float], lines: Mapping[str, Sequence[float]], *, x: Axis, y: str, title: str) -> Picture:
    """Lines over one axis, with a thin one at 0 where they cross it; a name of a line is its entry in the legend."""
    low, high = fitted(value for ys in lines.values() for value in ys)
    zero = (Line([x.low, x.high], [0.0, 0.0], "rule", 0.8),) if low < 0 < high else ()
    drawn = (Line(xs, ys, f"c{i % 7 + 1}", label=name) for i, (name, ys) in enumerate(lines.items()))
    return Picture(title, x, Axis(low, high, y), (*drawn, *zero))


def angular(functions: Mapping[str, Function]) -> Picture:
    """Angular activations g over the angle in degrees."""
    degrees = [float(degree) for degree in range(181)]
    angle = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    lines = {name: function(angle).tolist() for name, function in functions.items()}
    x = Axis(0.0, 180.0, say("angle θ [°]"), ticks=tuple((float(at), str(at)) for at in range(0, 181, 30)))
    return curves(degrees, lines, x=x, y="g(θ)", title=say("angular activation over the angle"))


def magnitude(functions: Mapping[str, Function], *, reach: float = 4.0) -> Picture:
    """Magnitude functions h over norms up to `reach`."""
    norm = torch.linspace(0, reach, 241, dtype=torch.float64)
    lines = {name: function(norm).tolist() for name, function in functions.items()}
    x = Axis(0.0, reach, say("norm ‖x‖"))
    return curves(norm.tolist(), lines, x=x, y="h(‖x‖)", title=say("magnitude over the norm of the input"))


# --- angles and spectra --------------------------------------------------------------------------------


def angles(
    edges: Sequence[float], densities: Mapping[str, tuple[str, Sequence[float]]], *, dim: int = 0, title: str
) -> Picture:
    """Histograms of the angles between filters, the first of several filled, and the law of random directions.

    Args:
        edges: of the bins, in degrees.
        densities: colour, and share of the pairs per degree in each bin, by name.
        dim: length of the filters; 0 leaves out the law.
    """
    marks: list[Mark] = []
    alone = len(densities) == 1
    for name, (color, density) in densities.items():
        xs, ys = stairs(edges, density)
        marks += [] if marks else [Area(xs, [0.0] * len(xs), ys, color if alone else "band", 0.4 if alone else 0.6)]
        marks += [] if alone else [Line(xs, ys, color, 1.8, label=name)]
    law = random_shares(dim, tuple(edges)) if dim >= 2 else ()
    marks += [Line(*stairs(edges, law), "ink", 1.2, dash=not alone, label="random directions")] if law else []
    shown = [i for i, bins in enumerate(zip(*(d for _, d in densities.values()), strict=True)) if max(bins) > 1e-3]
    reach = max((abs(90 - edges[at]) for i in shown for at in (i, i + 1)), default=90.0)
    top = max((*law, *(value for _, density in densities.values() for value in density)), default=0.0) or 1.0
    x = Axis(90 - max(reach, 15.0), 90 + max(reach, 15.0), say("angle between two filters"), form="{}°")
    return Picture(title, x, Axis(0.0, 1.05 * top, ticks=()), tuple(marks))


@cache
def random_shares(dim: int, edges: tuple[float, ...]) -> tuple[float, ...]:
    r"""The law of random directions, :math:`p(\theta) \propto \sin^{d-2} \theta`, as the mean per degree of each bin.

    Averaged over the bins, so that it can be compared with a histogram.
    """
    low, high = (torch.tensor(ends, dtype=torch.float64) for ends in (edges[:-1], edges[1:]))
    fine = (torch.arange(40, dtype=torch.float64) + 0.5) / 40
    degrees = low[:, None] + (high - low)[:, None] * fine
    return tuple((random_angle_density(torch.deg2rad(degrees), dim).mean(1) * math.pi / 180).tolist())


def layer_angles(row: Any) -> Picture | None:
    """The angles of a measured layer within four standard deviations of chance, or of its own; None without angles."""
    counts, chance = row.angle_histogram, row.angle_std_random
    if not counts or not row.pairs or not row.dim or row.dim < 2 or not chance:
        return None
    mean, std = row.angle_mean or 90.0, row.angle_std or 0.0
    low = max(0, int(min(90 - 4 * chance, mean - 4 * std)))
    high = min(180, -int(-max(90 + 4 * chance, mean + 4 * std)) + 1)
    step = -(-(high - low) // _BARS)
    edges = [*range(low, high, step), high]
    shares = [sum(counts[a:b]) / (row.pairs * (b - a)) for a, b in pairwise(edges)]
    beyond = sum(counts[:low]) + sum(counts[high:])
    title = say("angles {mean:.1f} ± {std:.1f}°, by chance 90 ± {chance:.1f}°", mean=mean, std=std, chance=chance)
    if beyond:
        s = "s" if beyond > 1 else ""
        title = say("{title}; {n} pair{s} beyond the chart", title=title, n=beyond, s=s)
    drawn = angles(edges, {"this layer": ("c1", shares)}, dim=row.dim, title=title)
    x = Axis(low, high, say("angle between filters [°]"))
    y = Axis(0.0, drawn.y.high, say("share of pairs per degree"))
    return replace(drawn, x=x, y=y, ends=f"{low}°|{(low + high) / 2:g}°|{high}°")


def layer_spectrum(row: Any) -> Picture | None:
    """The singular values of a measured layer in increasing order, and those of a random matrix of the same norm."""
    values = row.spectrum_quantiles
    if not values or not row.filters or not row.dim or not row.frobenius:
        return None
    std = row.frobenius / math.sqrt((row.groups or 1) * row.filters * row.dim)
    law = [std * value for value in random_quantiles(row.filters, row.dim)]
    shown = values[:: (len(values) - 1) // (_QUANTILES - 1)]
    shares = [i / (_QUANTILES - 1) for i in range(_QUANTILES)]
    least, most, random = (number(value) for value in (values[0], values[-1], law[-1]))
    title = say("from {least} to {most}, of random weights to {random}", least=least, most=most, random=random)
    marks = (Area(shares, [0.0] * len(shares), shown, opacity=0.4),
             Line(shares, law, "ink", 1.0, label="random weights"))  # fmt: skip
    y = Axis(0.0, 1.05 * max(values[-1], law[-1]), say("singular value"))
    return Picture(title, Axis(0.0, 1.0, say("share of the singular values")), y, marks, ends=say("smallest|largest"))


@cache
def random_quantiles(n: int, d: int) -> tuple[float, ...]:
    """Quantiles of the singular values of a random matrix with entries of standard deviation 1 (Marchenko–Pastur)."""
    law = marchenko_pastur(n, d, std=1.0)
    grid = torch.linspace(law.lower, law.upper, 2001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(law.density(grid), grid)
    places = torch.linspace(0, 1, _QUANTILES, dtype=torch.float64)
    at = torch.searchsorted(mass / mass[-1], places).clamp_max(len(mass) - 1)
    return (*grid[at].tolist()[:-1], float(law.upper))


# --- rows of points with intervals ---------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """One row: a point, its interval as a line, an inner interval as a box, and single values as small dots."""

    label: str
    color: str
    middle: float | None
    outer: tuple[float, float] | None = None
    inner: tuple[float, float] | None = None
    dots: tuple[float, ...] = ()
    note: str = ""


def intervals(
    rows: Sequence[Interval],
    label: str,
    *,
    title: str,
    reference: float | None = None,
    band: tuple[float, float] | None = None,
    form: str = "{}",
    log: bool = False,
    opposite: tuple[tuple[float, str], ...] = (),
    inside: bool = False,
) -> Picture:
    """One row per interval, the value of no difference as a line, and a band around it.

    The axis shows every interval, and single values that are not far outside; the others are triangles at its edge.

    Args:
        inside: names and notes are above the rows, for a narrow page.
    """
    near = [value for row in rows for pair in (row.outer, row.inner) for value in pair or ()]
    near += [row.middle for row in rows if row.middle is not None] + [*(band or ())]
    near += [] if reference is None else [reference]
    low, high = min(near, default=0.0), max(near, default=1.0)
    span = (high - low) or abs(high) or 1.0
    near += [dot for row in rows for dot in row.dots if low - 0.4 * span <= dot <= high + 0.4 * span]
    log = log and low > 0 and high > 4 * low  # below that a linear axis reads better and differs little
    low, high = fitted(near, log=log)
    count = max(len(rows), 1)
    x = Axis(low, high, label, log=log, form=form, opposite=opposite)
    y = Axis(-0.5, count - 0.5, down=True, inside=inside,
             ticks=tuple((float(at), shorten(row.label, longest=26)) for at, row in enumerate(rows)),
             opposite=tuple((float(at), row.note) for at, row in enumerate(rows) if row.note))  # fmt: skip
    ends, marks = [-0.5, count - 0.5], list[Mark]()
    marks += [Area(band, [ends[0]] * 2, [ends[1]] * 2, "band", 0.55)] if band else []
    pieces = [[at - 0.12, at + 0.5] for at in range(count)] if inside else [ends]  # not through the names above rows
    marks += [] if reference is None else [Line([reference] * 2, piece, "muted", 1.0) for piece in pieces]
    for at, row in enumerate(rows):
        marks += _row(row, at + (0.12 if inside else 0.0), low, high)
    return Picture(title, x, y, tuple(marks), height=52 + 16 * bool(opposite) + (44 if inside else 34) * count)


def _row(row: Interval, y: float, low: float, high: float) -> list[Mark]:
    marks: list[Mark] = [Line(row.outer, [y, y], row.color, 1.8)] if row.outer else []
    if row.inner:
        marks.append(Area(row.inner, [y - 0.18] * 2, [y + 0.18] * 2, row.color, 0.4))
    if row.middle is not None:
        median = Line([row.middle] * 2, [y - 0.28, y + 0.28], row.color, 3.0)
        marks.append(median if row.inner else Dots([row.middle], [y], row.color, 4.5))
    inside = [dot for dot in row.dots if low <= dot <= high]
    marks += [Dots(inside, [y + 0.24] * len(inside), row.color, 2.0, 0.6)] if inside else []
    marks += [Dots([low], [y + 0.24], row.color, 3.0, shape="left")] if min(row.dots, default=low) < low else []
    return marks + (
        [Dots([high], [y + 0.24], row.color, 3.0, shape="right")] if max(row.dots, default=high) > high else []
    )


def effects(
    found: Sequence[Any],
    *,
    unit: str,
    band: float,
    band_label: str = "",
    notes: Sequence[str] = (),
    better: str = "",
    inside: bool = False,
) -> Picture:
    """The paired difference of each recipe from the baseline with its 95 % interval and single pairs.

    Args:
        found: the :class:`gonio.lab.judging.results.Effect` of each recipe. notes: text beside each.
        band: half the width of the band of differences too small to matter.
        better: `"max"` or `"min"`: the side of better scores; empty does not name it.
    """
    hues = colors(["baseline", *(effect.recipe for effect in found)])
    rows = [
        Interval(e.recipe, hues[e.recipe], e.mean, None if e.low is None else (e.low, e.high), dots=e.differences,
                 note=note)
        for e, note in zip(found, notes or [""] * len(found), strict=True)
    ]  # fmt: skip
    label: str = say("difference from the baseline")
    if unit:
        label = say("difference from the baseline, {unit}", unit=fixed(unit))
    if better == "max":
        label = say("← worse · {label} · better →", label=label)
    elif better:
        label = say("← better · {label} · worse →", label=label)
    opposite = ((0.0, band_label),) if band_label else ()
    limits = (-band, band) if band else None
    title = say("Effect of each recipe with its 95 % interval")
    return intervals(rows, label, title=title, reference=0.0, band=limits, opposite=opposite, inside=inside)


def layer_norms(five: Sequence[float], low: float, high: float) -> Picture:
    """Smallest, quartiles and largest norm of the filters of a layer, on an axis from `low` to `high`."""
    log = high > _WIDE * low > 0
    places = [max(value, low) for value in five] if log else five
    row = Interval("", "c1", places[2], (places[0], places[-1]), (places[1], places[3]))
    title = say("minimum, quartiles, maximum: {five}", five=joined([number(value) for value in five]))
    x = Axis(low if log else 0.0, high, log=log)
    return replace(intervals([row], "", title=title), x=x, ends=f"{number(x.low)}|{number(high)}")


# --- lines over epochs, levels and steps ---------------------------------------------------------------


def learning_curves(
    runs: Sequence[Any],
    shown: Mapping[str, str],
    *,
    key: str,
    label: str,
    among: Iterable[str] = (),
    paces: Mapping[str, float] | None = None,
) -> Picture | None:
    """The median over seeds of each recipe with the range of all seeds; None without a curve.

    A lost run is a thin line that ends in a cross. A score shows the later half of the training whole.

    Args:
        runs: the :class:`gonio.lab.RunRecord` of a study.
        shown: the colour of each recipe; `base` is dashed.
        key: `val_score` or `train_loss`.
        among: the recipes whose pictures share their axes; default: those shown.
        paces: time of an epoch over the baseline's, by recipe; the curves are then over time.
    """
    tables = {
        name: _curves([run for run in runs if run.recipe == name], key) for name in {**shown, **dict.fromkeys(among)}
    }
    pace = {name: (paces or {}).get(name, 1.0) for name in tables}
    y = _view(list(tables.values()), label, log=key == "train_loss")
    if y is None:
        return None
    longest = max(pace[name] * table.shape[1] for name, table in tables.items())
    over = say("epoch") if paces is None else say("time, in epochs of the baseline")
    low, high = fitted([min(pace.values()), longest], pad=0.02)
    marks: list[Mark] = []
    series: dict[str, Values] = {}
    for name, color in shown.items():
        ended = _curves([run for run in runs if run.recipe == name and run.status == "finished"], key)
        xs = [pace[name] * (epoch + 1) for epoch in range(ended.shape[1])]
        lows, middles, highs = ([_known(reduced, column) for column in ended.T]
                                for reduced in (np.min, np.median, np.max))  # fmt: skip
        if xs:
            marks += [Area(xs, lows, highs, color), Line(xs, middles, color, dash=color == "base", label=name)]
        series[name] = [None if value is None else float(f"{value:.4g}") for value in middles]
        marks += [mark for run in runs if run.recipe == name and run.status != "finished" and color != "base"
                  for mark in _lost(_curves([run], key)[0], pace[name], color, y)]  # fmt: skip
    said = {"label": fixed(label), "over": over, "names": ", ".join(shorten(name) for name in shown)}
    title = say("{label} over {over}: {names}; median and range over seeds", **said)
    x = Axis(low, high, over, whole=True)
    return Picture(title, x, y, tuple(marks), height=190, series=None if paces else series)


def _known(reduced: Callable[[Floats], Any], column: Floats) -> float | None:
    """What a function gives of the known values; None without one."""
    known = column[np.isfinite(column)]
    return float(reduced(known)) if len(known) else None


def _curves(runs: Sequence[Any], key: str) -> Floats:
    """One curve per row, padded with NaN behind its end; a missing value is NaN."""
    curves = [run.curve.get(key) or [] for run in runs]
    made = np.full((len(curves), max(map(len, curves), default=0)), np.nan)
    for row, curve in zip(made, curves, strict=True):
        row[: len(curve)] = [np.nan if v is None or not math.isfinite(v) else v for v in curve]
    return made


def _view(tables: Sequence[Floats], label: str, *, log: bool) -> Axis | None:
    """The vertical axis that several pictures of curves share; None without a curve."""
    kept = [table for table in tables if np.isfinite(table).any()]
    if not kept:
        return None
    values = np.concatenate([table[np.isfinite(table)] for table in kept])
    low, high = float(values.min()), float(values.max())
    if log and low > 0 and high / low > 20:
        return Axis(low / 1.2, high * 1.2, label, log=True, grid=True)
    if not log:
        # The steep beginning of a score would flatten the part in which recipes differ: the later half is shown whole.
        settled = [table[:, table.shape[1] // 2 :] for table in kept]
        low = min((float(np.nanmin(part)) for part in settled if np.isfinite(part).any()), default=low)
    return Axis(*fitted([low, high]), label, grid=True)


def _lost(curve: Floats, pace: float, color: str, y: Axis) -> list[Mark]:
    """A run that diverged or failed."""
    at = np.flatnonzero(np.isfinite(curve))
    if not at.size:
        return []
    xs, ys = [pace * (int(i) + 1) for i in at], [float(curve[i]) for i in at]
    end = min(max(ys[-1], y.low), y.high)
    return [Line(xs, list(ys), color, 0.9), Dots(xs[-1:], [end], color, 3.5, shape="cross")]


def over_levels(
    series: Mapping[str, Sequence[tuple[float, Sequence[float]]]], *, axis: str, label: str, title: str
) -> Picture:
    """A line per series over its levels: the mean of the values, and their range."""
    levels = sorted({level for curve in series.values() for level, _ in curve})
    marks: list[Mark] = []
    for (name, curve), color in zip(series.items(), colors(series).values(), strict=True):
        xs = [level for level, _ in sorted(curve)]
        values = [seen for _, seen in sorted(curve)]
        means = [statistics.fmean(seen) for seen in values]
        marks += [Area(xs, [*map(min, values)], [*map(max, values)], color, 0.15),
                  Line(xs, means, color, label=name), Dots(xs, means, color)]  # fmt: skip
    log = levels[0] > 0 and levels[-1] / levels[0] >= _LOG
    x = Axis(*fitted(levels, log=log), axis, log=log, ticks=tuple((level, f"{level:g}") for level in levels))
    heights = [value for curve in series.values() for _, seen in curve for value in seen]
    return Picture(title, x, Axis(*fitted(heights, pad=0.12), label, grid=True), tuple(marks))


def pairs(scores: Mapping[str, Mapping[int, float]], *, label: str, title: str) -> Picture:
    """The scores of each arm as dots with their mean; the dots of one seed are joined. Many arms are rows."""
    hues, means = colors(scores), {arm: statistics.fmean(values.values()) for arm, values in scores.items()}
    if len(scores) > _COLUMNS:
        spans = {arm: (min(values.values()), max(values.values())) for arm, values in scores.items()}
        rows = [
            Interval(arm, hues[arm], means[arm], spans[arm], dots=tuple(values.values()), note=f"{means[arm]:.4g}")
            for arm, values in scores.items()
        ]
        return intervals(rows, label, title=title)
    marks: list[Mark] = []
    for (at, first), second in zip(enumerate(scores.values()), list(scores.values())[1:], strict=False):
        marks += [
            Line([at, at + 1], [first[seed], second[seed]], "rule", 0.8)
            for seed in sorted(first.keys() & second.keys())
        ]
    for at, (arm, values) in enumerate(scores.items()):
        marks.append(Dots([float(at)] * len(values), list(values.values()), hues[arm], 2.8, 0.65))
        marks.append(Line([at - 0.16, at + 0.16], [means[arm]] * 2, hues[arm], 3.0))
    marks += [Line([-0.5, 0.5], [0.0, 0.0], "muted", 1.0)] if len(scores) == 1 else []
    every = [value for values in scores.values() for value in values.values()] + [0.0] * (len(scores) == 1)
    names = tuple((float(at), shorten(arm, longest=22)) for at, arm in enumerate(scores))
    x = Axis(-0.5, len(scores) - 0.5, ticks=names)
    return Picture(title, x, Axis(*fitted(every, pad=0.12), label, grid=True), tuple(marks))


def course(values: Values, predicted: Values, low: float, high: float, *, title: str) -> Picture:
    """A quantity over the steps of a training on a logarithmic axis, and its prediction."""
    steps, missing = list(range(len(values))), [value or None for value in values]
    marks = (Line(steps, missing), Line(steps[: len(predicted)], [value or None for value in predicted], "ink", 1.0))
    ends = say("first step|rotation per step, {low} to {high} rad|last step", low=number(low), high=number(high))
    return Picture(title, Axis(0.0, max(len(values) - 1, 1)), Axis(low, high, log=True), marks, ends=ends)


def over_steps(values: Values, high: float, *, title: str) -> Picture:
    """A figure from 0 to `high` over the steps of a training."""
    ends = say("first step|0 to {high}|last step", high=number(high))
    x = Axis(0.0, max(len(values) - 1, 1))
    return Picture(title, x, Axis(0.0, high), (Line(list(range(len(values))), list(values)),), ends=ends)
