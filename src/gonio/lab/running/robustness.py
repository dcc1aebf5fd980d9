"""Accuracy of a trained classifier on disturbed inputs, and signs of gradient masking.

The attacks stay within a distance in the maximum norm. `Answer` is the whole function from inputs in their own unit
to logits, standardisation included; its model must be in evaluation mode.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gonio.execution import device_of
from gonio.lab.plan import ATTACKS, AttackConfig
from gonio.lab.tasks.task import Task
from gonio.seeding import generator

Answer = Callable[[Tensor], Tensor]
Objective = Callable[[Tensor, Tensor], Tensor]
_RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)  # times epsilon; the last is practically unbounded
_SMOOTHING = 0.5  # times epsilon: standard deviation of the noise over which gradients are averaged
_CHUNK = 128  # examples whose activations are held at the same time
_SMOOTHED = 4  # noisy copies over which a smoothed gradient is averaged
_FLAT = 10.0  # percent of right answers without a gradient
_FAR = 10.0  # percent that remain right at the largest distance, where an attack may change everything


def robustness(model: nn.Module, task: Task, config: AttackConfig, transferred: Tensor | None) -> dict[str, Any]:
    """Accuracy in percent on disturbed examples of the test split, in evaluation mode.

    Args:
        transferred: the same examples, disturbed to mislead another model; None if there is none.

    Returns:
        `clean` and each of :data:`ATTACKS` (without `transfer` if there is none); `worst`: under the most
        harmful attack on each example; `radii`: accuracy under PGD by distance;
        `zero_gradients`: percentage of right answers whose gradient is exactly 0; `signs`: signs of gradient
        masking, see :func:`masking_signs`.
    """
    return attacked(answer_of(model, task), *attacked_split(task, config), config, transferred)


def answer_of(model: nn.Module, task: Task | None = None) -> Answer:
    """The whole function of a model in evaluation mode; it may compute on a device, the attacks compute on the CPU."""
    device = device_of(model.eval())

    def answer(x: Tensor) -> Tensor:
        x = x.to(device)
        outputs: Tensor = model(x) if task is None else task.outputs(model, x)
        return outputs.cpu()

    return answer


def attacked(
    answer: Answer, inputs: Tensor, targets: Tensor, config: AttackConfig, transferred: Tensor | None
) -> dict[str, Any]:
    """The figures of :func:`robustness` for a function and the examples that are attacked."""

    def ascended(name: str, ball: AttackConfig, *, smoothing: float = 0.0) -> Tensor:
        return pgd(answer, inputs, targets, ball, generator=generator(config.seed, name), smoothing=smoothing)

    once = replace(config, restarts=1)
    disturbed = {
        "noise": noisy(inputs, config, generator(config.seed, "noise")),
        "fgsm": fgsm(answer, inputs, targets, config),
        "pgd": ascended("pgd", config),
        "smoothed": ascended("smoothed", once, smoothing=_SMOOTHING * config.epsilon),
        **({} if transferred is None else {"transfer": transferred}),
    }
    right = {name: survive(answer, moved, targets) for name, moved in disturbed.items()}
    clean = survive(answer, inputs, targets)
    found: dict[str, Any] = {"clean": _percent(clean)}
    found |= {name: _percent(right[name]) for name in ATTACKS if name in right}
    found["worst"] = _percent(torch.stack([clean, *right.values()]).all(0))
    further = [replace(once, epsilon=factor * config.epsilon) for factor in _RADII]
    found["radii"] = [
        {"epsilon": far.epsilon, "accuracy": _percent(survive(answer, ascended("radii", far), targets))}
        for far in further
    ]
    found["zero_gradients"] = _zero_gradients(answer, inputs[clean], targets[clean])
    return {**found, "signs": masking_signs(found, examples=len(inputs))}


def _zero_gradients(answer: Answer, inputs: Tensor, targets: Tensor) -> float:
    """Percentage of examples whose gradient is exactly 0."""
    if len(inputs) == 0:
        return 0.0
    gradients = [input_gradient(answer, x, y) for x, y in _chunks(inputs, targets)]
    return _percent(torch.cat([gradient.flatten(1).abs().amax(1) == 0 for gradient in gradients]))


def _percent(mask: Tensor) -> float:
    return 100.0 * int(mask.sum()) / len(mask)


def attacked_split(task: Task, config: AttackConfig) -> tuple[Tensor, Tensor]:
    """The examples of the test split that are attacked, the same in every run."""
    return task.test.take(chosen(len(task.test), config))  # type: ignore[arg-type]


def chosen(count: int, config: AttackConfig) -> Tensor:
    """The indices of the attacked ones of so many examples."""
    return torch.randperm(count, generator=generator(config.seed, "examples"))[: config.examples]


def transferable(model: nn.Module, task: Task, config: AttackConfig) -> Tensor:
    """The examples, disturbed to mislead this model; other models see them in the transfer attack."""
    inputs, targets = attacked_split(task, config)
    return pgd(answer_of(model, task), inputs, targets, config, generator=generator(config.seed, "transfer"))


def to_text(tensor: Tensor) -> Mapping[str, Any]:
    """A float32 tensor as JSON-able data, bit for bit."""
    numbers = tensor.contiguous().numpy().astype("<f4")
    return {"shape": list(tensor.shape), "base64": base64.b64encode(numbers.tobytes()).decode()}


def from_text(data: Mapping[str, Any]) -> Tensor:
    """The inverse of :func:`to_text`."""
    numbers = np.frombuffer(base64.b64decode(data["base64"]), dtype="<f4").astype(np.float32)
    return torch.from_numpy(numbers).view(data["shape"])


# --- attacks ------------------------------------------------------------------------------------------


def project(moved: Tensor, inputs: Tensor, ball: AttackConfig) -> Tensor:
    """The nearest input that an attack may use: within `epsilon` of the original in every number, and valid."""
    near = torch.minimum(torch.maximum(moved, inputs - ball.epsilon), inputs + ball.epsilon)
    return near if ball.low is None and ball.high is None else near.clamp(ball.low, ball.high)


def log_odds(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Log odds of any wrong class, per example: :math:`s = \log \sum_{j \ne y} e^{z_j} - z_y`.

    The cross-entropy is :math:`\log(1 + e^s)`, so both have the same direction of ascent. For a confident model
    the cross-entropy's gradient underflows to 0 in float32; this one's does not.
    """
    right = logits.gather(1, targets[:, None])
    return logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1) - right[:, 0]


