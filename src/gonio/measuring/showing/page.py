"""Measurements and differences as HTML: a page of its own, or the part that a notebook shows.

The markup is in the templates; this file computes their curves. Jinja escapes every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from gonio.escaping import plain
from gonio.geometry import random_angle_density
from gonio.measuring.figures.tensor import TensorMeasurement


def render(template: str, *, whole: bool, **values: Any) -> str:
    """A template of this folder with these values: one self-contained page, or a fragment with its own style."""
    made: str = _environment().get_template(template).render(whole=whole, **values)
    return made


@cache
def _environment() -> Any:
    import jinja2  # only a page needs it

    folder = resources.files("gonio.measuring.showing") / "templates"
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["curve_of"] = curve_of
    return made


@dataclass(frozen=True)
class Curve:
    """The histogram of a layer's angles and the law of random directions on the same scale, as SVG path data."""

    label: str
    histogram: str
    law: str


def curve_of(tensor: TensorMeasurement) -> Curve | None:
    """The curve of a layer; None for one without angles."""
    counts = tensor.angle_histogram
    if not counts or not tensor.pairs or not tensor.dim or tensor.dim < 2:
        return None
    density = [count / tensor.pairs for count in counts]
    law = _law(tensor.dim)
    top = max(max(density), max(law)) * 1.05
    label = (
        f"angles {tensor.angle_mean:.1f} ± {tensor.angle_std:.1f} degrees, by chance 90 ± {tensor.angle_std_random:.1f}"
    )
    return Curve(label, _path(density, top), _path(law, top))


def _path(values: list[float] | tuple[float, ...], top: float) -> str:
    """SVG line commands through the middle of each bin, leaving out points on a straight line."""
    heights = [round(40 - 38 * value / top, 1) for value in values]
    points = []
    for i, y in enumerate(heights):
        flat = 0 < i < len(heights) - 1 and heights[i - 1] == y == heights[i + 1]
        if not flat:
            points.append(f"L{i + 0.5:g} {y:g}")
    return "".join(points)


@cache
def _law(dim: int) -> tuple[float, ...]:
    """Share of the law of random directions in each degree."""
    fine = torch.deg2rad((torch.arange(1800, dtype=torch.float64) + 0.5) / 10)
    share = random_angle_density(fine, dim).view(180, 10).mean(1) * torch.pi / 180
    return tuple(share.tolist())
