"""What the figures of a training say: how each layer's rotation compares with its prediction, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import median
from typing import Any, Literal

from gonio.errors import listing
from gonio.measuring.training.equilibrium import Equilibrium
from gonio.messages import say

FITS = 1.25  # measured and predicted rotation agree within this factor
UNEVEN = 10.0  # a layer that turns so many times as fast as the median of the others
RECENT = 0.5  # the share of the rows, the latest ones, over which a rotation is averaged


Cause = Literal["no prediction", "fits", "not traced", "not invariant", "schedule", "not settled", "correlated"]


@dataclass(frozen=True)
class LayerRotation:
    """The rotation of one layer over a training.

    Attributes:
        steps, rotations: of each measured step; `predictions`: with None where there is none.
        rotation: root mean square over the later half of the measured steps, in radians per step.
        predicted: the same of the predictions; None without one.
        cause: why both differ, or why there is no prediction; "fits" if they agree within a factor of 1.25.
        reason: the same as a sentence.
    """

    layer: str
    steps: tuple[int, ...]
    rotations: tuple[float, ...]
    predictions: tuple[float | None, ...]
    rotation: float
    predicted: float | None
    cause: Cause
    reason: str

    @property
    def ratio(self) -> float | None:
        """Measured over predicted rotation."""
        return self.rotation / self.predicted if self.predicted else None


def layer_rotations(
    rows: Sequence[Mapping[str, Any]], invariant: frozenset[str] | None, predictions: Mapping[str, Equilibrium]
) -> list[LayerRotation]:
    """The rotations of each layer of a tracker's rows, in the order of the layers.

    `invariant`: paths of the scale-invariant layers, None if unknown; `predictions`: the latest of each layer.
    """
    by_layer: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "rotation" in row:
            by_layer.setdefault(row["layer"], []).append(row)
    return [_of_layer(mine, invariant, predictions.get(layer)) for layer, mine in by_layer.items()]


def _of_layer(
    rows: Sequence[Mapping[str, Any]], invariant: frozenset[str] | None, prediction: Equilibrium | None
) -> LayerRotation:
    late = rows[int(len(rows) * (1 - RECENT)) :]
    rotation = _rms([row["rotation"] for row in late])
    predicted = [row["predicted_rotation"] for row in late if "predicted_rotation" in row]
    turned = LayerRotation(
        rows[0]["layer"],
        tuple(row["step"] for row in rows),
        tuple(row["rotation"] for row in rows),
        tuple(row.get("predicted_rotation") for row in rows),
        rotation,
        _rms(predicted) if predicted else None,
        cause="no prediction",
        reason="",
    )
    cause, reason = _why(turned, rows, invariant, prediction)
    return replace(turned, cause=cause, reason=reason)


def _why(
    turned: LayerRotation,
    rows: Sequence[Mapping[str, Any]],
    invariant: frozenset[str] | None,
    prediction: Equilibrium | None,
) -> tuple[Cause, str]:
    """The first that holds: no prediction, fits, not scale-invariant, schedule, not settled, correlated gradients."""
    if turned.ratio is None or prediction is None:
        said = prediction.reason if prediction is not None else ""
        return "no prediction", said or say("no prediction")
    if 1 / FITS <= turned.ratio <= FITS:
        return "fits", say("fits")
    if invariant is None:
        return "not traced", say("not known to be scale-invariant: the model cannot be traced")
    if turned.layer not in invariant:
        return "not invariant", say("not scale-invariant: no normalisation layer directly after it")
    last = rows[-1]["step"]
    memory = [row["learning_rate"] for row in rows if row["step"] >= last - prediction.steps]
    if max(memory) > 1.1 * min(memory):
        return "schedule", say(
            "schedule: the learning rate changed within the last {steps:.0f} steps", steps=prediction.steps
        )
    if last < 2 * prediction.steps:
        return "not settled", say("not settled: it takes about {value:.0f} steps", value=2 * prediction.steps)
    return "correlated", say("gradients of different steps are correlated: noise does not dominate")


def _rms(values: Sequence[float]) -> float:
    return sqrt(sum(value * value for value in values) / len(values))


# --- advice -------------------------------------------------------------------------------------------------------


def advice(layers: Sequence[LayerRotation], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about layers that turn unevenly, decay that does nothing, and a warm-up that is too short.

    Example:
        >>> from gonio.measuring.training.advice import advice, layer_rotations
        >>> def rows(layer, rotation):
        ...     return [{"step": s, "layer": layer, "rotation": rotation, "learning_rate": 0.1} for s in (1, 2, 3)]
        >>> found = rows("a", 0.01) + rows("b", 0.01) + rows("c", 0.5)
        >>> advice(layer_rotations(found, None, {}), found)[0]
        'c turns 50 times as fast as the median layer (0.5 against 0.01 rad per step): lower its learning rate, ...'
    """
    return [*_uneven(layers), *_decay(layers), *_warm_up(layers, rows)]


def _uneven(layers: Sequence[LayerRotation]) -> list[str]:
    turning = [layer for layer in layers if layer.rotation > 0]
    if len(turning) < 3:
        return []
    middle = median(layer.rotation for layer in turning)
    sentences: list[str] = []
    for layer in turning:
        ratio = layer.rotation / middle
        told = {"layer": layer.layer, "rotation": layer.rotation, "middle": middle}
        if ratio >= UNEVEN:
            said = say(
                "{layer} turns {ratio:.0f} times as fast as the median layer ({rotation:.2g} against {middle:.2g} rad "
                "per step): lower its learning rate, or hold its norm with a fixed step (gonio.hold_).",
                ratio=ratio,
                **told,
            )
            sentences.append(said)
        elif ratio <= 1 / UNEVEN:
            said = say(
                "{layer} turns {ratio:.0f} times as slowly as the median ({rotation:.2g} against {middle:.2g} rad per "
                "step): it hardly trains; raise its learning rate, or see whether its gradient vanishes.",
                ratio=1 / ratio,
                **told,
            )
            sentences.append(said)
    return sentences


def _decay(layers: Sequence[LayerRotation]) -> list[str]:
    """Weight decay whose equilibrium is not reached within the training does nothing to the rotation."""
    idle = [layer.layer for layer in layers if layer.cause == "not settled" and (layer.ratio or 0) > FITS]
    if not idle:
        return []
    return [
        say(
            "Weight decay does nothing yet for {idle}: the norms still are those of the "
            "initialisation. Raise the product of learning rate and decay, train longer, or "
            "leave the decay out.",
            idle=listing(idle, limit=4),
        )
    ]


def _warm_up(layers: Sequence[LayerRotation], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A rotation of the first tenth of the training that is far above the later one, at no larger learning rate."""
    starts = [max(layer.rotations[: max(1, len(layer.rotations) // 10)]) / layer.rotation for layer in layers
              if len(layer.rotations) >= 10 and layer.rotation > 0]  # fmt: skip
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    if not starts or not rates or not isfinite(median(starts)) or median(starts) < 4 or rates[0] > 1.1 * median(rates):
        return []
    return [
        say(
            "Layers turned {median:.0f} times as fast in the first tenth of the steps as later, "
            "at no larger learning rate: the warm-up is too short, or there is none. A hold with "
            "a fixed step needs none (gonio.hold_).",
            median=median(starts),
        )
    ]
