"""Pictures of decoupled operators; drawing needs the extra `lab`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gonio.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gonio.nn.angular import Angular
    from gonio.nn.magnitude import Magnitude

__all__ = ["draw_angular", "draw_magnitude", "operator_on_plane"]


def draw_angular(angular: Angular, ax: Axes | None) -> Axes:
    """The curve of an angular activation over the angle in degrees."""
    ax = _axes(ax, "plot() of an angular activation")
    angle = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    ax.plot(torch.rad2deg(angle).tolist(), angular(angle).tolist())
    ax.axhline(0, color="0.8", linewidth=0.8)
    ax.set(xlabel="angle θ [°]", ylabel="g(θ)", title=repr(angular), xlim=(0, 180))
    return ax


def draw_magnitude(magnitude: Magnitude, ax: Axes | None, *, angular: Angular | None) -> Axes:
    """The curve of a magnitude function, or the operator over the plane if an angular part is given."""
    ax = _axes(ax, "plot() of a magnitude function")
    reach = 3 * float(getattr(magnitude, "radius", 1.0))
    ax.set_title(repr(magnitude))
    if angular is None:
        norm = torch.linspace(0, reach, 241, dtype=torch.float64)
        ax.plot(norm.tolist(), magnitude(norm).tolist())
        ax.set(xlabel="norm ‖x‖", ylabel="h(‖x‖)", xlim=(0, reach))
        return ax
    picture = ax.imshow(
        operator_on_plane(magnitude, angular, reach=reach).numpy(),
        extent=(-reach, reach, -reach, reach),
        origin="lower",
        cmap="RdBu_r",
    )
    ax.figure.colorbar(picture, ax=ax, label="h(‖x‖) g(θ)")
    ax.set(xlabel="x₁ (along the filter)", ylabel="x₂")
    return ax


def operator_on_plane(magnitude: Magnitude, angular: Angular, *, reach: float, points: int = 121) -> Tensor:
    """The operator's value for a filter along the first axis, on a square grid of inputs."""
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    second, first = torch.meshgrid(axis, axis, indexing="ij")
    norm = torch.hypot(first, second)
    value = magnitude(norm) * angular.of_cosine(first / norm.clamp_min(1e-300))
    return torch.where(norm > 0, value, torch.zeros_like(value))


def _axes(ax: Axes | None, what: str) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(what, "matplotlib", "lab") from error
    return Figure(layout="constrained").add_subplot()
