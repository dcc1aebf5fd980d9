"""A recipe in force on a model: its edits, its penalty, and the optimizer that it makes or is handed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn
from torch.optim import Optimizer

from gonio.editing.copies import holds_copies
from gonio.editing.edit import Ref, referrer
from gonio.editing.steps import watch
from gonio.editing.wrappers import parameter_ids, real_optimizers
from gonio.errors import InvalidArgumentError, PendingRecipeError
from gonio.escaping import html_table
from gonio.messages import local, say
from gonio.optim import Held
from gonio.optim.named import type_of
from gonio.penalty import Penalty
from gonio.recipes.catalogue import AFTER_STEPS, find
from gonio.recipes.plan import Assignment, act_
from gonio.recipes.rule import Rule
from gonio.surgery import Edited, UndoError


@dataclass(frozen=True, repr=False)
class Applied(Edited):
    """The changes that a recipe made to a model; `str()` is a table and `undo_()` takes all of them back.

    Attributes:
        verb: the name of the recipe; `changes` and `notes` are those of all edits.
        edits: one per rule, in the order in which they happened.
        penalty: to be added to the loss, or None if the recipe has no such rule.
        handover: what of the recipe acts on the steps of an optimizer; None if nothing does.

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

    edits: tuple[Edited, ...] = ()
    penalty: Penalty | None = field(default=None, compare=False)
    handover: Handover | None = field(default=None, compare=False)

    def make_optimizer(self, *, lr: float | None = None, weight_decay: float | None = None) -> Optimizer:
        """The optimizer that the recipe names, over all parameters of the model, with its hold and its clip.

        Args:
            lr, weight_decay: in place of the recipe's own.

        Raises:
            InvalidArgumentError: if the recipe names no optimizer, or neither it nor the call has a learning rate.
            GonioError: as :func:`gonio.hold_` and :func:`gonio.clip_qk_`.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> applied = gonio.Recipe.load("hyperball").apply_(model)
            >>> type(applied.make_optimizer()).__name__, len(applied.handover.held)
            ('AdamW', 2)
        """
        made = None if self.handover is None else self.handover.make(lr, weight_decay)
        if made is None:
            do = "Build the optimizer that you would without the recipe."
            do = do if self.handover is None else "Hand yours over: hold_(optimizer)."
            raise InvalidArgumentError(f"the recipe {self.verb!r} names no optimizer", "none to make", do)
        return made

    def hold_(self, optimizer: Optimizer) -> Held | None:
        """Hand over an optimizer of your own: the recipe's hold and clip act on its steps. Returns the hold, if any.

        Its learning rate and other settings stay; only its kind must be the recipe's, if that names one. Call it before
        the first step, and before a learning rate schedule is built.

        Raises:
            InvalidArgumentError: for an optimizer of another kind than the recipe's.
            GonioError: as :func:`gonio.hold_` and :func:`gonio.clip_qk_`.

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

    def __repr__(self) -> str:
        return f"<Applied {self.verb}: {len(self)} changes, {len(self.penalty or ())} penalty terms>"

    def _repr_html_(self) -> str:
        done = self.handover.done.values() if self.handover is not None else ()
        tables = [part._repr_html_() for part in (*self.edits, self.penalty, *done) if part is not None]
        return "".join(tables) or html_table(self.verb, (), ())

    def __str__(self) -> str:
        parts = [str(part) for part in (*self.edits, self.penalty, self.handover) if part is not None]
        return "\n".join([f"{self.verb}:", *parts]) if parts else local(say("{verb}: nothing to do", verb=self.verb))


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
    acting = [a for a in assignments if not a.rule.keeps and a.verb not in AFTER_STEPS]
    after = {a.verb: a for a in assignments if a.verb in AFTER_STEPS}
    edits: list[Edited] = []
    rules = []
    try:
        for a in acting:
            if a.verb == "penalty":
                rules.append((a.where, find("penalty", a.rule.use).target(**a.rule.arguments())))
            else:
                with a.named():  # the verb notes the layers that it leaves out
                    edits.append(act_(model, a.verb, a.rule, where=a.where, seed=seed))
        penalty = Penalty(model, rules, seed=seed, accumulate=accumulate) if rules else None
    except BaseException:
        _Parts(name, [*edits]).run_()
        raise
    handover = Handover(name, model, optimizer, after) if optimizer is not None or after else None
    changes = tuple(change for edit in edits for change in edit.changes)
    notes = tuple(note for edit in edits for note in edit.notes)
    parts = [part for part in (penalty, *edits, handover) if part is not None]
    return Applied(name, changes, notes, _Parts(name, parts), tuple(edits), penalty, handover)


class _Parts:
    """What a recipe made, ended from the last to the first, each once: an interrupted undo goes on where it was.

    The edits come after the penalty, because they may refuse.
    """

    def __init__(self, recipe: str, parts: list[Edited | Penalty | Handover]) -> None:
        self._recipe, self._parts, self._ended = recipe, parts, False

    def run_(self) -> None:
        """End hold and clip, undo the edits and remove the penalty. An optimizer that was made stays."""
        if self._ended:
            raise UndoError(self._recipe, "it was undone before")
        while self._parts:
            self._parts[-1].undo_()
            self._parts.pop()
        self._ended = True


# --- the optimizer ------------------------------------------------------------------------------------

# Note [Recipes that wait for their optimizer]
# A recipe is applied before the optimizer is built, so its optimizer, its hold and its clip cannot act yet. If the
# caller forgets them, the training would be another one than the recipe says. While a recipe waits, the step of an
# optimizer that has any of the model's parameters raises. They are known by weak references, so a model that is gone
# waits for nothing.


class Handover:
    """The part of a recipe that acts on the optimizer's steps, in force once the optimizer is known.

    Attributes:
        done: by its part of the recipe, what acts after the steps; empty before.
    """

    def __init__(self, recipe: str, model: nn.Module, optimizer: Rule | None, after: Mapping[str, Assignment]) -> None:
        self.done: dict[str, Edited] = {}
        self._recipe, self._model, self._optimizer, self._after = recipe, model, optimizer, after
        self._end_waiting: Callable[[], None] | None = watch(
            None, before=partial(_refuse, recipe, list(map(referrer(model), model.parameters())))
        )
        weakref.finalize(model, self._end_waiting).atexit = False

    def make(self, lr: float | None, weight_decay: float | None) -> Optimizer | None:
        """The recipe's optimizer over all parameters, with what acts after its steps; None if it names none."""
        rule = self._optimizer
        if rule is None:
            return None
        given = {"lr": lr, "weight_decay": weight_decay}
        options = {**rule.arguments(), **{name: value for name, value in given.items() if value is not None}}
        if "lr" not in options:
            what = f"the optimizer of the recipe {self._recipe!r} needs a learning rate"
            raise InvalidArgumentError(what, "none in the recipe", "Pass make_optimizer(lr=…).")
        optimizer = find("optimizer", rule.use).target(self._model, **options)
        self.take_(optimizer)
        return optimizer

    def take_(self, optimizer: Optimizer) -> Held | None:
        """Act on the steps of this optimizer, which must be of the recipe's kind; all parts or none."""
        if self._optimizer is not None:
            kind = type_of(self._optimizer.use)
            found = [each for each in real_optimizers(optimizer, verb="hold_") if not isinstance(each, kind)]
            if found:
                what = f"the recipe {self._recipe!r} trains with {self._optimizer.use}"
                raise InvalidArgumentError(what, type(found[0]).__name__, "Use the one of make_optimizer().")
        try:
            for part, given in self._after.items():
                where = None if given.rule.where is None else given.where
                with given.named():
                    self.done[part] = AFTER_STEPS[part](self._model, optimizer, where=where, **given.rule.arguments())
        except BaseException:
            self._end_()
            raise
        self._wait_no_longer()
        return self.held

    @property
    def held(self) -> Held | None:
        """The weights that are held; None before, and for a recipe without hold."""
        held = self.done.get("hold")
        return held if isinstance(held, Held) else None

    def undo_(self) -> None:
        """End what acts after steps, and wait for no optimizer any longer."""
        self._wait_no_longer()
        self._end_()

    def _end_(self) -> None:
        for part in reversed(list(self.done)):
            self.done[part].undo_()
            del self.done[part]

    def _wait_no_longer(self) -> None:
        if self._end_waiting is not None:
            self._end_waiting()
        self._end_waiting = None

    def __str__(self) -> str:
        made = [f"optimizer: {self._optimizer}"] if self._optimizer is not None else []
        if self.done:
            return "\n".join([*made, *map(str, self.done.values())])
        made += [f"{each.rule}: {len(each.sites)} modules" for each in self._after.values()]
        how = "make_optimizer(), or " if self._optimizer is not None else ""
        return "\n".join(
            [*made, *([f"  note: waits for {how}hold_(optimizer)"] if self._end_waiting is not None else [])]
        )


def _refuse(recipe: str, parameters: list[Ref], optimizer: Optimizer) -> None:
    """Raise in the step of an optimizer that has parameters of a model whose recipe still waits, or copies of them."""
    held, there = parameter_ids(optimizer), [p for ref in parameters if (p := ref()) is not None]
    half = [p for p in there if p.dtype.itemsize < 4]
    if any(id(p) in held for p in there) or holds_copies(optimizer, half, wider=True):
        raise PendingRecipeError(recipe, type(optimizer).__name__)
