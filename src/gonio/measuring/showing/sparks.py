"""Small charts of one layer in a table of the page: its norms, angles and spectrum, each beside random weights.

The page's script shows the same charts larger where a row is opened, so they keep more detail than a table needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import log, pi, sqrt

import torch

from gonio.geometry import marchenko_pastur, random_angle_density
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.showing.table import number
from gonio.pages.charts import line

_WIDTH, _HEIGHT = 180, 120
_BARS = 40  # of a histogram, at most
_LAW = 25  # points of the law of random directions
_LOG = 30.0  # ratio of norms from which their axis is logarithmic


@dataclass(frozen=True)
class Spark:
    """SVG path data on 180 × 120: a filled area, the law as a line, a thick line; and the axis' ends as text."""

    label: str
    ends: str
    area: str = ""
    law: str = ""
    dots: str = ""


def angle_spark(tensor: TensorMeasurement) -> Spark | None:
    """The histogram of angles on ±4 standard deviations of chance, wider for a layer that is wider; None without."""
    counts, chance = tensor.angle_histogram, tensor.angle_std_random
    if not counts or not tensor.pairs or not tensor.dim or tensor.dim < 2 or not chance:
        return None
    mean, std = tensor.angle_mean or 90.0, tensor.angle_std or 0.0
    low = max(0, int(min(90 - 4 * chance, mean - 4 * std)))
    high = min(180, -int(-max(90 + 4 * chance, mean + 4 * std)) + 1)
    width = -(-(high - low) // _BARS)
    bars = [sum(counts[at : min(at + width, high)]) / (tensor.pairs * width) for at in range(low, high, width)]
    law = _law(tensor.dim, low, high)
    top = 1.05 * max(max(bars), max(law))
    beyond = sum(counts[:low]) + sum(counts[high:])
    label = f"angles {mean:.1f} ± {std:.1f}°, by chance 90 ± {chance:.1f}°"
    label += f"; {beyond} pairs beyond the chart" if beyond else ""
    curve = line([i * _WIDTH / (_LAW - 1) for i in range(_LAW)], [_y(share, top) for share in law])
    ends = f"{low}°|{(low + high) / 2:g}°|{high}°"
    return Spark(label, ends, _bars([_y(share, top) for share in bars], width * _WIDTH / (high - low)), curve)


def _bars(heights: Sequence[int], step: float) -> str:
    """Bars beside each other as one outline, bars of one height as one."""
    made, at = "", 0
    for height, members in groupby(heights):
        at += len(list(members))
        made += f"V{height}H{min(round(at * step), _WIDTH)}"
    return f"M0 {_HEIGHT}{made}V{_HEIGHT}Z"


@cache
def _law(dim: int, low: int, high: int) -> tuple[float, ...]:
    """Share per degree of the law of random directions."""
    degrees = torch.linspace(low, high, _LAW, dtype=torch.float64)
    return tuple((random_angle_density(torch.deg2rad(degrees), dim) * pi / 180).tolist())


def spectrum_spark(tensor: TensorMeasurement) -> Spark | None:
    """Singular values in increasing order, and those of a random matrix of the same norm; None where unknown."""
    values = tensor.spectrum_quantiles
    if not values or not tensor.filters or not tensor.dim or not tensor.frobenius:
        return None
    std = tensor.frobenius / sqrt((tensor.groups or 1) * tensor.filters * tensor.dim)
    law = [std * value for value in _marchenko_pastur(tensor.filters, tensor.dim)]
    shown = values[:: (len(values) - 1) // (len(law) - 1)]
    top = 1.05 * max(values[-1], law[-1])
    xs = [i * _WIDTH / (len(law) - 1) for i in range(len(law))]
    label = f"from {number(values[0])} to {number(values[-1])}, of random weights to {number(law[-1])}"
    area = line(xs, [_y(value, top) for value in shown]) + f"V{_HEIGHT}H0Z"
    return Spark(label, "smallest|largest", area, line(xs, [_y(value, top) for value in law]))


@cache
def _marchenko_pastur(n: int, d: int) -> tuple[float, ...]:
    """17 quantiles of the singular values of a random matrix with entries of standard deviation 1."""
    law = marchenko_pastur(n, d, std=1.0)
    grid = torch.linspace(law.lower, law.upper, 2001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(law.density(grid), grid)
    at = torch.searchsorted(mass / mass[-1], torch.linspace(0, 1, 17, dtype=torch.float64)).clamp_max(len(mass) - 1)
    return (*grid[at].tolist()[:-1], float(law.upper))


def norm_sparks(tensors: Sequence[TensorMeasurement]) -> dict[str, Spark]:
    """By name the quantiles of the filters' norms as a box, all layers on one scale."""
    known = {t.name: t.norm_quantiles for t in tensors if t.norm_quantiles}
    positive = [value for five in known.values() for value in five if value > 0]
    if not positive:
        return {}
    low, high = min(positive), max(positive)
    logarithmic = high > _LOG * low

    def x(value: float) -> float:
        share = log(max(value, low) / low) / log(high / low) if logarithmic else value / high
        return round(2 + (_WIDTH - 4) * share, 1)

    ends = f"{number(low if logarithmic else 0.0)}|{number(high)}"
    return {name: _box([x(value) for value in five], five, ends) for name, five in known.items()}


def _box(at: Sequence[float], five: Sequence[float], ends: str) -> Spark:
    first, lower, middle, upper, last = at
    label = "minimum, quartiles, maximum: " + ", ".join(number(value) for value in five)
    lower, upper = (lower, upper) if upper - lower >= 1 else (lower - 0.5, upper + 0.5)
    box, whisker = f"M{lower:g} 30H{upper:g}V90H{lower:g}Z", f"M{first:g} 60H{last:g}"
    return Spark(label, ends, box, whisker, f"M{middle:g} 18V102")


def _y(value: float, top: float) -> int:
    return round(_HEIGHT - (_HEIGHT - 4) * value / top)


def training_line(values: Sequence[float | None], low: float, high: float) -> str:
    """A curve over time on a logarithmic scale from `low` to `high`; missing values interrupt it."""
    step = _WIDTH / max(len(values) - 1, 1)
    made, pen = [], "M"
    for index, value in enumerate(values):
        if value:
            share = log(value / low) / log(high / low)
            made.append(f"{pen}{index * step:.1f} {117 - 114 * share:.0f}")
        pen = "L" if value else "M"
    return "".join(made)
