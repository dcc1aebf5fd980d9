"""Learning curves: one small chart per recipe against the baseline, on shared axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gonio.compare.judging.results import Results, RunRecord
from gonio.compare.planning.plan import BASELINE
from gonio.escaping import plain, shorten
from gonio.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

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
        with figures.drawing():
            figure = figures.figure(330, 190)
            axes = figures.panel(figure, 46, 36, 8, 8)
            _style(axes, view, over)
            _draw(axes, by_recipe[BASELINE], key, "base", 1.0)
            _draw(axes, by_recipe[name], key, colors[name], 1.0 if paces is None else paces[name])
            label = f"{axis} over {over}: {shorten(name)} against the baseline, median and range over seeds"
            prefix = f"{key[0]}{'' if paces is None else 'w'}{i}"
            made[name] = figures.inline(figure, name=prefix, label=label, css="fill")
    return made


def _table(runs: Sequence[RunRecord], key: str) -> NDArray[np.float64]:
    """One curve per row, padded with NaN behind its end; a missing value is NaN."""
    curves = [run.curve.get(key) or [] for run in runs]
    made = np.full((len(curves), max(map(len, curves), default=0)), np.nan)
    for row, curve in zip(made, curves, strict=True):
        row[: len(curve)] = [np.nan if v is None or not math.isfinite(v) else v for v in curve]
    return made


def _view(tables: Sequence[NDArray[np.float64]], *, log: bool) -> tuple[float, float, bool] | None:
    """Limits of the shared vertical axis, and whether it is logarithmic; None without a curve."""
    kept = [t for t in tables if t.size and np.isfinite(t).any()]
    if not kept:
        return None
    values = np.concatenate([t[np.isfinite(t)] for t in kept])
    low, high = float(values.min()), float(values.max())
    if log and low > 0 and high / low > 20:
        return low / 1.2, high * 1.2, True
    if not log:
        # The steep beginning of a score would flatten the rest: only the last four fifths are shown whole.
        settled = [t[:, t.shape[1] // 5 :] for t in kept]
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
    axes.grid(axis="y", color=figures.COLORS["band"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(label)


def _draw(axes: Axes, runs: Sequence[RunRecord], key: str, name: str, pace: float) -> None:
    """The median and the range of the finished runs; of a recipe, a lost run is a thin line that ends in a cross."""
    color, base = figures.COLORS[name], name == "base"
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
