"""The filters of each layer after training: angles against random directions, norms against the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gonio.compare.judging.results import RunRecord
from gonio.compare.planning.plan import BASELINE
from gonio.escaping import shorten
from gonio.geometry import random_angle_density
from gonio.report import figures
from gonio.report.figures import Axis, Row, intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]


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
    return [_layer(path, recipes, edges) for path, recipes in found.items()]


def _layer(path: str, recipes: Mapping[str, Sequence[Mapping[str, Any]]], edges: Floats) -> Layer:
    first = next(iter(recipes.values()))[0]
    pooled = {name: _pool(records, edges) for name, records in recipes.items()}
    return Layer(path, tuple(first["shape"]), int(first["dim"]), edges, pooled)


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


def angle_chart(layer: Layer, colors: Mapping[str, str], *, name: str, width: int = 350) -> Any:
    """Histogram of the angles between the layer's filters, each recipe as a line over the random law."""
    with figures.drawing():
        made = figures.figure(width, 240)
        axes = figures.panel(made, 12, 38, 12, 8)
        _densities(axes, layer, colors)
        axes.set_xlim(*_shown(layer))
        axes.set_ylim(bottom=0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}°")
        axes.set_xlabel("angle between two filters")
        path = shorten(layer.path, longest=60)
        label = f"Angles between the filters of {path}, each recipe against random directions"
        return figures.inline(made, name=name, label=label, css="fill")


def _densities(axes: Axes, layer: Layer, colors: Mapping[str, str]) -> None:
    """The baseline filled, recipes as lines, the random law dotted on top."""
    base, edges = layer.recipes.get(BASELINE), layer.edges
    if base is not None:
        axes.stairs(base.density, edges, fill=True, color=figures.COLORS["band"], linewidth=0)
        axes.stairs(base.density, edges, color=figures.COLORS["base"], linewidth=1.2)
    for recipe, color in colors.items():
        if recipe in layer.recipes:
            density = layer.recipes[recipe].density
            axes.stairs(density, edges, color=figures.COLORS[color], linewidth=1.7, baseline=None)
    if layer.dim >= 2:
        law, ink = _law(layer.dim, edges), figures.COLORS["ink"]
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


def norm_chart(layer: Layer, colors: Mapping[str, str], *, name: str, width: int = 350) -> Any:
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
    return intervals(rows, axis, width=width, name=name, label=label, css="fill", step=31)
