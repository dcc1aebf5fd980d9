"""Tuning (`--tune`): the search space, and trials that Optuna proposes and the study's database stores."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from gonio.errors import import_extra
from gonio.lab.judging.results import scores_of
from gonio.lab.plan import RecipeEntry, StudyPlan
from gonio.lab.record import RunRecord
from gonio.seeding import derive_seed

LEARNING_RATE = "lr"
_RANDOM = 8  # trials that depend on no others: the defaults and seven at random
_ROUND = 4  # later trials that depend on the same others, so they can run at the same time


@dataclass(frozen=True)
class Dimension:
    """One number that is searched, on a logarithmic scale.

    Attributes:
        name: `lr`, or the place of a strength in the recipe, e.g. `penalty.1.strength` for the first rule.
    """

    name: str
    default: float
    low: float
    high: float


def space_of(plan: StudyPlan, entry: RecipeEntry) -> tuple[Dimension, ...]:
    """The search space of one recipe: the learning rate first, then its strengths in order.

    The range of the learning rate is as wide for each recipe, around the one that the recipe or its setting names, if
    any. A strength of 0 has no logarithm and is not searched.
    """
    if plan.tuning is None:
        return ()
    found = [(LEARNING_RATE, plan.training_of(entry).lr, plan.tuning.rate_factor)]
    for number, rule in enumerate(entry.content.get("penalty", ()), start=1):
        if rule.get("strength"):
            found.append((f"penalty.{number}.strength", float(rule["strength"]), plan.tuning.strength_factor))
    return tuple(Dimension(name, value, value / factor, value * factor) for name, value, factor in found)


def defaults_of(plan: StudyPlan, entry: RecipeEntry) -> dict[str, float]:
    """The default values of one recipe's search space."""
    return {dimension.name: dimension.default for dimension in space_of(plan, entry)}


def settled(plan: StudyPlan, entry: RecipeEntry, values: Mapping[str, float]) -> tuple[StudyPlan, RecipeEntry]:
    """The plan and recipe with these values in place of their defaults; the recipe keeps its hash."""
    if not values:
        return plan, entry
    content, setting = (copy.deepcopy(dict[str, Any](part)) for part in (entry.content, entry.setting))
    for own in (content.get("optimizer") or {}, setting.get("training", {})):
        if LEARNING_RATE in own and LEARNING_RATE in values:
            own[LEARNING_RATE] = values[LEARNING_RATE]
    for name, value in values.items():
        if name != LEARNING_RATE:
            verb, number, option = name.split(".")
            content[verb][int(number) - 1][option] = value
    changed = replace(entry, content=content, setting=setting)
    recipes = tuple(changed if each.hash == entry.hash else each for each in plan.recipes)
    training = replace(plan.trained, lr=values.get(LEARNING_RATE, plan.trained.lr))
    return replace(plan, training=training, recipes=recipes), changed


@dataclass(frozen=True)
class Trial:
    """One run of a recipe with other values, judged on the validation split alone.

    Attributes:
        number: from 0; the first has the defaults.
        values: by the names of :func:`space_of`.
        record: its result; `score` is the best validation score.
    """

    number: int
    values: Mapping[str, float]
    record: RunRecord


def ready(plan: StudyPlan, done: Sequence[Trial]) -> list[int]:
    """The numbers of a recipe's trials that can run now, because the trials that they depend on are done."""
    numbers = {trial.number for trial in done}
    waiting = [number for number in range(plan.tuning.trials if plan.tuning else 0) if number not in numbers]
    return [number for number in waiting if numbers.issuperset(range(_looked_at(number)))]


def _looked_at(number: int) -> int:
    """How many of the first trials a trial's values depend on."""
    return 0 if number < _RANDOM else _RANDOM + (number - _RANDOM) // _ROUND * _ROUND


def propose(plan: StudyPlan, entry: RecipeEntry, number: int, done: Sequence[Trial]) -> dict[str, float]:
    """The values of one trial; they depend only on the plan and on the trials before it.

    So a killed tuning proposes the same values again when it is resumed, with any number of runs at a time. The
    random trials draw the same learning rates, as multiples of the default, for every recipe.
    """
    if number == 0 or plan.tuning is None:
        return defaults_of(plan, entry)
    optuna = require_optuna()
    seed = derive_seed(plan.tuning.seed, "trial", number) % 2**32
    space = space_of(plan, entry)
    ranges = {d.name: optuna.distributions.FloatDistribution(d.low, d.high, log=True) for d in space}
    before, states = optuna.logging.get_verbosity(), optuna.trial.TrialState
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no message for each study that is made
    try:
        search = optuna.create_study(
            direction="maximize" if plan.direction == "max" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM),
        )
        seen = [trial for trial in done if trial.number < _looked_at(number)]
        # a diverged trial has the worst score, a failed one none
        scored = scores_of(plan, [replace(trial.record, seed=trial.number) for trial in seen])
        scores = {number: score for (_, number), score in scored.items()}
        for trial in sorted(seen, key=lambda trial: trial.number):
            score = scores.get(trial.number)
            known = optuna.trial.create_trial(
                params=dict(trial.values), distributions=ranges, value=score,
                state=states.FAIL if score is None else states.COMPLETE,
            )  # fmt: skip
            search.add_trial(known)
        return dict(search.ask(ranges).params)
    finally:
        optuna.logging.set_verbosity(before)


def best(plan: StudyPlan, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best validation score, of equal ones the first; None if none finished."""
    finished = [trial for trial in trials if trial.record.score is not None]
    return max(finished, key=lambda t: (plan.sign * (t.record.score or 0.0), -t.number), default=None)


def require_optuna() -> ModuleType:
    """The package, whose import takes a second; a MissingExtraError if it is not installed."""
    return import_extra("optuna", "tuning (--tune)", package="optuna", extra="lab")
