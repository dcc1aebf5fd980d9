"""A recipe in force on a model: its edits, its penalty, and the optimizer that it makes or is handed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gonio.errors import GonioError, InvalidArgumentError, PendingRecipeError
from gonio.escaping import html_table
from gonio.optim import Held, hold_
from gonio.penalty import Penalty
from gonio.recipes.catalogue import find
from gonio.recipes.plan import Assignment
from gonio.recipes.rule import Rule
from gonio.surgery import Edited, init_, parametrize_, swap_
from gonio.surgery.optimizer import parameter_ids


@dataclass(frozen=True)
class Applied:
    """The changes that a recipe made to a model; `str()` is a table and `undo_()` takes all of them back.

    Attributes:
        recipe: its name.
        edits: one per rule, in the order in which they happened.
        penalty: to be added to the loss, or None if the recipe has no such rule.
        handover: the recipe's optimizer and hold; None if it has neither.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> applied = gonio.Recipe.load("switchable-norm").apply_(model)
        >>> print(applied)
        switchable-norm:
        swap_: 1 module
          1  BatchNorm2d → SwitchableNorm2d
          note: 2 new parameters: build the optimizer after this edit, or pass optimizer=
        >>> applied.undo_()
    """

    recipe: str
    edits: tuple[Edited, ...]
    penalty: Penalty | None = field(default=None, compare=False)
    handover: Handover | None = field(default=None, compare=False)

    def make_optimizer(self, *, lr: float | None = None, weight_decay: float | None = None) -> Optimizer:
        """The optimizer that the recipe names, over all parameters of the model and with the recipe's hold.

        Args:
            lr, weight_decay: in place of the recipe's own.

        Raises:
            InvalidArgumentError: if the recipe names no optimizer, or neither it nor the call has a learning rate.
            GonioError: as :func:`gonio.hold_`.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> applied = gonio.Recipe.load("hyperball").apply_(model)
            >>> type(applied.make_optimizer()).__name__, len(applied.handover.held)
            ('AdamW', 2)
        """
        if self.handover is None:
            do = "Build the optimizer that you would without the recipe."
            raise InvalidArgumentError(f"the recipe {self.recipe!r} names no optimizer", "none to make", do)
        return self.handover.make(lr, weight_decay)

    def hold_(self, optimizer: Optimizer) -> Held | None:
        """Hand over an optimizer of your own: the recipe's hold acts on its steps. None for a recipe without hold.

        Its learning rate and other settings stay; only its kind must be the recipe's, if that names one. Call it before
        the first step, and before a learning rate schedule is built.

        Raises:
            InvalidArgumentError: for an optimizer of another kind than the recipe's.
            GonioError: as :func:`gonio.hold_`.

        Example:
            >>> model = nn.Linear(4, 3)
            >>> recipe = gonio.Recipe.from_dict({"name": "held", "hold": {"norm": "filters"}})
            >>> applied = recipe.apply_(model)
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
            >>> held = applied.hold_(optimizer)
            >>> [change.path for change in held.changes], optimizer.step()
            ([''], None)
        """
        return None if self.handover is None else self.handover.take_(optimizer)

    def undo_(self) -> None:
        """End the hold, remove the penalty and undo the edits, latest first. An optimizer that was made stays.

        Raises:
            UndoError: if they were undone before.
        """
        if self.handover is not None:
            self.handover.undo_()
        if self.penalty is not None:
            self.penalty.undo_()
        _undo_(self.edits)

    def __repr__(self) -> str:
        changed = sum(map(len, self.edits))
        return f"<Applied {self.recipe}: {changed} changes, {len(self.penalty or ())} penalty terms>"

    def _repr_html_(self) -> str:
        held = self.handover.held if self.handover is not None else None
        tables = [part._repr_html_() for part in (*self.edits, self.penalty, held) if part is not None]
        return "".join(tables) or html_table(self.recipe, (), ())

    def __str__(self) -> str:
        parts = [str(part) for part in (*self.edits, self.penalty, self.handover) if part is not None]
        return "\n".join([f"{self.recipe}:", *parts]) if parts else f"{self.recipe}: nothing to do"


def apply_(
    name: str,
    assignments: Sequence[Assignment],
    model: nn.Module,
    *,
    seed: int,
    accumulate: int = 1,
    optimizer: Rule | None = None,
) -> Applied:
    """Apply the rules of a recipe of that name to the modules assigned to them; all of them or none."""
    acting = [assignment for assignment in assignments if not assignment.rule.keeps and assignment.verb != "hold"]
    hold = next((assignment for assignment in assignments if assignment.verb == "hold"), None)
    edits: list[Edited] = []
    rules = []
    try:
        for a in acting:
            if a.verb == "penalty":
                rules.append((a.where, find("penalty", a.rule.use).target(**a.rule.arguments())))
            else:
                edits.append(_edit_(model, a, seed))
        penalty = Penalty(model, rules, seed=seed, accumulate=accumulate) if rules else None
    except BaseException:
        _undo_(edits)
        raise
    handover = Handover(name, model, optimizer, hold) if optimizer is not None or hold is not None else None
    return Applied(name, tuple(edits), penalty, handover)


def _edit_(model: nn.Module, assignment: Assignment, seed: int) -> Edited:
    """Run the verb of one rule; it notes the layers that it leaves out."""
    where, arguments = assignment.where, assignment.rule.arguments()
    target, tensor = find(assignment.verb, assignment.rule.use).target, arguments.pop("tensor", "weight")
    try:
        match assignment.verb:
            case "swap":
                edited = swap_(model, target, where=where, **arguments)
            case "init":
                edited = init_(model, target, where=where, tensor=tensor, seed=seed, **arguments)
            case _:
                edited = parametrize_(model, target(**arguments), where=where, tensor=tensor)
    except GonioError as error:
        error.add_note(f"in {assignment.place}")
        raise
    return edited


def _undo_(edits: Sequence[Edited]) -> None:
    for edit in reversed(edits):
        edit.undo_()


# --- the optimizer ------------------------------------------------------------------------------------

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
        _WAITING[:] = [each for each in _WAITING if any(ref() is not None for ref in each.parameters)]
        _WAITING.append(self._waiting)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before_step))

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
        self._wait_no_longer()
        return self.held

    def undo_(self) -> None:
        """End the hold, and wait for no optimizer any longer."""
        self._wait_no_longer()
        if self.held is not None:
            self.held.undo_()

    def _wait_no_longer(self) -> None:
        _WAITING[:] = [each for each in _WAITING if each is not self._waiting]

    def __str__(self) -> str:
        made = [f"optimizer: {self._optimizer}"] if self._optimizer is not None else []
        if self.held is not None:
            return "\n".join([*made, str(self.held)])
        if self._hold is not None:
            made.append(f"{self._hold.rule}: {len(self._hold.sites)} modules")
        how = "make_optimizer(), or " if self._optimizer is not None else ""
        return "\n".join([*made, *([f"  note: waits for {how}hold_(optimizer)"] if self._waiting in _WAITING else [])])


@dataclass(eq=False)
class _Waiting:
    """A recipe that needs the optimizer, and the parameters that no other one may train; holds no model."""

    recipe: str
    parameters: list[weakref.ref[nn.Parameter]]


_WAITING: list[_Waiting] = []
_HOOKS: list[RemovableHandle] = []


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    held = parameter_ids(optimizer) if _WAITING else set()
    for waiting in _WAITING:
        if any((p := ref()) is not None and id(p) in held for ref in waiting.parameters):
            raise PendingRecipeError(waiting.recipe, type(optimizer).__name__)
