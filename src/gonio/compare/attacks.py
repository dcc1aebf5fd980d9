"""Inputs that mislead a classifier, within a distance in the maximum norm.

`Answer` is the whole function from inputs in their own unit to logits: whatever standardises the inputs is
inside it, so that distances mean the same for every model. The model must be in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

__all__ = ["Answer", "Ball", "fgsm", "input_gradient", "margin", "noisy", "pgd", "survive"]

Answer = Callable[[Tensor], Tensor]
_CHUNK = 128  # examples whose activations are held at the same time
_SMOOTHED = 4  # noisy copies over which a smoothed gradient is averaged


@dataclass(frozen=True)
class Ball:
    """The inputs that an attack may use: within `epsilon` of the original in every number, and in the range."""

    epsilon: float
    low: float | None = None
    high: float | None = None

    def project(self, moved: Tensor, inputs: Tensor) -> Tensor:
        """The nearest input of the ball."""
        near = torch.minimum(torch.maximum(moved, inputs - self.epsilon), inputs + self.epsilon)
        return near if self.low is None and self.high is None else near.clamp(self.low, self.high)


def log_odds(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Of any wrong class against the right one, per example: :math:`s = \log \sum_{j \ne y} e^{z_j} - z_y`.

    The cross-entropy is :math:`\log(1 + e^s)`, so both have the same direction of ascent. Where the model is
    sure, the cross-entropy's gradient is too small for float32 and is rounded to 0; this one's is not.

    Example:
        >>> from gonio.compare.attacks import log_odds
        >>> s = log_odds(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        >>> float(s.exp().log1p() - nn.functional.cross_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])))
        0.0
    """
    right = logits.gather(1, targets[:, None])
    return logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1) - right[:, 0]


def margin(logits: Tensor, targets: Tensor) -> Tensor:
    """How far the best wrong class is above the right one, per example; positive where the answer is wrong.

    Unlike :func:`log_odds` it follows one wrong class at a time.

    Example:
        >>> from gonio.compare.attacks import margin
        >>> margin(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([0])).tolist()
        [-2.0]

    References:
        N. Carlini and D. Wagner, "Towards evaluating the robustness of neural networks", 2017, §V-A, f6.
    """
    right = logits.gather(1, targets[:, None])[:, 0]
    return logits.scatter(1, targets[:, None], -torch.inf).amax(1) - right


def survive(answer: Answer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Which examples are still classified as their target; a tie with another class is not."""
    with torch.no_grad():
        return torch.cat([margin(answer(x), y) < 0 for x, y in _chunks(inputs, targets)])


def fgsm(answer: Answer, inputs: Tensor, targets: Tensor, ball: Ball) -> Tensor:
    """One step of the full length along the sign of the cross-entropy's gradient.

    References:
        I. Goodfellow et al., "Explaining and harnessing adversarial examples", 2015, §4.
    """
    gradient = torch.cat([input_gradient(answer, x, y) for x, y in _chunks(inputs, targets)])
    return ball.project(inputs + ball.epsilon * gradient.sign(), inputs)


def noisy(inputs: Tensor, ball: Ball, generator: Generator) -> Tensor:
    """A uniformly random input of the ball."""
    shift = 2 * torch.rand(inputs.shape, generator=generator, dtype=inputs.dtype) - 1
    return ball.project(inputs + ball.epsilon * shift, inputs)


def pgd(
    answer: Answer,
    inputs: Tensor,
    targets: Tensor,
    ball: Ball,
    *,
    steps: int,
    restarts: int,
    generator: Generator,
    smoothing: float = 0.0,
) -> Tensor:
    """The first misleading input found by projected gradient ascent, per example, or the last one tried.

    What is ascended is in turn the log-odds (the cross-entropy's direction) and the margin. The first restart
    begins at the example itself, the others at random. Examples that were misled are left alone.

    Args:
        smoothing: if above 0, each gradient is the mean over copies with Gaussian noise of this standard
            deviation, which gets through functions that are flat or jagged at the point itself.

    References:
        A. Madry et al., "Towards deep learning models resistant to adversarial attacks", 2018, §2.1.
    """
    found = inputs.clone()
    standing = survive(answer, inputs, targets)
    for restart in range(restarts):
        slope = _Slope(answer, (log_odds, margin)[restart % 2], smoothing, generator)
        starts = inputs if restart == 0 else noisy(inputs, ball, generator)
        for index in standing.nonzero().flatten().split(_CHUNK):
            found[index] = _ascend(slope, starts[index], inputs[index], targets[index], ball, steps)
        standing = standing & survive(answer, found, targets)
    return found


@dataclass(frozen=True)
class _Slope:
    """The direction in which an attack moves."""

    answer: Answer
    objective: Callable[[Tensor, Tensor], Tensor]
    smoothing: float
    generator: Generator

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient at the inputs, or its mean over noisy copies."""
        if self.smoothing == 0:
            return input_gradient(self.answer, inputs, targets, self.objective)
        total = torch.zeros_like(inputs)
        for _ in range(_SMOOTHED):
            noise = torch.randn(inputs.shape, generator=self.generator, dtype=inputs.dtype)
            total += input_gradient(self.answer, inputs + self.smoothing * noise, targets, self.objective)
        return total


def _ascend(slope: _Slope, start: Tensor, inputs: Tensor, targets: Tensor, ball: Ball, steps: int) -> Tensor:
    """Steps along the sign of the slope; an example that is misled stays where it is."""
    moved = start
    for _ in range(steps):
        standing = survive(slope.answer, moved, targets).view(-1, *(1,) * (inputs.ndim - 1))
        if not bool(standing.any()):
            break
        stepped = ball.project(moved + 2.5 * ball.epsilon / steps * slope(moved, targets).sign(), inputs)
        moved = torch.where(standing, stepped, moved)
    return moved


def input_gradient(
    answer: Answer, inputs: Tensor, targets: Tensor, objective: Callable[[Tensor, Tensor], Tensor] = log_odds
) -> Tensor:
    """Of the objective of each example, with respect to its input."""
    leaf = inputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(answer(leaf), targets).sum(), leaf)
    return gradient


def _chunks(inputs: Tensor, targets: Tensor) -> zip[tuple[Tensor, Tensor]]:
    return zip(inputs.split(_CHUNK), targets.split(_CHUNK), strict=True)
