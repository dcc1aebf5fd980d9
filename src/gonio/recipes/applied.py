"""A recipe in force on a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gonio.errors import GonioError, NotApplicableError, listing
from gonio.penalty import Penalty
from gonio.recipes.assign import Assignment
from gonio.recipes.names import find
from gonio.surgery import Edited, init_, parametrize_, swap_

__all__ = ["Applied", "apply_"]


@dataclass(frozen=True)
class Applied:
    """What a recipe did to a model; `str()` is a table and `undo_()` takes all of it back.

    Attributes:
        recipe: its name.
        edits: one per rule, in the order in which they happened.
        penalty: to be added to the loss, or None if the recipe has no such rule.

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

    def undo_(self) -> None:
        """Remove the penalty and undo the edits, latest first.

        Raises:
            UndoError: if they were undone before.
        """
        if self.penalty is not None:
            self.penalty.remove()
        _undo_(self.edits)

    def __str__(self) -> str:
        parts = [str(part) for part in (*self.edits, self.penalty) if part is not None]
        return "\n".join([f"{self.recipe}:" + ("" if parts else " nothing to do"), *parts])


def apply_(name: str, assignments: Sequence[Assignment], model: nn.Module, *, seed: int) -> Applied:
    """Apply the rules of a recipe of that name to the modules that they were assigned; all of them or none."""
    assigned = [assignment for assignment in assignments if not assignment.rule.keeps]
    penalties = [a for a in assigned if a.verb == "penalty"]  # the last verb
    edits: list[Edited] = []
    try:
        for assignment in assigned[: len(assigned) - len(penalties)]:
            edits.append(_act_(model, assignment, seed))  # noqa: PERF401 (a failure must find the earlier ones)
        penalty = _penalty(model, penalties, seed) if penalties else None
    except BaseException:
        _undo_(edits)
        raise
    return Applied(name, tuple(edits), penalty)


def _act_(model: nn.Module, assignment: Assignment, seed: int) -> Edited:
    try:
        edited = _verb_(model, assignment, seed)
    except GonioError as error:
        error.add_note(f"in {assignment.place}")
        raise
    left = assignment.where.paths - {change.path for change in edited.changes}
    if left:
        edited.undo_()
        raise NotApplicableError(
            assignment.place, listing(sorted(left)), f"{edited.verb} refused it", "Exclude it with `keep`."
        )
    return edited


def _verb_(model: nn.Module, assignment: Assignment, seed: int) -> Edited:
    rule, where = assignment.rule, assignment.where
    target = find(assignment.verb, rule.use).target
    arguments: dict[str, Any] = rule.arguments()
    if assignment.verb == "swap":
        return swap_(model, target, where=where, **arguments)
    tensor = arguments.pop("tensor", "weight")
    if assignment.verb == "init":
        return init_(model, target, where=where, tensor=tensor, seed=seed, **arguments)
    return parametrize_(model, target(**arguments), where=where, tensor=tensor)


def _penalty(model: nn.Module, assignments: list[Assignment], seed: int) -> Penalty:
    rules = [(a.where, find("penalty", a.rule.use).target(**a.rule.arguments())) for a in assignments]
    return Penalty(model, rules, seed=seed)


def _undo_(edits: tuple[Edited, ...] | list[Edited]) -> None:
    for edit in reversed(edits):
        edit.undo_()
