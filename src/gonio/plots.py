"""Matplotlib figures of measurements, studies and decoupled operators; drawing needs the extra `lab`.

Every function takes the object that holds the numbers and returns a `matplotlib.figure.Figure`, which a notebook
shows and `savefig` writes. With `ax=` it draws into axes of the caller. Angles, spectra, effects and learning curves
are the pictures of the pages (:mod:`gonio.pages.pictures`), drawn by Matplotlib.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.escaping import shorten
from gonio.pages import pictures
from gonio.pages.picture import Area, Line, Picture
from gonio.pages.tables import unit_of_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "angles",
    "angular",
    "depth",
    "effects",
    "heads",
    "learning_curves",
    "magnitude",
    "normalisation_regions",
    "operator",
    "panels",
    "spectrum",
]
__dir__ = __all__.copy  # the public names alone

Function = Callable[[Tensor], Tensor]
_GREYS = {"base": "0.45", "band": "0.88", "ink": "0.35", "muted": "0.55", "rule": "0.8"}
_SHAPES = {"dot": "o", "cross": "x", "left": "<", "right": ">"}


# --- measurements ---------------------------------------------------------------------------------------


def angles(row: Any, *, ax: Axes | None = None) -> Figure:
    r"""Histogram of the angles between a layer's filters, and the law of random directions.

    The law is :math:`p(\theta) \propto \sin^{d-2} \theta`, averaged over each bin. The axis shows four standard
    deviations of it around 90 degrees, or of the layer's angles where they are wider.

    Args:
        row: a measured layer, such as `gonio.measure(model)["conv2"]`.

    Raises: InvalidArgumentError if the layer has no angles (fewer than two filters).

    Example:
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32)))
        >>> gonio.plots.angles(m["0"]).axes[0].get_xlabel()
        'angle between filters [°]'
    """
    picture = pictures.layer_angles(row)
    if picture is None:
        raise _nothing("angles", row.path, "angles", "Choose a layer with at least two filters.")
    return _drawn(picture, ax, f"{shorten(row.path)}: {row.angle_mean:.1f} ± {row.angle_std:.1f}°")


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
    picture = pictures.layer_spectrum(row)
    if picture is None:
        raise _nothing("spectrum", row.path, "singular values", "Choose a layer whose `effective_rank` is not None.")
    return _drawn(picture, ax, shorten(row.path))


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
        known = [math.nan if value is None else value for value in chance]
        axes.plot(known, color="0.55", linewidth=1.2, linestyle="--", label="random weights")
        axes.legend()
    axes.set(ylabel=figure.replace("_", " "), xlabel="layer, in the order of the model")
    axes.set_xticks(range(len(shown)), [shorten(row.path, longest=24) for row in shown], rotation=60, ha="right")
    return _figure(axes)


def heads(rows: Iterable[Any], figure: str = "logit_bound", *, ax: Axes | None = None) -> Figure:
    """One figure of all attention heads as a map: a row per attention, in the order of execution, a column per head.

    A head without this figure is left white.

    Args:
        rows: measured heads, such as `gonio.measure(model, batch=x).heads`.
        figure: the name of an attribute of the rows, such as `"logit_bound"`, or with a batch `"largest_logit"`,
            `"entropy"`, `"entropy_share"` or `"one_token"`.

    Raises: InvalidArgumentError if no head has this figure.

    Example:
        >>> model = gonio.models.byte_transformer(width=32)
        >>> m = gonio.measure(model, batch=torch.arange(12).reshape(2, 6))
        >>> axes = gonio.plots.heads(m.heads, "entropy_share").axes[0]
        >>> [label.get_text() for label in axes.get_yticklabels()], axes.images[0].get_array().shape
        (['blocks.0', 'blocks.1'], (2, 4))
    """
    shown = [row for row in rows if getattr(row, figure, None) is not None]
    if not shown:
        raise _nothing("heads", figure, "values", "Name a figure of a measured head; most need measure(batch=).")
    paths = list(dict.fromkeys(row.path for row in shown))
    values = torch.full((len(paths), 1 + max(row.head for row in shown)), math.nan, dtype=torch.float64)
    for row in shown:
        values[paths.index(row.path), row.head] = getattr(row, figure)
    axes = _axes(ax)
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=figure.replace("_", " "))
    axes.set(xlabel="head", ylabel="attention, in the order of the model")
    step = 1 + (values.shape[1] - 1) // 16
    axes.set_xticks(range(0, values.shape[1], step))
    axes.set_yticks(range(len(paths)), [shorten(path or "the model", longest=24) for path in paths])
    return _figure(axes)


# --- studies --------------------------------------------------------------------------------------------


def effects(results: Any, *, ax: Axes | None = None) -> Figure:
    """The difference of each recipe from the baseline: its mean, its 95 % interval and every pair of runs.

    The band holds the differences too small to matter: ± the smallest effect of interest.

    Args:
        results: of a study, as `gonio.lab.Study.open(folder).results()` returns them.

    Example:
        >>> gonio.plots.effects(gonio.lab.showing.example()).axes[0].get_xlabel()
        'difference from the baseline, points'
    """
    plan = results.plan
    return _drawn(pictures.effects(results.effects, unit=unit_of_difference(plan.unit), band=plan.sesoi), ax)


def learning_curves(results: Any, *, key: str = "val_score", ax: Axes | None = None) -> Figure:
    """The median over seeds of every recipe, and the range of all seeds.

    Args:
        results: of a study.
        key: `"val_score"` or `"train_loss"`.

    Raises: InvalidArgumentError if no run has such a curve.

    Example:
        >>> gonio.plots.learning_curves(gonio.lab.showing.example(), key="train_loss").axes[0].get_ylabel()
        'train loss'
    """
    colors, label = pictures.colors(entry.name for entry in results.plan.recipes), key.replace("_", " ")
    picture = pictures.learning_curves(results.runs, colors, key=key, label=label)
    if picture is None:
        raise _nothing("learning_curves", key, "values", "Choose 'val_score' or 'train_loss'.")
    return _drawn(picture, ax)


# --- decoupled operators --------------------------------------------------------------------------------


def angular(function: Function, *, ax: Axes | None = None) -> Figure:
    """An angular activation g over the angle in degrees.

    Example:
        >>> gonio.plots.angular(gonio.nn.angular.Cosine()).axes[0].get_ylabel()
        'g(θ)'
    """
    return _drawn(pictures.angular({"": function}), ax, repr(function))


def magnitude(function: Function, *, reach: float = 4.0, ax: Axes | None = None) -> Figure:
    """A magnitude function h over norms up to `reach`.

    Example:
        >>> gonio.plots.magnitude(gonio.nn.magnitude.Tanh()).axes[0].get_ylabel()
        'h(‖x‖)'
    """
    return _drawn(pictures.magnitude({"": function}, reach=reach), ax, repr(function))


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


# --- normalisation ----------------------------------------------------------------------------------------


def normalisation_regions(
    norms: Mapping[str, nn.Module] | None = None, *, shape: tuple[int, int, int] = (4, 6, 5)
) -> Figure:
    """Which entries of an input (N, C, L) each layer averages over, for the entry at sample 0, channel 0, position 0.

    A panel has a row per sample and a column per channel, each of L positions. What is dark was *measured*: the
    derivative of one entry of the layer's output in training mode by all entries of its input is not 0 there. By
    default batch, layer, instance, group (of C/2 channels) and switchable normalisation are drawn.

    Args:
        norms: layers that take an input of this shape, by the title of their panel.

    Raises: InvalidArgumentError if a layer gives another shape; MissingExtraError without Matplotlib.

    Example:
        >>> [axes.get_title() for axes in gonio.plots.normalisation_regions().axes]
        ['BN', 'LN', 'IN', 'GN', 'SN']

    References: Y. Wu and K. He, "Group Normalization", 2018, Figure 2. https://arxiv.org/abs/1803.08494
    """
    samples, channels, positions = shape
    chosen = _usual_norms(channels, positions) if norms is None else norms
    figure, every = panels(len(chosen))
    for axes, (title, norm) in zip(every, chosen.items(), strict=True):
        region = averaged_over(norm, shape)
        axes.pcolormesh(
            region.flatten(1).double().numpy(), cmap="Blues", vmin=0, vmax=1.4, edgecolors="0.8", linewidth=0.3
        )
        for channel in range(1, channels):
            axes.axvline(channel * positions, color="0.3", linewidth=1)
        axes.set(title=title, xlabel="channel, with its positions", ylabel="sample")
        axes.set_xticks([(i + 0.5) * positions for i in range(channels)], [str(i) for i in range(channels)])
        axes.set_yticks([i + 0.5 for i in range(samples)], [str(i) for i in range(samples)])
        axes.invert_yaxis()
    return figure


def averaged_over(norm: nn.Module, shape: Sequence[int]) -> Tensor:
    """The entries of an input on which the first entry of a layer's output depends, in training mode."""
    twin = copy.deepcopy(norm).double().train()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    y = twin(x)
    if y.shape != x.shape:
        found = f"{tuple(y.shape)} for {tuple(x.shape)}"
        raise InvalidArgumentError("a normalisation gives the shape that it takes", found, "Give another layer.")
    (gradient,) = torch.autograd.grad(y.flatten()[0], x)
    return gradient != 0


