"""What a recipe would do to a model, before anything happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gonio.recipes.assign import Assignment
from gonio.recipes.rule import KEEP
from gonio.surgery import sites

__all__ = ["Plan", "Step", "plan"]


@dataclass(frozen=True)
class Step:
    """One row of a plan.

    Attributes:
        verb: init, swap, parametrize or penalty.
        rule: number of the rule within its verb, from 1.
        path: of the module; `""` is the model itself.
        kind: the module's class name.
        what: the thing named with its options, or `keep`.
        skipped: why the thing does nothing here; empty if it does.

    Example:
        >>> plan = gonio.Recipe.load("orthogonal-init").plan(nn.Sequential(nn.Linear(4, 3)))
        >>> plan.steps[0].verb, plan.steps[0].path, plan.steps[0].kind
        ('init', '0', 'Linear')
    """

    verb: str
    rule: int
    path: str
    kind: str
    what: str
    skipped: str = ""


@dataclass(frozen=True)
class Plan:
    """What a recipe would do to a model; `str()` is a table.

    Attributes:
        recipe: its name.
        steps: one per rule and module, in the order in which they would happen.
        untouched: path and class name of every module with parameters that no rule changes or reads.
        notes: what was assumed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> print(gonio.Recipe.load("switchable-norm").plan(model))
        switchable-norm:
          verb  rule  layer  is           gets
          swap  1     1      BatchNorm2d  SwitchableNorm2d.from_batch_norm
        untouched:
          0  Conv2d
    """

    recipe: str
    steps: tuple[Step, ...]
    untouched: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.recipe}:" + ("" if self.steps else " nothing to do")]
        rows = [(s.verb, str(s.rule), s.path or "(model)", s.kind, _outcome(s)) for s in self.steps]
        lines += _aligned([("verb", "rule", "layer", "is", "gets"), *rows]) if rows else []
        if self.untouched:
            lines.append("untouched:")
            lines += _aligned([(path or "(model)", kind) for path, kind in self.untouched])
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan(name: str, assignments: Sequence[Assignment], model: nn.Module) -> Plan:
    """The plan of a recipe of that name whose rules were assigned to the model's modules."""
    steps = tuple(
        Step(a.verb, a.number, site.path, type(site.module).__name__, str(a.rule), a.skipped.get(site.path, ""))
        for a in assignments
        for site in a.sites
    )
    touched = {step.path for step in steps if step.what != KEEP and not step.skipped}
    untouched = tuple(
        (site.path, type(site.module).__name__)
        for site in sites(model)
        if site.module._parameters and site.path not in touched
    )
    return Plan(name, steps, untouched, tuple(dict.fromkeys(a.note for a in assignments if a.note)))


def _outcome(step: Step) -> str:
    return f"{step.what}; skipped: {step.skipped}" if step.skipped else step.what


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
