"""Matplotlib figures of measurements, studies and decoupled operators; drawing needs the extra `lab`.

Every function takes the object that holds the numbers and returns a `matplotlib.figure.Figure`, which a notebook
shows and `savefig` writes. With `ax=` it draws into axes of the caller.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.escaping import shorten
from gonio.geometry import marchenko_pastur, random_angle_density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["angles", "angular", "depth", "effects", "learning_curves", "magnitude", "operator", "panels", "spectrum"]
__dir__ = __all__.copy  # the public names alone

Function = Callable[[Tensor], Tensor]
_CHANCE: dict[str, Any] = {"color": "0.55", "linewidth": 1.2, "linestyle": "--", "label": "random weights"}


# --- measurements ---------------------------------------------------------------------------------------


def angles(row: Any, *, ax: Axes | None = None) -> Figure:
    r"""Histogram of the angles between a layer's filters, and the law of random directions.

    The law is :math:`p(\theta) \propto \sin^{d-2} \theta`. The axis shows four standard deviations of it around
    90 degrees, or more where the layer has angles beyond.

    Args:
        row: a measured layer, such as `gonio.measure(model)["conv2"]`.

    Raises: InvalidArgumentError if the layer has no angles (fewer than two filters).

    Example:
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32)))
        >>> gonio.plots.angles(m["0"]).axes[0].get_xlabel()
        'angle between filters [°]'
    """
    counts = row.angle_histogram
    if not counts or not row.pairs or not row.dim or row.dim < 2 or not row.angle_std_random:
        raise _nothing("angles", row.path, "angles", "Choose a layer with at least two filters.")
    axes = _axes(ax)
    degrees = torch.arange(len(counts), dtype=torch.float64)
    axes.bar(
        degrees + 0.5, [count / row.pairs for count in counts], width=1.0, color="C0", alpha=0.75, label="this layer"
    )
    fine = torch.linspace(0, math.pi, 3601, dtype=torch.float64)
    axes.plot(torch.rad2deg(fine), random_angle_density(fine, row.dim) * math.pi / 180, **_CHANCE)
    seen = [i for i, count in enumerate(counts) if count]
    reach = 4 * row.angle_std_random
    axes.set(xlim=(min(90 - reach, seen[0] - 1), max(90 + reach, seen[-1] + 2)), ylabel="share of pairs per degree")
    axes.set(
        xlabel="angle between filters [°]", title=f"{shorten(row.path)}: {row.angle_mean:.1f} ± {row.angle_std:.1f}°"
    )
    axes.legend()
    return _figure(axes)


def spectrum(row: Any, *, ax: Axes | None = None) -> Figure:
    r"""Singular values of a layer in increasing order, and those of a random matrix of the same size and norm.

    The random ones follow the law of Marchenko and Pastur. Values far above its upper end are directions that
    training, or a shared mean, has put into the weight.

    Raises: InvalidArgumentError if the singular values were not computed (a very large weight).

    Example:
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32)))
        >>> gonio.plots.spectrum(m["0"]).axes[0].get_ylabel()
        'singular value'
    """
    values = row.spectrum_quantiles
    if not values or not row.filters or not row.dim or not row.frobenius:
        raise _nothing("spectrum", row.path, "singular values", "Choose a layer whose `effective_rank` is not None.")
    axes = _axes(ax)
    share = torch.linspace(0, 1, len(values), dtype=torch.float64)
    axes.plot(share, values, marker=".", label="this layer")
    law = marchenko_pastur(
        row.filters, row.dim, std=row.frobenius / math.sqrt((row.groups or 1) * row.filters * row.dim)
    )
    grid = torch.linspace(law.lower, law.upper, 4001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(law.density(grid), grid)
    axes.plot(mass / mass[-1], grid[1:], **_CHANCE)
    axes.set(xlabel="share of the singular values", ylabel="singular value", title=shorten(row.path), ylim=(0, None))
    axes.legend()
    return _figure(axes)


def depth(rows: Iterable[Any], figure: str = "alignment", *, ax: Axes | None = None) -> Figure:
    """One figure of all layers along the depth of the model, beside its value for random weights where there is one.

    Args:
        rows: measured layers in order, such as `gonio.measure(model).layers`.
        figure: the name of an attribute of the rows, such as `"sigma_max"`, `"norm_mean"` or `"stable_rank"`.

    Raises: InvalidArgumentError if no layer has this figure.

    Example:
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        >>> len(gonio.plots.depth(m.layers, "stable_rank").axes[0].get_xticks())
        2
    """
    shown = [row for row in rows if getattr(row, figure, None) is not None]
    if not shown:
        raise _nothing("depth", figure, "values", "Name a figure of a measured layer, such as 'alignment'.")
    axes = _axes(ax)
    axes.plot([getattr(row, figure) for row in shown], marker="o", label=figure.replace("_", " "))
    by_chance = {"sigma_max": "sigma_random"}.get(figure, f"{figure}_random")
    chance = [1.0 if figure == "alignment" else getattr(row, by_chance, None) for row in shown]
    if any(value is not None for value in chance):
        axes.plot([math.nan if value is None else value for value in chance], **_CHANCE)
        axes.legend()
    axes.set(ylabel=figure.replace("_", " "), xlabel="layer, in the order of the model")
    axes.set_xticks(range(len(shown)), [shorten(row.path, longest=24) for row in shown], rotation=60, ha="right")
    return _figure(axes)


# --- studies --------------------------------------------------------------------------------------------


def effects(results: Any, *, ax: Axes | None = None) -> Figure:
    """The difference of each recipe from the baseline: its mean, its 95 % interval and every pair of runs.

    The band holds the differences too small to matter: ± the smallest effect of interest.

    Args:
        results: of a study, as `gonio.lab.Study.open(folder).results()` returns them.

    Example:
        >>> gonio.plots.effects(gonio.lab.showing.example()).axes[0].get_xlabel()
        'difference from the baseline [%]'
    """
    axes, plan = _axes(ax), results.plan
    shown = [effect for effect in results.effects if effect.mean is not None]
    axes.axvspan(-plan.sesoi, plan.sesoi, color="0.92", zorder=0)
    axes.axvline(0, color="0.55", linewidth=1)
    for at, effect in enumerate(reversed(shown)):
        axes.plot(effect.differences, [at - 0.18] * len(effect.differences), ".", color=f"C{at}", alpha=0.45)
        if effect.low is not None:
            axes.plot([effect.low, effect.high], [at, at], color=f"C{at}", linewidth=2.5)
        axes.plot([effect.mean], [at], "o", color=f"C{at}")
    axes.set_yticks(range(len(shown)), [shorten(effect.recipe) for effect in reversed(shown)])
    axes.set_xlabel(f"difference from the baseline{f' [{plan.unit}]' if plan.unit else ''}")
    return _figure(axes)


def learning_curves(results: Any, *, key: str = "val_score", ax: Axes | None = None) -> Figure:
    """The course of every run by recipe, one thin line per seed and a thick one for the median.

    Args:
        results: of a study.
        key: `"val_score"` or `"train_loss"`.

    Example:
        >>> gonio.plots.learning_curves(gonio.lab.showing.example(), key="train_loss").axes[0].get_ylabel()
        'train loss'
    """
    axes = _axes(ax)
    for at, entry in enumerate(results.plan.recipes):
        curves = [run.curve.get(key) or [] for run in results.runs if run.recipe == entry.name]
        curves = [[math.nan if value is None else value for value in curve] for curve in curves if curve]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{at}", linewidth=0.7, alpha=0.35)
        if curves:
            whole = torch.tensor([curve for curve in curves if len(curve) == max(map(len, curves))])
            axes.plot(
                range(1, whole.shape[1] + 1), whole.nanmedian(0).values, color=f"C{at}", label=shorten(entry.name)
            )
    axes.set(xlabel="epoch", ylabel=key.replace("_", " "))
    axes.legend()
    return _figure(axes)


# --- decoupled operators --------------------------------------------------------------------------------


def angular(function: Function, *, ax: Axes | None = None) -> Figure:
    """An angular activation g over the angle in degrees.

    Example:
        >>> gonio.plots.angular(gonio.nn.angular.Cosine()).axes[0].get_ylabel()
        'g(θ)'
    """
    axes = _axes(ax)
    angle = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    axes.plot(torch.rad2deg(angle), function(angle))
    axes.axhline(0, color="0.8", linewidth=0.8)
    axes.set(xlabel="angle θ [°]", ylabel="g(θ)", title=repr(function), xlim=(0, 180))
    return _figure(axes)


def magnitude(function: Function, *, reach: float = 4.0, ax: Axes | None = None) -> Figure:
    """A magnitude function h over norms up to `reach`.

    Example:
        >>> gonio.plots.magnitude(gonio.nn.magnitude.Tanh()).axes[0].get_ylabel()
        'h(‖x‖)'
    """
    axes = _axes(ax)
    norm = torch.linspace(0, reach, 241, dtype=torch.float64)
    axes.plot(norm, function(norm))
    axes.set(xlabel="norm ‖x‖", ylabel="h(‖x‖)", title=repr(function), xlim=(0, reach))
    return _figure(axes)


def operator(magnitude: Function, angular: Function, *, reach: float = 3.0, ax: Axes | None = None) -> Figure:
    """The decoupled operator h(‖x‖) g(θ) over a square of the plane, for a filter along the first axis.

    Example:
        >>> fig = gonio.plots.operator(gonio.nn.magnitude.Sphere(), gonio.nn.angular.Cosine())
        >>> [axes.get_ylabel() for axes in fig.axes]
        ['x₂', 'h(‖x‖) g(θ)']
    """
    axes = _axes(ax)
    values = on_plane(magnitude, angular, reach=reach)
    image = axes.imshow(values.numpy(), extent=(-reach, reach, -reach, reach), origin="lower", cmap="RdBu_r")
    axes.figure.colorbar(image, ax=axes, label="h(‖x‖) g(θ)")
    axes.set(xlabel="x₁ (along the filter)", ylabel="x₂", title=repr(magnitude))
    return _figure(axes)


def on_plane(magnitude: Function, angular: Function, *, reach: float) -> Tensor:
    """The operator's values for a filter along the first axis, on a square grid of inputs; 0 at a zero input."""
    side = torch.linspace(-reach, reach, 121, dtype=torch.float64)
    second, first = torch.meshgrid(side, side, indexing="ij")
    norm = torch.hypot(first, second)
    return magnitude(norm) * angular(torch.atan2(second.abs(), first)) * (norm > 0)


# --- figures --------------------------------------------------------------------------------------------


def panels(count: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of axes in a row, for `ax=` and for lines of your own; a notebook shows it.

    Example:
        >>> figure, (left, right) = gonio.plots.panels(2)
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)))
        >>> gonio.plots.angles(m["0"], ax=left) is gonio.plots.angles(m["1"], ax=right) is figure
        True
    """
    figure = _picture()(figsize=(6.4 if count == 1 else 4.2 * count, 3.6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _axes(ax: Axes | None) -> Axes:
    return panels()[1][0] if ax is None else ax


@cache
def _picture() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("A plot", "matplotlib", "lab") from error

    class Picture(Figure):
        """A figure that a notebook shows, also without pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return Picture


def _figure(axes: Axes) -> Figure:
    figure: Any = axes.figure
    return figure


def _nothing(name: str, what: str, missing: str, do: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"plots.{name}: {what!r} has no {missing}", "nothing to draw", do)
