"""How a strength changes over training: factors by step, as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf

from gonio.errors import InvalidArgumentError, check_range


class Schedule(ABC):
    """A factor on a regularizer's strength that depends on the training step alone."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """The factor at a step, counted from 0."""


@dataclass(frozen=True)
class Warmup(Schedule):
    r"""Grows linearly from 1/steps at the first step to 1 at step `steps` − 1, and stays there.

    :math:`\min(1, (t + 1) / \text{steps})` at step t, counted from 0.

    Example:
        >>> [gonio.regularizers.Warmup(4).factor(step) for step in (0, 1, 3, 100)]
        [0.25, 0.5, 1.0, 1.0]
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidArgumentError("Warmup() needs steps >= 1", f"{self.steps}", "Leave it out for none.")

    def factor(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


@dataclass(frozen=True)
class Milestones(Schedule):
    r"""A factor that jumps: 1 at first, then `factors[i]` from step `steps[i]` on.

    At step t it is :math:`\text{factors}[i]` for the largest i with :math:`\text{steps}[i] \le t`.

    Args:
        steps: increasing steps at which the factor changes.
        factors: the factor from each of them on; 0 switches the term off.

    Example:
        >>> decay = gonio.regularizers.Milestones.srip(steps_per_epoch=100)
        >>> [decay.factor(step) for step in (0, 2_100, 5_100, 7_100, 12_100)]
        [1.0, 0.001, 0.0001, 1e-06, 0.0]
    """

    steps: tuple[int, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "factors", tuple(self.factors))
        if len(self.steps) != len(self.factors) or list(self.steps) != sorted(set(self.steps)):
            raise InvalidArgumentError(
                "Milestones() needs increasing steps and one factor for each",
                f"steps={self.steps}, factors={self.factors}",
                "Sort the steps and give as many factors.",
            )
        for factor in self.factors:
            check_range("Milestones", factors=factor)
            if not 0 <= factor < inf:
                do = "A negative strength has no minimum; 0 switches the term off."
                raise InvalidArgumentError("Milestones() needs finite factors >= 0", f"{factor}", do)

    @classmethod
    def srip(cls, steps_per_epoch: int) -> Milestones:
        """The decay of SRIP's public training code: 1e-3 after epoch 20, 1e-4 after 50, 1e-6 after 70, 0 after 120.

        References:
            N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
            deep CNNs?", NeurIPS 2018, `Wide-Resnet/train_n.py`. https://arxiv.org/abs/1810.09102
        """
        epochs = (21, 51, 71, 121)
        return cls(tuple(epoch * steps_per_epoch for epoch in epochs), (1e-3, 1e-4, 1e-6, 0.0))

    def factor(self, step: int) -> float:
        passed = [factor for start, factor in zip(self.steps, self.factors, strict=True) if step >= start]
        return passed[-1] if passed else 1.0
