"""Steps on spheres, in float64, from the formulas of the papers; vectors are the rows of a matrix, or all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def norm(x: Tensor, by_row: bool) -> Tensor:
    """Norms that broadcast against x."""
    squares = x.double().square()
    return (squares.sum(1, keepdim=True) if by_row else squares.sum()).sqrt()


def hyperball(w: Tensor, u: Tensor, rate: float, radius: Tensor, *, by_row: bool) -> Tensor:
    """Wen et al., arXiv 2606.16899: w ← R·unit(w − ηR·unit(u)), u the base optimizer's update as it is subtracted."""
    moved = w.double() - rate * radius * u.double() / norm(u, by_row)
    return radius * moved / norm(moved, by_row)


def equilibrium_rotation(name: str, lr: float, decay: float, momentum: float) -> float:
    """Kosson et al., arXiv 2305.17212, table 1: √(2ηλ/(1+α)) for SGD, √(2ηλ(1−β₁)/(1+β₁)) for AdamW."""
    factor = 1 / (1 + momentum) if name == "sgd" else (1 - momentum) / (1 + momentum)
    return math.sqrt(2 * lr * decay * factor)


@dataclass
class Rotational:
    """The same paper's rotational variant of an optimizer (algorithm 1): the update turns w by η_r on average.

    The radial part of the update is removed, the rest is divided by the root of a moving average of its squared norm
    (`share` of the newest; 1 for no average), and the norm stays. Without the optional centring of the weights.
    """

    radius: Tensor
    rate: float
    share: float = 0.1
    by_row: bool = False
    _mean_square: Tensor | None = None
    _weight: float = 0.0

    def step(self, w: Tensor, u: Tensor) -> Tensor:
        w, u = w.double(), u.double()
        inner = (w * u).sum(1, keepdim=True) if self.by_row else (w * u).sum()
        u = u - w * inner / self.radius**2
        old = torch.zeros_like(norm(u, self.by_row)) if self._mean_square is None else self._mean_square
        self._mean_square = (1 - self.share) * old + self.share * norm(u, self.by_row) ** 2
        self._weight = (1 - self.share) * self._weight + self.share  # 1 − (1 − share)^t
        moved = w - self.rate * self.radius * u / (self._mean_square / self._weight).sqrt()
        return self.radius * moved / norm(moved, self.by_row)


@dataclass
class Adam:
    """Adam's direction m̂/(√v̂ + ε), without learning rate and decay."""

    betas: tuple[float, float]
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0
    steps: int = 0

    def update(self, gradient: Tensor) -> Tensor:
        g, (b1, b2) = gradient.double(), self.betas
        self.steps += 1
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        corrected = self.v / (1 - b2**self.steps)
        return (self.m / (1 - b1**self.steps)) / (corrected.sqrt() + 1e-8)  # type: ignore[union-attr]


@dataclass
class Momentum:
    """The direction of SGD with momentum."""

    momentum: float
    buffer: Tensor | float = 0.0

    def update(self, gradient: Tensor) -> Tensor:
        self.buffer = self.momentum * self.buffer + gradient.double()
        return self.buffer