def _usual_norms(channels: int, positions: int) -> dict[str, nn.Module]:
    return {
        "BN": nn.BatchNorm1d(channels),
        "LN": nn.LayerNorm([channels, positions]),
        "IN": nn.InstanceNorm1d(channels),
        "GN": nn.GroupNorm(2, channels),
        "SN": _EqualShares(),
    }


class _EqualShares(nn.Module):
    """A switchable norm with a third of the statistics of each kind, without scale and shift."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.var_mean(x, dims, correction=0, keepdim=True) for dims in ((2,), (1, 2), (0, 2))]
        variance, mean = (torch.stack(torch.broadcast_tensors(*each)).mean(0) for each in zip(*parts, strict=True))
        found: Tensor = (x - mean) / variance.sqrt()
        return found


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


def _drawn(picture: Picture, ax: Axes | None, title: str = "") -> Figure:
    """A picture of the pages, by Matplotlib."""
    axes = _axes(ax)
    for mark in picture.marks:
        color = _GREYS.get(mark.color) or f"C{int(mark.color[1:]) - 1}"
        if isinstance(mark, Area):
            lows, highs = ([math.nan if y is None else y for y in ys] for ys in (mark.lows, mark.highs))
            axes.fill_between(mark.xs, lows, highs, color=color, alpha=mark.opacity, linewidth=0)
            continue
        ys = [math.nan if y is None else y for y in mark.ys]
        if isinstance(mark, Line):
            style = "--" if mark.dash else "-"
            axes.plot(mark.xs, ys, style, color=color, linewidth=mark.width, label=mark.label or None)
        else:
            axes.plot(mark.xs, ys, _SHAPES[mark.shape], color=color, markersize=2 * mark.radius, alpha=mark.opacity)
    for side, axis in (("x", picture.x), ("y", picture.y)):
        limits = (axis.high, axis.low) if axis.down else (axis.low, axis.high)
        axes.set(**{f"{side}scale": "log" if axis.log else "linear", f"{side}lim": limits, f"{side}label": axis.label})
        if axis.ticks is not None:
            getattr(axes, f"set_{side}ticks")([value for value, _ in axis.ticks], [text for _, text in axis.ticks])
    axes.set_title(title)
    if any(isinstance(mark, Line) and mark.label for mark in picture.marks):
        axes.legend()
    return _figure(axes)


@cache
def _picture() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("A plot", "matplotlib", "lab") from error

    class NotebookFigure(Figure):
        """A figure that a notebook shows, also without pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return NotebookFigure


def _figure(axes: Axes) -> Figure:
    figure: Any = axes.figure
    return figure


def _nothing(name: str, what: str, missing: str, do: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"plots.{name}: {what!r} has no {missing}", "nothing to draw", do)
