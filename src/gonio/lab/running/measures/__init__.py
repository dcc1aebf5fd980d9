"""What a run can be judged by beside its task's metric: the closed registry of measures, one number per run.

A measure is a function of a :class:`FinishedRun` and options with the decorator :func:`measure`, in a file of this
package; a plan names it and its options as data (:class:`gonio.lab.plan.Measure`). It returns one finite number, and
may change the model, which nothing reads afterwards.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.lab.plan import Measure, TrainingConfig
from gonio.lab.tasks.task import Task
from gonio.messages import say

Reads = tuple[str | None, Literal["max", "min"]]


@dataclass(frozen=True)
class FinishedRun:
    """A run, as a measure sees it.

    Attributes:
        model: in evaluation mode, with the weights of the scored epoch; as it starts for a measure of the start.
        curve: `train_loss` and `val_score` per epoch; empty for a measure of the start.
        seed: of the run's random numbers.
        robustness: accuracy by attack, if the plan attacks models.
    """

    model: nn.Module
    task: Task
    training: TrainingConfig
    seed: int
    curve: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    robustness: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasureSpec:
    """A measure of the registry.

    Attributes:
        function: of a finished run and options; its docstring says what it is.
        unit: of the number.
        worst: the number of a run that diverged; None: the worst finished run counts.
        better: whether larger or smaller scores are better; None: the measure is no score, and has no better side.
        start: whether the model is measured before training, which is then left out.
        attacked: whether the run is attacked first.
        kind: `task`, the task's own score; `training`, another score of how well or fast a network trains; or a
            `property`, which can only be compared between networks that are equally good.
        reads: unit and better side of the task's score that it is computed from, with no unit where any will do; a
            measure of kind `task` reads its own.
    """

    function: Callable[..., float]
    unit: str
    worst: float | None = None
    better: Literal["max", "min"] | None = None
    start: bool = False
    attacked: bool = False
    kind: Literal["task", "training", "property"] = "property"
    reads: Reads | None = None

    @property
    def scored(self) -> Reads | None:
        """Unit and better side that the task's score must have; None if it is not read."""
        return (self.unit, self.better or "max") if self.kind == "task" else self.reads

    @property
    def summary(self) -> str:
        """What is measured, in one sentence."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")


_REGISTERED: dict[str, MeasureSpec] = {}


def measure(
    unit: str,
    *,
    worst: float | None = None,
    better: Literal["max", "min"] | None = None,
    start: bool = False,
    attacked: bool = False,
    kind: Literal["task", "training", "property"] = "property",
    reads: Reads | None = None,
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Register a function as the measure of its name; the arguments are those of :class:`MeasureSpec`."""

    def add(function: Callable[..., float]) -> Callable[..., float]:
        _REGISTERED[function.__name__] = MeasureSpec(function, unit, worst, better, start, attacked, kind, reads)
        return function

    return add


def measures() -> Mapping[str, MeasureSpec]:
    """Every measure by name, of all files of this package.

    Example:
        >>> from gonio.lab.running.measures import measures
        >>> measures()["angle_spread"].unit
        'degrees'
    """
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(_REGISTERED.items()))


def spec_of(named: Measure) -> MeasureSpec:
    """The registered measure, after a check of the options.

    Raises:
        UnknownNameError: there is no such measure.
        InvalidArgumentError: it has no such option, or the option takes another type.
    """
    registered = measures()
    if named.name not in registered:
        raise UnknownNameError("measure", named.name, registered)
    spec = registered[named.name]
    known = list(inspect.signature(spec.function).parameters)[1:]
    unknown = sorted(set(named.options) - set(known))
    if unknown:
        has = f"the measure {named.name!r} has the options {', '.join(known) or 'none'}"
        raise InvalidArgumentError(has, ", ".join(unknown), "Leave it out, or choose one of these.")
    hints = get_type_hints(spec.function, include_extras=True) if named.options else {}
    for name, value in named.options.items():
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            takes = error.errors()[0]["msg"].removeprefix("Input should be ").replace("valid number", "number")
            asked = say(
                "the option {option!r} of the measure {name!r} is {takes}", option=name, name=named.name, takes=takes
            )
            raise InvalidArgumentError(asked, f"{value!r:.80}", "Correct it.") from error
    return spec
