"""Learning curves: one small chart per recipe against the baseline, on shared axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gonio.compare.results import BASELINE, RunRecord
from gonio.escaping import shorten
from gonio.report import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["curve_charts", "table"]


def table(runs: Sequence[RunRecord], key: str) -> NDArray[np.float64]:
    """One curve per row, padded with NaN behind its end; a missing value is NaN."""
    curves = [run.curve.get(key) or [] for run in runs]
    made = np.full((len(curves), max(map(len, curves), default=0)), np.nan)
    for row, curve in zip(made, curves, strict=True):
        row[: len(curve)] = [np.nan if v is None or not math.isfinite(v) else v for v in curve]
    return made


def curve_charts(
    runs: Sequence[RunRecord],
    recipes: dict[str, str],
    *,
    key: str,
    axis: str,
    width: int = 330,
    paces: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """An SVG per recipe: median over seeds with the range of all seeds, in front of the baseline's.

    Args:
        recipes: colour of each recipe, the baseline left out.
        key: `val_score` or `train_loss`.
        paces: time of an epoch over the baseline's, by recipe; the curves are then over time, of these recipes.
            None: over epochs.
    """
    shown = {name: color for name, color in recipes.items() if paces is None or name in paces}
    by_recipe = {name: [r for r in runs if r.recipe == name] for name in (BASELINE, *shown)}
    view = _view([table(group, key) for group in by_recipe.values()], log=key == "train_loss")
    if view is None:
        return {}
    made = {}
    for i, (name, color) in enumerate(shown.items()):
        over = _Over("epoch", 1.0) if paces is None else _Over("time, in epochs of the baseline", paces[name])
        label = f"{axis} over {over.name}: {shorten(name)} against the baseline, median and range over seeds"
        prefix = f"{key[0]}{'' if paces is None else 'w'}{i}"
        made[name] = _chart(by_recipe[name], by_recipe[BASELINE], key, color, over, view, width, prefix, label)
    return made


@dataclass(frozen=True)
class _Over:
    """The horizontal axis: its name, and how much of it one epoch of the recipe takes."""

    name: str
    pace: float


def _view(tables: Sequence[NDArray[np.float64]], *, log: bool) -> tuple[float, float, bool] | None:
    """Common limits of the vertical axis: all of the curves, less the first steep epochs of a score."""
    kept = [t for t in tables if t.size and np.isfinite(t).any()]
    if not kept:
        return None
    values = np.concatenate([t[np.isfinite(t)] for t in kept])
    if log and values.min() > 0 and values.max() / values.min() > 20:
        return float(values.min()) / 1.2, float(values.max()) * 1.2, True
    low, high = float(values.min()), float(values.max())
    if not log:
        # The steep beginning would flatten what matters: only the last four fifths are shown whole.
        settled = [t[:, t.shape[1] // 5 :] for t in kept]
        low = min((float(np.nanmin(t)) for t in settled if np.isfinite(t).any()), default=low)
    pad = 0.06 * ((high - low) or 1.0)
    return low - pad, high + pad, False


def _chart(
    group: Sequence[RunRecord], base: Sequence[RunRecord], key: str, color: str, over: _Over,
    view: tuple[float, float, bool], width: int, name: str, label: str,
) -> str:  # fmt: skip
    from matplotlib.ticker import MaxNLocator, NullFormatter

    with svg.drawing():
        made = svg.figure(width, 190)
        axes = svg.panel(made, 46, 36, 8, 8)
        if view[2]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(*view[:2])
        _band(axes, table([r for r in base if r.status == "finished"], key), "base", 1.0, dashed=True)
        _band(axes, table([r for r in group if r.status == "finished"], key), color, over.pace, dashed=False)
        for run in group:
            if run.status != "finished":
                _broken(axes, table([run], key)[0], color, over.pace)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", color=svg.COLORS["band"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(over.name)
        return svg.inline(made, name=name, label=label, css="fill")


def _band(axes: Axes, curves: NDArray[np.float64], color: str, pace: float, *, dashed: bool) -> None:
    if not curves.size:
        return
    shown = np.isfinite(curves).any(axis=0)
    epochs = pace * np.arange(1, curves.shape[1] + 1)[shown]
    part = curves[:, shown]
    axes.fill_between(epochs, np.nanmin(part, 0), np.nanmax(part, 0), color=svg.COLORS[color], alpha=0.2, linewidth=0)
    style = (0, (4, 2)) if dashed else "-"
    axes.plot(
        epochs,
        np.nanmedian(part, 0),
        color=svg.COLORS[color],
        linewidth=1.4 if dashed else 2.0,
        linestyle=style,
    )


def _broken(axes: Axes, curve: NDArray[np.float64], color: str, pace: float) -> None:
    """A run that diverged or failed: a thin line that ends in a cross."""
    epochs = np.flatnonzero(np.isfinite(curve))
    if not epochs.size:
        return
    axes.plot(pace * (epochs + 1), curve[epochs], color=svg.COLORS[color], linewidth=0.9, alpha=0.8)
    end = np.clip(curve[epochs[-1]], *axes.get_ylim())
    axes.plot(
        [pace * (epochs[-1] + 1)],
        [end],
        "x",
        color=svg.COLORS[color],
        markersize=7,
        markeredgewidth=1.8,
        clip_on=False,
    )
