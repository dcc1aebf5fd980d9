"""What the rules on steps judge of each weight: how large its step is, and since when no step has turned it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.execution import is_sharded
from gonio.measuring.findings.step_rules import TURNED, Gradient, StepFacts
from gonio.measuring.reading.entry import TensorEntry
from gonio.measuring.training.rotation import StepRotation


@dataclass
class _Past:
    """Of one weight, what earlier measured steps have shown.

    Attributes:
        first: the first measured step at which its norm was not 0. It counts from the step after the last measured one
            before, at which it may have begun.
        still: measured steps in a row that did not turn it.
        gradient: what it had in these steps.
    """

    first: int | None = None
    still: int = 0
    gradient: Gradient = "none"


class JudgedSteps:
    """The facts of each weight at the latest measured step, gathered over the measured steps of a training."""

    def __init__(self) -> None:
        self.facts: list[StepFacts] = []
        self._past: dict[str, _Past] = {}
        self._latest: dict[str, int] = {}

    @torch.no_grad()
    def look_at_gradient(self, path: str, parameters: Sequence[Tensor]) -> None:
        """Note what gradient a weight has, before it is gone; its values only of one that the last step did not turn.

        Reading them waits for the device.
        """
        past = self._past.setdefault(path, _Past())
        given = [p.grad for p in parameters if p.grad is not None]
        if not given or past.gradient in ("others", "unknown"):
            return
        if not past.still or any(is_sharded(each) or each.layout != torch.strided for each in given):
            past.gradient = "unknown" if past.still else "zeros"
        else:
            past.gradient = "others" if any(bool(each.any()) for each in given) else "zeros"

    def judge(self, entry: TensorEntry, sums: Tensor, number: int, *, trained: bool) -> None:
        """Add the facts of one weight after its step.

        Args:
            sums: as of :func:`step_sums`.
            number: of the step.
            trained: whether it requires a gradient and has a learning rate.
        """
        found, past = StepRotation.of(sums), self._past.setdefault(entry.path, _Past())
        norm, moved = float(found.norm), float(sums[1])
        before, self._latest[entry.path] = self._latest.get(entry.path, 0), number
        if trained and (float(found.rotation) <= TURNED if norm else not moved):
            past.still += 1
        else:
            past.still, past.gradient = 0, "none"
        if norm and past.first is None:
            past.first = min(before, number - 1) + 1
        size = float(found.relative_update) if norm else None
        begun = number if past.first is None else number - past.first + 1
        dtype = entry.dtype
        self.facts.append(StepFacts(entry.path, size, begun, past.still, past.gradient if past.still else None, dtype))
