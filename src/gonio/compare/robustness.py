"""How a trained classifier stands up to disturbed inputs, and whether the figures can be believed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gonio.compare.attacks import Answer, Ball, fgsm, input_gradient, noisy, pgd, survive
from gonio.compare.masking import masking_signs
from gonio.compare.task import Task
from gonio.compare.threat import Threat
from gonio.seeding import generator

__all__ = ["ATTACKS", "attacked_split", "from_text", "robustness", "to_text", "transferable"]

ATTACKS = ("noise", "transfer", "fgsm", "pgd", "smoothed")
_RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)  # times epsilon; the last is no bound any more
_SMOOTHING = 0.5  # times epsilon: the noise over which gradients are averaged


def robustness(model: nn.Module, task: Task, threat: Threat, transferred: Tensor | None) -> dict[str, Any]:
    """Accuracy in percent on disturbed examples of the test split, in evaluation mode.

    Args:
        transferred: the same examples, disturbed to mislead another model; None if there is none.

    Returns:
        `clean` and each of :data:`ATTACKS` (without `transfer` if there is none); `worst`: on the most
        harmful of all for each example; `radii`: accuracy under PGD by distance;
        `zero_gradients`: share of right answers whose gradient is exactly 0; `signs`: what speaks for
        gradients that hide, see :func:`~gonio.compare.masking.masking_signs`.
    """
    model.eval()
    inputs, targets = attacked_split(task, threat)
    ball = Ball(threat.epsilon, threat.low, threat.high)

    def answer(x: Tensor) -> Tensor:
        return task.outputs(model, x)

    disturbed = _disturbed(answer, inputs, targets, ball, threat)
    if transferred is not None:
        disturbed["transfer"] = transferred
    standing = {name: survive(answer, moved, targets) for name, moved in disturbed.items()}
    clean = survive(answer, inputs, targets)
    found: dict[str, Any] = {"clean": _percent(clean)}
    found |= {name: _percent(standing[name]) for name in ATTACKS if name in standing}
    found["worst"] = _percent(torch.stack([clean, *standing.values()]).all(0))
    found["radii"] = _radii(answer, inputs, targets, threat)
    found["zero_gradients"] = _zero_gradients(answer, inputs[clean], targets[clean])
    return {**found, "signs": masking_signs(found, examples=len(inputs))}


def _disturbed(answer: Answer, inputs: Tensor, targets: Tensor, ball: Ball, threat: Threat) -> dict[str, Tensor]:
    draws = {name: generator(threat.seed, name) for name in ("noise", "pgd", "smoothed")}
    steps = {"steps": threat.steps, "restarts": threat.restarts}
    return {
        "noise": noisy(inputs, ball, draws["noise"]),
        "fgsm": fgsm(answer, inputs, targets, ball),
        "pgd": pgd(answer, inputs, targets, ball, **steps, generator=draws["pgd"]),
        "smoothed": pgd(
            answer, inputs, targets, ball, steps=threat.steps, restarts=1, generator=draws["smoothed"],
            smoothing=_SMOOTHING * threat.epsilon,
        ),
    }  # fmt: skip


def _radii(answer: Answer, inputs: Tensor, targets: Tensor, threat: Threat) -> list[dict[str, float]]:
    """PGD from the example itself, at distances around epsilon."""
    rows = []
    for factor in _RADII:
        ball = Ball(factor * threat.epsilon, threat.low, threat.high)
        draw = generator(threat.seed, "radii")
        moved = pgd(answer, inputs, targets, ball, steps=threat.steps, restarts=1, generator=draw)
        rows.append({"epsilon": ball.epsilon, "accuracy": _percent(survive(answer, moved, targets))})
    return rows


def _zero_gradients(answer: Answer, inputs: Tensor, targets: Tensor) -> float:
    """Percentage of examples from which no gradient leads away."""
    if len(inputs) == 0:
        return 0.0
    flat = [
        input_gradient(answer, x, y).flatten(1).abs().amax(1) == 0
        for x, y in zip(inputs.split(128), targets.split(128), strict=True)
    ]
    return _percent(torch.cat(flat))


def attacked_split(task: Task, threat: Threat) -> tuple[Tensor, Tensor]:
    """The examples of the test split that are attacked, the same in every run."""
    index = torch.randperm(len(task.test), generator=generator(threat.seed, "examples"))[: threat.examples]
    return task.test.inputs[index], task.test.targets[index]


def transferable(model: nn.Module, task: Task, threat: Threat) -> Tensor:
    """The examples, disturbed to mislead this model; what other models answer to them is the transfer attack."""
    model.eval()
    inputs, targets = attacked_split(task, threat)
    ball = Ball(threat.epsilon, threat.low, threat.high)
    draw = generator(threat.seed, "transfer")
    return pgd(
        lambda x: task.outputs(model, x), inputs, targets, ball, steps=threat.steps, restarts=threat.restarts,
        generator=draw,
    )  # fmt: skip


def to_text(tensor: Tensor) -> Mapping[str, Any]:
    """A float32 tensor as JSON-able data, bit for bit."""
    numbers = tensor.contiguous().numpy().astype("<f4")
    return {"shape": list(tensor.shape), "base64": base64.b64encode(numbers.tobytes()).decode()}


def from_text(data: Mapping[str, Any]) -> Tensor:
    """The inverse of :func:`to_text`."""
    numbers = np.frombuffer(base64.b64decode(data["base64"]), dtype="<f4").astype(np.float32)
    return torch.from_numpy(numbers).view(data["shape"])


def _percent(mask: Tensor) -> float:
    return 100.0 * int(mask.sum()) / len(mask)
