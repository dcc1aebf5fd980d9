"""The page "how this training turned": the rotation of each layer over time, beside its prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from gonio.measuring.showing.columns import number
from gonio.measuring.showing.page import render
from gonio.measuring.training.advice import LayerRotation, advice


@dataclass(frozen=True)
class TrainingRow:
    """One layer on the page: its figures as text, and its curves as SVG path data on one logarithmic scale."""

    layer: str
    rotation: str
    predicted: str
    ratio: str
    reason: str
    curve: str
    law: str
    bar: float
    label: str


def training_page(rows: Sequence[Mapping[str, Any]], layers: Sequence[LayerRotation], *, whole: bool) -> str:
    """The page as HTML without scripts: a table of layers in the order of the model, advice above it.

    Curves and bars share one logarithmic scale over all layers, so that layers can be compared.
    """
    everything = [value for layer in layers for value in (*layer.rotations, *layer.predictions) if value]
    low, high = (min(everything), max(everything)) if everything else (1.0, 10.0)
    scale = _Scale(log10(low), max(log10(high), log10(low) + 0.3))
    steps = [row["step"] for row in rows if "rotation" in row]
    return render(
        "training.html.j2",
        whole=whole,
        layers=[_row(layer, scale) for layer in layers],
        advice=advice(layers, rows),
        first=min(steps, default=0),
        last=max(steps, default=0),
        low=number(low),
        high=number(high),
        fits=sum(layer.reason == "fits" for layer in layers),
        predicted=sum(layer.predicted is not None for layer in layers),
    )


@dataclass(frozen=True)
class _Scale:
    """Decimal logarithms from `low` to `high` on a height of 40."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return (log10(value) - self.low) / (self.high - self.low)

    def path(self, values: Sequence[float | None]) -> str:
        """SVG line commands over a width of 180; missing values interrupt the line."""
        width = 180 / max(len(values) - 1, 1)
        made, pen = [], "M"
        for index, value in enumerate(values):
            if value:
                made.append(f"{pen}{index * width:.1f} {39 - 38 * self.share(value):.1f}")
            pen = "L" if value else "M"
        return "".join(made)


def _row(layer: LayerRotation, scale: _Scale) -> TrainingRow:
    ratio = layer.ratio
    return TrainingRow(
        layer.layer,
        number(layer.rotation),
        number(layer.predicted),
        "–" if ratio is None else f"{ratio:.2f}",
        layer.reason,
        scale.path(layer.rotations),
        scale.path(layer.predictions),
        180 * max(scale.share(layer.rotation), 0.01) if layer.rotation else 0.0,
        f"rotation {number(layer.rotation)} rad per step, predicted {number(layer.predicted)}",
    )
