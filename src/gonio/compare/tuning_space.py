"""What `--tune` may change: the learning rate, and a recipe's own strengths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gonio.compare.plan import Plan, RecipeEntry

__all__ = ["TUNING_SEED", "Dimension", "Tuning", "settled", "space_of"]

TUNING_SEED = 1_000_003

LEARNING_RATE = "lr"


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How every recipe, the baseline included, is tuned before the runs that are compared.

    Attributes:
        trials: runs that each recipe gets; the first has its defaults.
        seed: of every trial; none of the study's, so that what was chosen by luck shows in the comparison.
        rate_factor: the learning rate is searched from its default divided by this to its default times it.
        strength_factor: the same for each strength.
        sampler: how trials are proposed.
    """

    trials: int
    seed: int = TUNING_SEED
    rate_factor: float = 8.0
    strength_factor: float = 30.0
    sampler: str = "tpe"


@dataclass(frozen=True)
class Dimension:
    """One number that is searched, on a logarithmic scale.

    Attributes:
        name: `lr`, or the place of a strength in the recipe, e.g. `penalty.1.strength`: the first rule's.
    """

    name: str
    default: float
    low: float
    high: float


def space_of(plan: Plan, entry: RecipeEntry) -> tuple[Dimension, ...]:
    """What is searched for one recipe: the learning rate first, then its strengths in order.

    A strength of 0 has no logarithm and stays.

    Example:
        >>> from gonio.compare.tuning_space import space_of
        >>> plan = gonio.compare.make_plan(["scale-shift"], seeds=1, tune=4)
        >>> [(d.name, d.low, d.high) for d in space_of(plan, plan.recipes[1])]
        [('lr', 0.00625, 0.4), ('penalty.1.strength', 0.0033333333333333335, 3.0)]
    """
    if plan.tuning is None:
        return ()
    rate, strength = plan.tuning.rate_factor, plan.tuning.strength_factor
    found = [_around(LEARNING_RATE, plan.trained.lr, rate)]
    for number, rule in enumerate(entry.content.get("penalty", ()), start=1):
        if rule.get("strength"):
            found.append(_around(f"penalty.{number}.strength", float(rule["strength"]), strength))
    return tuple(found)


def settled(plan: Plan, entry: RecipeEntry, values: Mapping[str, float]) -> tuple[Plan, RecipeEntry]:
    """The plan and recipe with these values in place of their defaults; the recipe keeps its hash."""
    if not values:
        return plan, entry
    content: dict[str, Any] = copy.deepcopy(dict(entry.content))
    for name, value in values.items():
        if name != LEARNING_RATE:
            verb, number, option = name.split(".")
            content[verb][int(number) - 1][option] = value
    changed = replace(entry, content=content)
    recipes = tuple(changed if each.hash == entry.hash else each for each in plan.recipes)
    training = replace(plan.trained, lr=values.get(LEARNING_RATE, plan.trained.lr))
    return replace(plan, training=training, recipes=recipes), changed


def _around(name: str, default: float, factor: float) -> Dimension:
    return Dimension(name, default, default / factor, default * factor)
