"""Metrics: what the score of a run is, from its outputs and the targets of a whole split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from gonio.errors import InvalidArgumentError


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Percentage of rows whose largest output is at the target class.

    Shape:
        - ``outputs``: (N, K); ``targets``: (N,) integers from 0 to K - 1.

    Raises:
        InvalidArgumentError: other shapes, which would be broadcast to a wrong number, or another target.

    Example:
        >>> gonio.lab.tasks.accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        50.0
    """
    own = "Give the task a gonio.lab.tasks.Metric of its own."
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1]:
        found = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
        raise InvalidArgumentError("accuracy compares a row of outputs with one class per example", found, own)
    least, largest = (int(each) for each in targets.aminmax())
    if least < 0 or largest >= outputs.shape[1]:
        needs = f"accuracy with {outputs.shape[1]} outputs needs targets from 0 to {outputs.shape[1] - 1}"
        raise InvalidArgumentError(needs, f"{least} to {largest}", f"Correct the data or the model. {own}")
    # an integer count, so that no summation order can change the last bit
    return 100.0 * int((outputs.argmax(1) == targets).sum()) / len(targets)


@dataclass(frozen=True)
class Metric:
    """The score of a run.

    Attributes:
        function: maps (outputs, targets) of a whole split to a number.
        direction: `max` if larger is better, else `min`.
        worst: the worst possible value, if there is one; the score of a diverged run.

    Raises:
        InvalidArgumentError: a field of another type, or a `worst` that is not finite.
    """

    name: str
    function: Callable[[Tensor, Tensor], float]
    direction: str = "max"
    unit: str = ""
    worst: float | None = None

    def __post_init__(self) -> None:
        for field, kind in (("name", str), ("unit", str), ("function", Callable)):
            if not isinstance(value := getattr(self, field), kind):  # type: ignore[arg-type]
                what = "text" if kind is str else "a function of outputs and targets"
                raise InvalidArgumentError(f"Metric({field}=) is {what}", f"{value!r:.80}", "Correct it.")
        if self.worst is not None and not is_finite(self.worst):
            do = "Leave it out for a score without a worst value."
            raise InvalidArgumentError("Metric(worst=) is a finite number", f"{self.worst!r:.80}", do)
        if self.direction not in ("max", "min"):
            raise InvalidArgumentError(
                "a metric's direction must be 'max' or 'min'", repr(self.direction), "Use one of them."
            )

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """What the function returns, as a number; it may be a tensor with one element, NaN or infinite.

        The function gets targets of its own, so that one that changes them in place changes nothing else.

        Raises:
            InvalidArgumentError: it returns anything else.
        """
        found: object = self.function(outputs, targets.clone())
        try:
            return float(found.detach() if isinstance(found, Tensor) else found)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError) as error:
            needs = f"the metric {self.name!r} must return one number"
            raise InvalidArgumentError(needs, " ".join(f"{found!r}".split())[:80], "Correct its function.") from error


def is_finite(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


ACCURACY = Metric("accuracy", accuracy, "max", "%", 0.0)
