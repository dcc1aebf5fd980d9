"""One regularizer on one tensor or output, with what it carries from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gonio.penalty.binding import Binding, Slot
from gonio.penalty.tap import Tap
from gonio.regularizers import (
    Evaluation,
    OutputRegularizer,
    Regularizer,
    ScaleShift,
    WeightRegularizer,
)
from gonio.regularizers.additions import Addition
from gonio.seeding import generator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["OutputTerm", "Term", "WeightTerm", "terms_of"]


class Term(ABC):
    """A summand of the penalty."""

    def __init__(self, slot: Slot, regularizer: Regularizer, label: str, note: str = "") -> None:
        self.slot = slot
        self.regularizer = regularizer
        self.label = label
        self.note = note

    @abstractmethod
    def evaluate(self, *, active: bool) -> Evaluation | None:
        """The value at this step, or None if the term does not count at it."""

    @abstractmethod
    def state(self) -> Tensor | None:
        """What the next step depends on besides the model."""

    @abstractmethod
    def load(self, state: Tensor) -> None:
        """Take back what :meth:`state` gave."""

    @abstractmethod
    def remove(self) -> None:
        """Leave the model."""


class WeightTerm(Term):
    """A regularizer of a weight."""

    def __init__(self, slot: Slot, regularizer: WeightRegularizer, label: str, note: str) -> None:
        super().__init__(slot, regularizer, label, note)
        self._regularizer = regularizer
        self._state: Tensor | None = None

    def evaluate(self, *, active: bool) -> Evaluation | None:
        if not active or self.slot.frozen:
            return None
        evaluation = self._regularizer.evaluate(self.slot.tensor(), self.slot.layout, state=self._state)
        return self.carry_on(evaluation)

    def addition(self, strength: float) -> Addition | None:
        """What adds strength × the gradient to the weight's `.grad`; None if a parametrization makes the weight."""
        weight = self.slot.tensor()
        if not weight.is_leaf:
            return None
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return Addition(self._regularizer, weight.grad, weight, self.slot.layout, strength, self._state)

    def add_through_(self, strength: float) -> Evaluation:
        """Add strength × the gradient to what the weight is made from."""
        weight = self.slot.tensor()
        grad = torch.zeros_like(weight)
        evaluation = self._regularizer.add_gradient_(grad, weight, self.slot.layout, factor=strength, state=self._state)
        weight.backward(grad)
        return evaluation

    def carry_on(self, evaluation: Evaluation) -> Evaluation:
        """Keep what the next step starts from, and give the value as one number."""
        self._state = evaluation.state
        return _gathered(evaluation)

    def state(self) -> Tensor | None:
        return self._state

    def load(self, state: Tensor) -> None:
        self._state = state

    def remove(self) -> None:
        pass


class OutputTerm(Term):
    """A regularizer of a layer's outputs."""

    def __init__(
        self,
        slot: Slot,
        regularizer: OutputRegularizer,
        label: str,
        *,
        generator: torch.Generator,
        process_group: ProcessGroup | None,
    ) -> None:
        super().__init__(slot, regularizer, label)
        self._regularizer = regularizer
        self._tap = Tap(slot.module, slot.path or "the model", without_bias=not regularizer.ignores_bias)
        self._generator = generator
        self._group = process_group
        self.samples: int | None = None

    def evaluate(self, *, active: bool) -> Evaluation | None:
        if self.slot.frozen:
            self._tap.forget()
            return None
        outputs = self._tap.take()
        return _mean([self._of(output) for output in outputs]) if active else None

    def _of(self, output: Tensor) -> Evaluation:
        x = _channels_second(output, self.slot.module)
        self.samples = x.numel() // x.shape[1]
        return self._regularizer.evaluate(
            x, groups=self.slot.layout.groups, generator=self._generator, process_group=self._group
        )

    def state(self) -> Tensor | None:
        return self._generator.get_state()

    def load(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def remove(self) -> None:
        self._tap.remove()


def terms_of(bindings: Sequence[Binding], seed: int, process_group: ProcessGroup | None) -> list[Term]:
    """A term for each binding, under labels that differ."""
    terms: list[Term] = []
    labels: dict[str, int] = {}
    for binding in bindings:
        slot, regularizer = binding.slot, binding.regularizer
        reads = slot.label if isinstance(regularizer, WeightRegularizer) else f"{slot.path}.output".lstrip(".")
        label = f"{reads}/{type(regularizer).__name__}"
        labels[label] = labels.get(label, 0) + 1
        if labels[label] > 1:
            label = f"{label}#{labels[label]}"
        if isinstance(regularizer, OutputRegularizer):
            own = generator(seed, "penalty", label)
            terms.append(OutputTerm(slot, regularizer, label, generator=own, process_group=process_group))
        elif isinstance(regularizer, WeightRegularizer):
            terms.append(WeightTerm(slot, _fitted(regularizer, slot), label, binding.note))
    return terms


@torch.no_grad()
def _fitted(regularizer: WeightRegularizer, slot: Slot) -> WeightRegularizer:
    """A scale shift with a floor for this weight, unless it has one."""
    weight = slot.tensor()
    if not isinstance(regularizer, ScaleShift) or weight.is_meta:
        return regularizer
    norms = weight.unflatten(0, (slot.layout.blocks, -1)).flatten(1).float().norm(dim=1)
    return regularizer.fitted(float(norms.min()))


def _mean(evaluations: list[Evaluation]) -> Evaluation:
    if len(evaluations) == 1:
        return evaluations[0]
    count = len(evaluations)
    value = torch.stack([e.value for e in evaluations]).mean()
    names = evaluations[0].terms
    return Evaluation(value, {n: sum((e.terms[n] for e in evaluations), torch.tensor(0.0)) / count for n in names})


def _channels_second(output: Tensor, module: nn.Module) -> Tensor:
    """Outputs as (N, k, *positions): a linear layer has its channels last, a convolution may lack a batch."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return output if output.ndim == len(module.kernel_size) + 2 else output.unsqueeze(0)
    return output.reshape(-1, output.shape[-1])


def _gathered(evaluation: Evaluation) -> Evaluation:
    """A value that is spread over processes as one number."""
    if type(evaluation.value) is Tensor or not hasattr(evaluation.value, "full_tensor"):
        return evaluation
    terms = {name: _full(term) for name, term in evaluation.terms.items()}
    return Evaluation(_full(evaluation.value), terms, evaluation.state)


def _full(x: Any) -> Tensor:
    full: Tensor = x.full_tensor()
    return full
