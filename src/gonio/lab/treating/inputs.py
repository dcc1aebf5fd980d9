"""What a model under treatment runs on, and what its findings mean there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from gonio.lab.tasks.task import Task
from gonio.measuring import Finding, Measurements, measure
from gonio.measuring.findings.rules import rule_texts, worst_first
from gonio.messages import say
from gonio.seeding import RandomInput
from gonio.surgery.equivalent import fitting, outputs

_BATCH = 64  # training inputs that are measured and run at a time


def check_takes(model: nn.Module, task: Task) -> None:
    """Refuse a task whose inputs the model does not take.

    Raises:
        InvalidArgumentError: with the layer that does not, or the model's own words.
    """
    inputs, _ = task.train.take(range(min(2, len(task.train))))
    example = task.outputs(lambda x: x, inputs)
    with fitting(model, example, say("task={name!r}", name=task.name), always=True):
        outputs(model, example)


@dataclass(frozen=True)
class Inputs:
    """What the model runs on.

    Attributes:
        given: an input of the model, or a :class:`gonio.seeding.RandomInput`, whose values are no data.
        base: the model that this one was fine-tuned from, or its state dict.
    """

    task: Task | None
    given: Any
    base: Any = None

    @cached_property
    def batch(self) -> Any:
        """The given input; None if there is none."""
        return self.given.value if self.random else self.given

    @property
    def random(self) -> bool:
        """Whether the given input is of random numbers."""
        return isinstance(self.given, RandomInput)

    def measured(self, model: nn.Module) -> Measurements:
        """The model, and what has changed since its base."""
        found = measure(model, batch=self.example)
        if self.base is None:
            return found
        return replace(found, findings=worst_first([*found.findings, *measure(self.base, model).findings]))

    def counted(self, found: Measurements) -> Measurements:
        """Without the findings that compare random numbers with the data of the training."""
        return replace(found, findings=tuple(f for f in found.findings if not self._seen(f, "compared")))

    def is_evidence(self, finding: Finding) -> bool:
        """Whether a finding tells of the model or of data, not of its outputs on random numbers."""
        return self.task is not None or not self._seen(finding, "seen", "compared")

    def notes(self, found: Measurements) -> tuple[str, ...]:
        """What random numbers cannot tell of these findings."""
        compared, seen = (
            ", ".join(dict.fromkeys(f.code for f in found.findings if self._seen(f, how)))
            for how in ("compared", "seen")
        )
        notes = []
        if compared:
            notes.append(say("not counted, because the batch is random numbers and no data: {codes}", codes=compared))
        if seen:
            notes.append(say("found with random numbers, on data it may differ: {codes}", codes=seen))
        return tuple(notes)

    def _seen(self, finding: Finding, *how: str) -> bool:
        return self.random and rule_texts()[finding.code].batch in how

    @cached_property
    def data(self) -> str:
        """The digest of the task's data."""
        return "" if self.task is None else self.task.digest()

    @property
    def example(self) -> Any:
        """The batch to measure with; None if there is none."""
        return self.batch if self.batch is not None or self.task is None else next(self.training())

    def training(self) -> Iterator[Any]:
        """Training inputs as the model gets them: the task's, otherwise the batch if it is of data."""
        if self.task is None:
            yield from () if self.given is None or self.random else (self.batch,)
            return
        for inputs, _ in self.task.train.in_order(_BATCH):
            yield self.task.outputs(lambda x: x, inputs)