def margin(logits: Tensor, targets: Tensor) -> Tensor:
    """Best wrong logit minus the right one, per example; positive for a wrong answer.

    Unlike :func:`log_odds` it follows one wrong class at a time.

    References:
        N. Carlini and D. Wagner, "Towards evaluating the robustness of neural networks", 2017, §V-A, f6.
    """
    right = logits.gather(1, targets[:, None])[:, 0]
    return logits.scatter(1, targets[:, None], -torch.inf).amax(1) - right


def survive(answer: Answer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Which examples are still classified as their target; a tie with another class counts as wrong."""
    with torch.no_grad():
        return torch.cat([margin(answer(x), y) < 0 for x, y in _chunks(inputs, targets)])


def fgsm(answer: Answer, inputs: Tensor, targets: Tensor, ball: AttackConfig) -> Tensor:
    """One step of the full length along the sign of the cross-entropy's gradient.

    References:
        I. Goodfellow et al., "Explaining and harnessing adversarial examples", 2015, §4.
    """
    gradient = torch.cat([input_gradient(answer, x, y) for x, y in _chunks(inputs, targets)])
    return project(inputs + ball.epsilon * gradient.sign(), inputs, ball)


def noisy(inputs: Tensor, ball: AttackConfig, generator: Generator) -> Tensor:
    """A uniformly random input of the ball."""
    shift = 2 * torch.rand(inputs.shape, generator=generator, dtype=inputs.dtype) - 1
    return project(inputs + ball.epsilon * shift, inputs, ball)


def pgd(
    answer: Answer,
    inputs: Tensor,
    targets: Tensor,
    ball: AttackConfig,
    *,
    generator: Generator,
    smoothing: float = 0.0,
) -> Tensor:
    """The first misleading input found by projected gradient ascent, per example, or the last one tried.

    The objective alternates between the log odds (the cross-entropy's direction) and the margin. The first restart
    begins at the example itself, the others at random. Examples that are misled already stay as they are.

    Args:
        smoothing: if above 0, each gradient is the mean over copies with Gaussian noise of this standard deviation,
            which passes functions that are flat or jagged at the point itself.

    References:
        A. Madry et al., "Towards deep learning models resistant to adversarial attacks", 2018, §2.1.
    """
    found = inputs.clone()
    standing = survive(answer, inputs, targets)
    for restart in range(ball.restarts):
        objective = (log_odds, margin)[restart % 2]

        def slope(x: Tensor, y: Tensor, objective: Objective = objective) -> Tensor:
            if smoothing == 0:
                return input_gradient(answer, x, y, objective)
            total = torch.zeros_like(x)
            for _ in range(_SMOOTHED):
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                total += input_gradient(answer, x + smoothing * noise, y, objective)
            return total

        starts = inputs if restart == 0 else noisy(inputs, ball, generator)
        for index in standing.nonzero().flatten().split(_CHUNK):
            found[index] = _ascend(answer, slope, starts[index], inputs[index], targets[index], ball)
        standing = standing & survive(answer, found, targets)
    return found


def _ascend(
    answer: Answer, slope: Objective, start: Tensor, inputs: Tensor, targets: Tensor, ball: AttackConfig
) -> Tensor:
    """Steps along the sign of the slope; an example that is misled stays as it is."""
    moved = start
    for _ in range(ball.steps):
        standing = survive(answer, moved, targets).view(-1, *(1,) * (inputs.ndim - 1))
        if not bool(standing.any()):
            break
        stepped = project(moved + 2.5 * ball.epsilon / ball.steps * slope(moved, targets).sign(), inputs, ball)
        moved = torch.where(standing, stepped, moved)
    return moved


def input_gradient(answer: Answer, inputs: Tensor, targets: Tensor, objective: Objective = log_odds) -> Tensor:
    """Gradient of each example's objective with respect to its input."""
    leaf = inputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(answer(leaf), targets).sum(), leaf)
    return gradient


def _chunks(inputs: Tensor, targets: Tensor) -> zip[tuple[Tensor, Tensor]]:
    return zip(inputs.split(_CHUNK), targets.split(_CHUNK), strict=True)


# --- gradient masking ---------------------------------------------------------------------------------

_WEAKER = {
    "fgsm": "one step (FGSM) misleads more than many (PGD)",
    "transfer": "examples made for another model mislead more than those made for this one (PGD)",
    "noise": "random noise misleads more than PGD",
    "smoothed": "smoothed gradients mislead more than the model's own (PGD)",
}


def masking_signs(found: Mapping[str, Any], *, examples: int) -> list[str]:
    """One sentence for each sign of gradient masking; an empty list is no proof of its absence.

    An attack with access to the model that misleads less than a weaker one, one without access, noise, or itself from
    further away or with smoothed gradients fails because of the gradients, not because the model is robust.

    Args:
        found: accuracies as :func:`robustness` measures them, in percent.
        examples: number of attacked examples; a difference of two of them is within chance.

    References:
        A. Athalye, N. Carlini and D. Wagner, "Obfuscated gradients give a false sense of security", 2018,
        §3.1; N. Carlini et al., "On evaluating adversarial robustness", 2019, §4.
    """
    slack = 200.0 / examples
    signs = [
        f"{what}: {found[name]:.0f} % against {found['pgd']:.0f} % remain right"
        for name, what in _WEAKER.items()
        if name in found and found[name] < found["pgd"] - slack
    ]
    if found["zero_gradients"] > _FLAT:
        signs.append(f"{found['zero_gradients']:.0f} % of the right answers have a gradient of exactly 0")
    radii = found["radii"]
    signs += [
        f"going further helps the model: {far['accuracy']:.0f} % remain right at distance {far['epsilon']:g}, "
        f"{near['accuracy']:.0f} % at {near['epsilon']:g}"
        for near, far in pairwise(radii)
        if far["accuracy"] > near["accuracy"] + slack
    ]
    if radii and radii[-1]["accuracy"] > _FAR:
        signs.append(
            f"PGD fails even from far away: {radii[-1]['accuracy']:.0f} % remain right at {radii[-1]['epsilon']:g}"
        )
    return signs
