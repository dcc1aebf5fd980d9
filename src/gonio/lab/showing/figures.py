"""Matplotlib figures as small, deterministic SVG in the colours of the page, and the figures of a study.

Every colour is drawn as a marker value and then replaced by a CSS variable, so that one SVG is legible on a light
page, a dark page and paper. No pyplot, no global state: the settings are in force only inside :func:`drawing`.
"""

from __future__ import annotations

import io
import json
import math
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gonio.errors import import_extra
from gonio.escaping import plain, redact, shorten
from gonio.geometry import random_angle_density
from gonio.lab.judging.results import Effect, Results, RunRecord
from gonio.lab.plan import BASELINE
from gonio.lab.showing.tables import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

_CURVE = (330, 190, 46, 36, 8, 8)  # width and height of a chart of curves; its margins: left, bottom, right, top
# Marker value by CSS variable. The variables themselves (Okabe–Ito, light and dark) are in style.css of gonio.pages.
_NAMES = ("ink", "muted", "rule", "base", "band", "paper", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
COLORS = {name: f"#{i:02x}{i:02x}{i:02x}" for i, name in enumerate(_NAMES, start=1)}
_VARIABLES = {value: f"var(--{name})" for name, value in COLORS.items()}
_STYLED = re.compile(r"\b(fill|stroke): (#0[0-9a-d]0[0-9a-d]0[0-9a-d])\b")
_UNUSED = re.compile(r"<defs>\s*<style.*?</defs>|<metadata>.*?</metadata>", re.DOTALL)
_TAG = re.compile(r"<[^<>]*>")
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "gonio",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 12.0,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "axes.linewidth": 0.8,
    "axes.edgecolor": COLORS["rule"],
    "axes.labelcolor": COLORS["muted"],
    "axes.titlecolor": COLORS["ink"],
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["rule"],
    "ytick.color": COLORS["rule"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["muted"],
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}
# matplotlib's settings are one dictionary per process; two reports drawn at once must take turns.
_TURN = threading.RLock()


@contextmanager
def drawing() -> Iterator[None]:
    """The settings of every figure, in force only inside the block."""
    matplotlib = import_extra("matplotlib", "The report page", package="matplotlib", extra="lab")
    with _TURN, matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser has fonts for names that matplotlib's own font cannot show.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure measured in CSS pixels: one SVG unit is one pixel at full size."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width / 72.0, height / 72.0), dpi=72)
    made.patch.set_alpha(0.0)
    return made


def panel(made: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes with margins in pixels from each edge of the figure, so that panels align across figures."""
    width, height = (float(size) * 72.0 for size in made.get_size_inches())
    box = (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    axes: Axes = made.add_axes(box)
    axes.patch.set_alpha(0.0)
    return axes


def inline(made: Figure, *, name: str, label: str, css: str = "", values: Mapping[str, Any] | None = None) -> Any:
    """The figure as an `<svg>` element for an HTML page.

    Args:
        name: prefix of every id, unique on the page.
        label: what the figure shows, for readers who do not see it.
        css: classes of the element.
        values: of a chart of curves, which the page's script shows under the pointer, see :func:`_values`.
    """
    from markupsafe import Markup, escape

    buffer = io.StringIO()
    made.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    body = text[text.index("<svg") : text.rindex("</svg>")]
    body = _UNUSED.sub("", body[body.index(">") + 1 :])
    body = _TAG.sub(lambda tag: _restyle(tag.group(), name), body)
    width, height = (round(float(size) * 72.0) for size in made.get_size_inches())
    body = re.sub(r"\s*\n\s*", "\n", body)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" style="--w:{width}px"'
    size += f' data-curve="{escape(json.dumps(values))}"' if values else ""
    # Safe as markup: the figure is drawn by this package, and every label in it was escaped.
    return Markup(f'<svg class="{escape(css)}" role="img" aria-label="{escape(label)}" {size}>{body}</svg>')


def _restyle(tag: str, name: str) -> str:
    """One tag with the colours of the page, unique ids, and without the settings of the style sheet.

    For tags only, never for text nodes: a layer may be called `fill: #010101`.
    """
    tag = _STYLED.sub(lambda m: f"{m[1]}: {_VARIABLES.get(m[2], m[2])}", tag)
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag).replace("font-family: 'DejaVu Sans'; ", "")
    tag = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", tag)
    return tag.replace("xlink:href", "href")


# --- rows of points with intervals -----------------------------------------------------------------------------------


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
    """The horizontal axis, with the value of no difference and a band around it."""

    label: str
    reference: float | None = None
    band: tuple[float, float] | None = None
    band_label: str = ""
    log: bool = False
    ends: tuple[str, str] = ("", "")


def intervals(
    rows: Sequence[Row], axis: Axis, *, width: int, name: str, label: str, css: str = "", step: int = 42
) -> Any:
    """The rows as one SVG, with labels beside the intervals if there is room, otherwise above them."""
    beside = width >= 600
    head = 26 if axis.band_label or any(axis.ends) else 8
    height = head + step * len(rows) + 46
    with drawing():
        made = figure(width, height)
        margins = (220, 46, 190, head) if beside else (10, 46, 18, head)
        axes = panel(made, *margins)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        low, high = _limits(rows, axis)
        _scale_axis(axes, axis, low, high)
        lanes = [(-0.5, len(rows) - 0.5)] if beside else [(at - 0.05, at + 0.42) for at in range(len(rows))]
        _reference(axes, axis, lanes)
        for at, row in enumerate(rows):
            _row(axes, row, at + (0.0 if beside else 0.18), (low, high))
            _label(axes, row, at, beside=beside)
        return inline(made, name=name, label=label, css=css)


def _limits(rows: Sequence[Row], axis: Axis) -> tuple[float, float]:
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


def _scale_axis(axes: Axes, axis: Axis, low: float, high: float) -> None:
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
    """The band and the line of no difference, in the lanes without text."""
    for top, bottom in lanes:
        if axis.band:
            axes.fill_betweenx((top, bottom), *axis.band, color=COLORS["band"], alpha=0.55, linewidth=0, zorder=0)
        if axis.reference is not None:
            axes.plot([axis.reference] * 2, (top, bottom), color=COLORS["muted"], linewidth=1.0, zorder=1)
    if axis.band:
        axes.annotate(
            axis.band_label, (sum(axis.band) / 2, 1.0), (0, 5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=10.5, color=COLORS["muted"],
        )  # fmt: skip
    for text, x, side in zip(axis.ends, (0.0, 1.0), ("left", "right"), strict=True):
        if text:
            axes.annotate(text, (x, 0.0), (0, -34), xycoords="axes fraction", textcoords="offset points",
                          ha=side, va="bottom", fontsize=10.5, color=COLORS["muted"])  # fmt: skip


def _row(axes: Axes, row: Row, y: float, shown: tuple[float, float]) -> None:
    color = COLORS[row.color]
    for pair, thick in ((row.outer, 1.8), (row.inner, 4.6)):
        if pair:
            axes.plot(pair, [y, y], color=color, linewidth=thick, solid_capstyle="round", zorder=3)
    if row.middle is not None:
        axes.plot([row.middle], [y], "o", color=color, markersize=8, markeredgecolor=COLORS["paper"],
                  markeredgewidth=1.4, zorder=4)  # fmt: skip
    _dots(axes, row.dots, y + 0.24, shown, color)


def _dots(axes: Axes, dots: tuple[float, ...], y: float, shown: tuple[float, float], color: str) -> None:
    """Single values below the line; those outside of the plot as triangles at its edge."""
    inside = [dot for dot in dots if shown[0] <= dot <= shown[1]]
    axes.plot(inside, [y] * len(inside), "o", color=color, markersize=3.6, alpha=0.6, markeredgewidth=0, zorder=2)
    for edge, symbol, beyond in ((shown[0], "<", min), (shown[1], ">", max)):
        if dots and beyond(edge, *dots) != edge:
            axes.plot([edge], [y], symbol, color=color, markersize=5, alpha=0.8, clip_on=False, zorder=2)


def _label(axes: Axes, row: Row, at: float, *, beside: bool) -> None:
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
            color=COLORS[color], annotation_clip=False,
        )  # fmt: skip


def forest(results: Results, colors: dict[str, str], *, narrow: bool) -> Any:
    """The effects with their intervals, and the band of effects too small to matter; empty without effects."""
    if not results.effects:
        return ""
    plan, scale = results.plan, Scale.of(results)

    def row(e: Effect) -> Row:
        outer = (e.low, e.high) if e.low is not None and e.high is not None else None
        note = e.verdict if e.mean is None else f"{scale.signed(e.mean)}  {e.verdict}"
        return Row(e.recipe, colors[e.recipe], e.mean, outer=outer, dots=e.differences, note=plain(note))

    axis = Axis(
        f"difference from the baseline, {scale.unit}", reference=0.0, band=(-plan.sesoi, plan.sesoi),
        band_label=f"too small to matter: ±{scale.score(plan.sesoi)}",
        ends=("← worse", "better →") if plan.direction == "max" else ("← better", "worse →"),
    )  # fmt: skip
    label = "Effect of each recipe with its 95 % interval: " + "; ".join(
        f"{plain(e.recipe)} {scale.signed(e.mean)} ({scale.interval(e.low, e.high) or 'no interval'})"
        for e in results.effects
    )
    css, width, name = ("narrow fill", 343, "fn") if narrow else ("wide fill", 920, "fw")
    return intervals([row(e) for e in results.effects], axis, width=width, name=name, label=label, css=css)


def cost_chart(results: Results, colors: dict[str, str], which: str) -> Any:
    """The `step_time` or `memory` of each recipe relative to the baseline; empty if none was measured."""
    rows = [
        Row(e.recipe, colors[e.recipe], cost.median, (cost.low, cost.high), note=f"×{cost.median:.2f}")
        for e in results.effects
        if (cost := getattr(e, which)) is not None
    ]
    if not rows:
        return ""
    what = "Time per training step" if which == "step_time" else "Memory"
    label = f"{what} relative to the baseline: " + "; ".join(f"{plain(row.label)} {row.note}" for row in rows)
    axis = Axis("relative to the baseline", reference=1.0, log=True)
    return intervals(rows, axis, width=350, name=which[0] + "c", label=label, css="fill")


# --- learning curves -------------------------------------------------------------------------------------------------

_EQUAL_TIME = (
    "The same curves with each epoch as long as its measured time per step; the baseline's line ends at the time that "
    "the baseline took. Each run keeps its own schedule: a shorter training of a slower recipe would not follow this "
    "curve."
)


@dataclass(frozen=True)
class Curves:
    """One group of charts on shared axes: an SVG per recipe."""

    title: str
    note: str
    charts: Mapping[str, Any]


def learning_curves(results: Results, colors: dict[str, str]) -> list[Curves]:
    """Validation scores and training losses over epochs, and the scores over time."""
    score, loss = f"Validation score, {plain(results.plan.unit)}", "Training loss (without penalty)"
    paces = {e.recipe: e.step_time.median for e in results.effects if e.step_time is not None}
    groups = [
        Curves(score, "", curve_charts(results.runs, colors, key="val_score", axis=score)),
        Curves(loss, "", curve_charts(results.runs, colors, key="train_loss", axis=loss)),
    ]
    if paces:
        charts = curve_charts(results.runs, colors, key="val_score", axis=score, paces=paces)
        groups.append(Curves(f"{score}, at equal time", _EQUAL_TIME, charts))
    return [group for group in groups if group.charts]


def curve_charts(
    runs: Sequence[RunRecord],
    colors: Mapping[str, str],
    *,
    key: str,
    axis: str,
    paces: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """An SVG per recipe: median over seeds with the range of all seeds, in front of the baseline's.

    Args:
        colors: of each recipe, the baseline left out.
        key: `val_score` or `train_loss`.
        paces: time of an epoch divided by the baseline's, by recipe; the curves are then over time, for these
            recipes. None: over epochs.
    """
    by_recipe = {name: [run for run in runs if run.recipe == name] for name in (BASELINE, *colors)}
    shown = [name for name in colors if paces is None or name in paces]
    view = _view([_table(by_recipe[name], key) for name in (BASELINE, *shown)], log=key == "train_loss")
    if view is None:
        return {}
    over = "epoch" if paces is None else "time, in epochs of the baseline"
    made = {}
    for i, name in enumerate(shown):
        with drawing():
            drawn = figure(*_CURVE[:2])
            axes = panel(drawn, *_CURVE[2:])
            _style(axes, view, over)
            _draw(axes, by_recipe[BASELINE], key, "base", 1.0)
            _draw(axes, by_recipe[name], key, colors[name], 1.0 if paces is None else paces[name])
            label = f"{axis} over {over}: {shorten(name)} against the baseline, median and range over seeds"
            prefix = f"{key[0]}{'' if paces is None else 'w'}{i}"
            values = None if paces else _values(axes, over, key, {BASELINE: by_recipe[BASELINE], name: by_recipe[name]})
            made[name] = inline(drawn, name=prefix, label=label, css="fill", values=values)
    return made


def _values(axes: Axes, over: str, key: str, runs: Mapping[str, Sequence[RunRecord]]) -> dict[str, Any]:
    """The medians of these curves, and where the axis lies in the picture: margins in pixels, limits."""
    tables = {name: _table([run for run in of if run.status == "finished"], key) for name, of in runs.items()}
    series = {
        redact(name): [float(f"{np.nanmedian(at):.4g}") if np.isfinite(at).any() else None for at in table.T]
        for name, table in tables.items()
    }
    low, high = axes.get_xlim()
    epochs = max((len(values) for values in series.values()), default=0)
    left, right = _CURVE[2], _CURVE[4]
    return {"x": [*range(1, epochs + 1)], "series": series, "left": left, "right": right, "low": low, "high": high,
            "over": over}  # fmt: skip


def _table(runs: Sequence[RunRecord], key: str) -> Floats:
    """One curve per row, padded with NaN behind its end; a missing value is NaN."""
    curves = [run.curve.get(key) or [] for run in runs]
    made = np.full((len(curves), max(map(len, curves), default=0)), np.nan)
    for row, curve in zip(made, curves, strict=True):
        row[: len(curve)] = [np.nan if v is None or not math.isfinite(v) else v for v in curve]
    return made


def _view(tables: Sequence[Floats], *, log: bool) -> tuple[float, float, bool] | None:
    """Limits of the shared vertical axis, and whether it is logarithmic; None without a curve."""
    kept = [t for t in tables if t.size and np.isfinite(t).any()]
    if not kept:
        return None
    values = np.concatenate([t[np.isfinite(t)] for t in kept])
    low, high = float(values.min()), float(values.max())
    if log and low > 0 and high / low > 20:
        return low / 1.2, high * 1.2, True
    if not log:
        # The steep beginning of a score would flatten the part in which recipes differ: the later half is shown whole.
        settled = [t[:, t.shape[1] // 2 :] for t in kept]
        low = min((float(np.nanmin(t)) for t in settled if np.isfinite(t).any()), default=low)
    pad = 0.06 * ((high - low) or 1.0)
    return low - pad, high + pad, False


def _style(axes: Axes, view: tuple[float, float, bool], label: str) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    low, high, log = view
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", color=COLORS["band"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(label)


def _draw(axes: Axes, runs: Sequence[RunRecord], key: str, name: str, pace: float) -> None:
    """The median and the range of the finished runs; of a recipe, a lost run is a thin line that ends in a cross."""
    color, base = COLORS[name], name == "base"
    curves = _table([run for run in runs if run.status == "finished"], key)
    if curves.size:
        shown = np.isfinite(curves).any(axis=0)
        epochs, part = pace * np.arange(1, curves.shape[1] + 1)[shown], curves[:, shown]
        axes.fill_between(epochs, np.nanmin(part, 0), np.nanmax(part, 0), color=color, alpha=0.2, linewidth=0)
        style: Any = (0, (4, 2)) if base else "-"
        axes.plot(epochs, np.nanmedian(part, 0), color=color, linewidth=1.4 if base else 2.0, linestyle=style)
    for run in runs:
        (curve,) = _table([run], key)
        at = np.flatnonzero(np.isfinite(curve))
        if run.status == "finished" or base or not at.size:
            continue
        axes.plot(pace * (at + 1), curve[at], color=color, linewidth=0.9, alpha=0.8)
        end, x = np.clip(curve[at[-1]], *axes.get_ylim()), pace * (at[-1] + 1)
        axes.plot([x], [end], "x", color=color, markersize=7, markeredgewidth=1.8, clip_on=False)


# --- filters of each layer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pooled:
    """One layer under one recipe, over the recipe's seeds: angle density per degree and norm quantiles."""

    density: Floats
    norms: tuple[float, ...]
    angle_mean: float
    angle_std: float
    pairs: int


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer under every recipe that has it; `edges` in degrees."""

    path: str
    shape: tuple[int, ...]
    dim: int
    edges: Floats
    recipes: Mapping[str, Pooled]

    @property
    def moved(self) -> float:
        """Largest change of the layer's angles and norms by any recipe."""
        base = self.recipes.get(BASELINE)
        others = [p for name, p in self.recipes.items() if name != BASELINE]
        if base is None:
            return math.inf
        return max((_distance(base, other, self.edges) for other in others), default=0.0)


def _distance(a: Pooled, b: Pooled, edges: Floats) -> float:
    variation = 0.5 * float((np.abs(a.density - b.density) * np.diff(edges)).sum())
    middles = [p.norms[len(p.norms) // 2] if p.norms else 0.0 for p in (a, b)]
    return variation + (abs(math.log(middles[0] / middles[1])) if min(middles) > 0 else 0.0)


def layers(runs: Sequence[RunRecord]) -> list[Layer]:
    """The layers of all finished runs in the order of the model, pooled over seeds."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    edges: Floats = np.zeros(0)
    for run in runs:
        if run.geometry:
            edges = np.asarray(run.geometry["angle_edges"], dtype=float)
            for path, record in run.geometry["layers"].items():
                found.setdefault(path, {}).setdefault(run.recipe, []).append(record)
    made = []
    for path, recipes in found.items():
        first = next(iter(recipes.values()))[0]
        pooled = {name: _pool(records, edges) for name, records in recipes.items()}
        made.append(Layer(path, tuple(first["shape"]), int(first["dim"]), edges, pooled))
    return made


def _pool(records: Sequence[Mapping[str, Any]], edges: Floats) -> Pooled:
    counts = np.sum([np.asarray(r["angle_counts"], dtype=float) for r in records], axis=0)
    total, width = counts.sum(), np.diff(edges)
    middle = (edges[1:] + edges[:-1]) / 2
    mean = float((counts * middle).sum() / total) if total else math.nan
    spread = float((counts * (middle - mean) ** 2).sum() / total) if total else math.nan
    norms = np.median([r["norms"] for r in records if r["norms"]] or [[]], axis=0)
    density = counts / (total * width) if total else counts
    return Pooled(density, tuple(float(v) for v in norms), mean, math.sqrt(spread) if total else math.nan, int(total))


def _law(dim: int, edges: Floats) -> Floats:
    """The random-direction law p(θ) ∝ sin^(d−2) θ as a density per degree, averaged over each bin like a histogram."""
    fine = 40
    part = (np.arange(fine) + 0.5) / fine
    theta = np.deg2rad(edges[:-1, None] + np.diff(edges)[:, None] * part)
    values = random_angle_density(torch.from_numpy(theta), max(dim, 2)).numpy()
    return np.asarray(np.deg2rad(1.0) * values.mean(axis=1), dtype=float)


def angle_chart(layer: Layer, colors: Mapping[str, str], *, name: str) -> Any:
    """Histogram of the angles between the layer's filters, each recipe as a line over the random law."""
    with drawing():
        made = figure(350, 240)
        axes = panel(made, 12, 38, 12, 8)
        _densities(axes, layer, colors)
        axes.set_xlim(*_shown(layer))
        angle_axis(axes, "angle between two filters")
        path = shorten(layer.path, longest=60)
        label = f"Angles between the filters of {path}, each recipe against random directions"
        return inline(made, name=name, label=label, css="fill")


def angle_axis(axes: Axes, label: str) -> None:
    """The axes of densities of angles: degrees, and no scale of the density."""
    axes.set_ylim(bottom=0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}°")
    axes.set_xlabel(label)


def _densities(axes: Axes, layer: Layer, colors: Mapping[str, str]) -> None:
    """The baseline filled, recipes as lines, the random law dotted on top."""
    base, edges = layer.recipes.get(BASELINE), layer.edges
    if base is not None:
        axes.stairs(base.density, edges, fill=True, color=COLORS["band"], linewidth=0)
        axes.stairs(base.density, edges, color=COLORS["base"], linewidth=1.2)
    for recipe, color in colors.items():
        if recipe in layer.recipes:
            density = layer.recipes[recipe].density
            axes.stairs(density, edges, color=COLORS[color], linewidth=1.7, baseline=None)
    if layer.dim >= 2:
        law, ink = _law(layer.dim, edges), COLORS["ink"]
        axes.stairs(law, edges, color=ink, linewidth=1.3, linestyle=(0, (2, 2)), zorder=5)


def _shown(layer: Layer) -> tuple[float, float]:
    """Limits of the angles: all bins with 0.2 % of any recipe, symmetric about 90°, at least 30° wide."""
    widths = np.diff(layer.edges)
    held = np.zeros(len(widths), dtype=bool)
    for pooled in layer.recipes.values():
        held |= pooled.density * widths > 0.002
    if not held.any():
        return 0.0, 180.0
    reach = max(abs(90 - layer.edges[:-1][held].min()), abs(layer.edges[1:][held].max() - 90), 15.0)
    return 90.0 - float(reach), 90.0 + float(reach)


def norm_chart(layer: Layer, colors: Mapping[str, str], *, name: str) -> Any:
    """Quantiles of the filter norms of one layer, a row per recipe."""

    def row(recipe: str, color: str) -> Row:
        norms = layer.recipes[recipe].norms
        if len(norms) < 5:
            return Row(recipe, color, norms[len(norms) // 2] if norms else None)
        ends, quartiles = (norms[0], norms[-1]), (norms[1], norms[3])
        return Row(recipe, color, norms[2], outer=ends, inner=quartiles, note=f"{norms[2]:.3g}")

    rows = [row(recipe, color) for recipe, color in colors.items() if recipe in layer.recipes]
    axis = Axis("norm of a filter")
    label = f"Filter norms of {shorten(layer.path, longest=60)} by recipe: least to largest, quartiles and median"
    return intervals(rows, axis, width=350, name=name, label=label, css="fill", step=31)
