"""The optimizer of a recipe: made by the recipe or handed over to it; no other one may train the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gonio.errors import GonioError, InvalidArgumentError, PendingRecipeError
from gonio.optim import Held, hold_
from gonio.recipes.catalogue import find
from gonio.recipes.plan import Assignment
from gonio.recipes.rule import Rule
from gonio.surgery.optimizer import parameter_ids

# Note [Recipes that wait for their optimizer]
# A recipe is applied before the optimizer is built, so its optimizer and its hold cannot act yet. If the caller forgets
# them, the training would be another one than the recipe says. Torch calls a hook with each optimizer that takes a
# step: while a recipe waits, the step of an optimizer that has any of the model's parameters raises. Parameters are
# known by weak references, so a model that is gone waits for nothing. As in gonio.surgery.optimizer, the hook stays.


class Handover:
    """The part of a recipe that acts on the optimizer's steps, in force once the optimizer is known.

    Attributes:
        held: the weights that are held; None before, and for a recipe without hold.
    """

    def __init__(self, recipe: str, model: nn.Module, optimizer: Rule | None, hold: Assignment | None) -> None:
        self.held: Held | None = None
        self._recipe, self._model, self._optimizer, self._hold = recipe, model, optimizer, hold
        self._waiting = _Waiting(recipe, [weakref.ref(p) for p in model.parameters()])
        self._waiting.begin()

    def make(self, lr: float | None, weight_decay: float | None) -> Optimizer:
        """The recipe's optimizer over all parameters, with its hold."""
        rule = self._optimizer
        if rule is None:
            raise InvalidArgumentError(
                f"the recipe {self._recipe!r} names no optimizer", "none to make", "Hand yours over: hold_(optimizer)."
            )
        given = {"lr": lr, "weight_decay": weight_decay}
        options = {**rule.arguments(), **{name: value for name, value in given.items() if value is not None}}
        if "lr" not in options:
            what = f"the optimizer of the recipe {self._recipe!r} needs a learning rate"
            raise InvalidArgumentError(what, "none in the recipe", "Pass make_optimizer(lr=…).")
        optimizer = find("optimizer", rule.use).target(self._model, **options)
        self.take_(optimizer)
        return optimizer

    def take_(self, optimizer: Optimizer) -> Held | None:
        """Hold the weights through the steps of this optimizer, which must be of the recipe's kind."""
        kinds = [base.__name__.lower() for base in type(optimizer).__mro__]
        if self._optimizer is not None and self._optimizer.use not in kinds:
            what = f"the recipe {self._recipe!r} trains with {self._optimizer.use}"
            raise InvalidArgumentError(what, type(optimizer).__name__, "Use the one of make_optimizer().")
        if self._hold is not None:
            try:
                self.held = hold_(self._model, optimizer, where=self._hold.where, **self._hold.rule.arguments())
            except GonioError as error:
                error.add_note(f"in {self._hold.place}")
                raise
        self._waiting.end()
        return self.held

    def undo_(self) -> None:
        """End the hold, and wait for no optimizer any longer."""
        self._waiting.end()
        if self.held is not None:
            self.held.undo_()

    def __str__(self) -> str:
        made = [f"optimizer: {self._optimizer}"] if self._optimizer is not None else []
        if self.held is not None:
            return "\n".join([*made, str(self.held)])
        if self._hold is not None:
            made.append(f"{self._hold.rule}: {len(self._hold.sites)} modules")
        how = "make_optimizer(), or " if self._optimizer is not None else ""
        return "\n".join([*made, *([f"  note: waits for {how}hold_(optimizer)"] if self._waiting.waits else [])])


@dataclass(eq=False)
class _Waiting:
    """A recipe that needs the optimizer, and the parameters that no other one may train; holds no model."""

    recipe: str
    parameters: list[weakref.ref[nn.Parameter]]

    @property
    def waits(self) -> bool:
        return any(each is self for each in _WAITING)

    def begin(self) -> None:
        _WAITING[:] = [each for each in _WAITING if any(ref() is not None for ref in each.parameters)]
        _WAITING.append(self)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before_step))

    def end(self) -> None:
        _WAITING[:] = [each for each in _WAITING if each is not self]

    def concerns(self, held: Iterable[int]) -> bool:
        known = set(held)
        return any((p := ref()) is not None and id(p) in known for ref in self.parameters)


_WAITING: list[_Waiting] = []
_HOOKS: list[RemovableHandle] = []


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for waiting in _WAITING:
        if waiting.concerns(parameter_ids(optimizer)):
            raise PendingRecipeError(waiting.recipe, type(optimizer).__name__)
