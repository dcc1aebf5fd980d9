"""Figures of decoupled operators; drawing needs the extra `lab`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gonio.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_angular", "draw_magnitude", "draw_operator", "operator_on_plane"]

Function = Callable[[Tensor], Tensor]


def draw_angular(angular: Function, ax: Axes | None) -> Axes:
    """Plot an angular activation over the angle in degrees."""
    ax = _axes(ax, "plot() of an angular activation")
    angle = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    ax.plot(torch.rad2deg(angle).tolist(), angular(angle).tolist())
    ax.axhline(0, color="0.8", linewidth=0.8)
    ax.set(xlabel="angle θ [°]", ylabel="g(θ)", title=repr(angular), xlim=(0, 180))
    return ax


def draw_magnitude(magnitude: Function, reach: float, ax: Axes | None) -> Axes:
    """Plot a magnitude function over norms up to `reach`."""
    ax = _axes(ax, "plot() of a magnitude function")
    norm = torch.linspace(0, reach, 241, dtype=torch.float64)
    ax.plot(norm.tolist(), magnitude(norm).tolist())
    ax.set(xlabel="norm ‖x‖", ylabel="h(‖x‖)", title=repr(magnitude), xlim=(0, reach))
    return ax


def draw_operator(magnitude: Function, angular: Function, reach: float, ax: Axes | None) -> Axes:
    """Show the operator over a square of the plane as an image."""
    ax = _axes(ax, "plot() of a magnitude function")
    image = ax.imshow(
        operator_on_plane(magnitude, angular, reach=reach).numpy(),
        extent=(-reach, reach, -reach, reach),
        origin="lower",
        cmap="RdBu_r",
    )
    ax.figure.colorbar(image, ax=ax, label="h(‖x‖) g(θ)")
    ax.set(xlabel="x₁ (along the filter)", ylabel="x₂", title=repr(magnitude))
    return ax


def operator_on_plane(magnitude: Function, angular: Function, *, reach: float, points: int = 121) -> Tensor:
    """The operator's value for a filter along the first axis, on a square grid of inputs; 0 at a zero input."""
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    second, first = torch.meshgrid(axis, axis, indexing="ij")
    norm = torch.hypot(first, second)
    return magnitude(norm) * angular(torch.atan2(second.abs(), first)) * (norm > 0)


def _axes(ax: Axes | None, what: str) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(what, "matplotlib", "lab") from error
    return Figure(layout="constrained").add_subplot()
