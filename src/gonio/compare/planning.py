"""From a command's words to a plan, with every mistake found before anything is trained."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from gonio.compare.plan import Plan, RecipeEntry, Training
from gonio.compare.plan_checks import check_model, check_names, check_training, positive, seeds_of
from gonio.compare.results import BASELINE
from gonio.compare.secondary import changes_of
from gonio.compare.task import Task
from gonio.compare.tasks import resolve as resolve_task
from gonio.compare.threat import Threat
from gonio.compare.tuning import require_optuna
from gonio.compare.tuning_space import Tuning
from gonio.errors import InvalidArgumentError, UnmatchedRuleError
from gonio.models import resolve as resolve_model
from gonio.models.user_code import code_digest
from gonio.recipes import Recipe

__all__ = ["BUILT_IN_RECIPES", "entry_of", "make_plan", "versions"]

# One per seed system, in the order of the systems.
BUILT_IN_RECIPES = (
    "orthogonal-init",
    "switchable-norm",
    "decoupled-tanh",
    "self-orthogonality",
    "scale-shift",
)


def make_plan(
    recipes: Sequence[str | Recipe] | None = None,
    *,
    task: str = "digits",
    model: str | None = None,
    seeds: int | Sequence[int] = 8,
    training: Training | None = None,
    sesoi: float | None = None,
    tune: int = 0,
    robust: bool = False,
    command: str = "gonio compare",
) -> Plan:
    """Decide a comparison: recipes × seeds on one task and model, the baseline included.

    Every recipe is planned on the model here, so a rule that takes no layer is an error before the
    first run, and not after an hour.

    Args:
        recipes: built-in names, files, or recipes; without the baseline, which always is the first. None: the
            task's own choice, or one per method family; those that take no layer of the model are left out,
            and a note says so.
        task: see :func:`gonio.compare.tasks.resolve`.
        model: see :func:`gonio.models.resolve`; None is the task's own.
        seeds: how many (0, 1, …), or which.
        training: None is the task's own.
        sesoi: smallest effect of interest in the metric's unit; None is the task's own.
        tune: trials that every recipe, the baseline included, gets for its own strengths and the learning
            rate before the runs that are compared.
        robust: attack the trained models as the task says.
        command: the command line that reproduces the study, for the record.

    Raises:
        InvalidArgumentError: no seeds, a name twice, a training that cannot be run.
        UnmatchedRuleError: a rule takes no layer of the model; names rule, file and line.
        UnknownNameError: no such task, model or recipe.

    Example:
        >>> plan = gonio.compare.make_plan(["orthogonal-init"], seeds=3)
        >>> len(plan.grid), [recipe.name for recipe in plan.recipes]
        (6, ['baseline', 'orthogonal-init'])
    """
    data = resolve_task(task)
    found = seeds_of(seeds)
    chosen = training or data.training
    check_training(chosen, data)
    spec = model or data.model
    with torch.random.fork_rng(devices=[]):  # factories draw; the caller's generator stays as it was
        net = resolve_model(spec)(**data.sizes)
    check_model(net, spec, data)
    loaded, left_out = _chosen(recipes, data, net)
    return Plan(
        task=task,
        model=spec,
        recipes=tuple(entry_of(recipe) for recipe in (Recipe(BASELINE), *loaded)),
        seeds=found,
        training=chosen,
        metric=data.metric.name,
        direction=data.metric.direction,
        unit=data.metric.unit,
        splits={name: len(split) for name, split in data.splits.items()},
        data=data.digest(),
        sesoi=positive("sesoi", data.sesoi if sesoi is None else sesoi),
        worst=data.metric.worst,
        code=_code(task, spec),
        notes=(*data.notes, *left_out, *_confounded(loaded)),
        versions=versions(),
        command=command,
        tuning=_tuning(tune),
        threat=_threat(data) if robust else None,
    )


def _tuning(trials: int) -> Tuning | None:
    if trials == 0:
        return None
    positive("the number of trials", trials)
    require_optuna()
    return Tuning(trials=trials)


def _threat(task: Task) -> Threat:
    if task.threat is None:
        raise InvalidArgumentError(
            f"--robust needs inputs that can be disturbed a little, and the task {task.name!r} to say how far",
            "a task without a threat",
            "Leave --robust out, or give the Task a gonio.compare.Threat.",
        )
    return task.threat


def _chosen(recipes: Sequence[str | Recipe] | None, task: Task, model: nn.Module) -> tuple[list[Recipe], list[str]]:
    """The recipes, each of which fits the model, and a note on each default that does not."""
    if recipes is not None:
        loaded = [recipe if isinstance(recipe, Recipe) else Recipe.load(recipe) for recipe in recipes]
        check_names(loaded)
        for recipe in loaded:
            recipe.plan(model)
        return loaded, []
    fitting, notes = [], []
    for recipe in map(Recipe.load, task.recipes or BUILT_IN_RECIPES):
        try:
            recipe.plan(model)
            fitting.append(recipe)
        except UnmatchedRuleError:
            notes.append(f"{recipe.name} is left out: one of its rules takes no layer of this model.")
    return fitting, notes


def versions() -> Mapping[str, str]:
    """Of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in ("gonio", "torch", "numpy", "scipy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _code(*specs: str) -> Mapping[str, str]:
    """The digest of each user file."""
    digests = {spec: code_digest(spec) for spec in specs}
    return {spec: digest for spec, digest in digests.items() if digest is not None}


def entry_of(recipe: Recipe) -> RecipeEntry:
    """The recipe as a plan holds it."""
    return RecipeEntry(recipe.name, recipe.to_dict(), recipe.hash)


def _confounded(recipes: Sequence[Recipe]) -> list[str]:
    """A note for each recipe that changes several things at once."""
    changes = {recipe.name: changes_of(recipe.to_dict()) for recipe in recipes}
    return [
        f"{name} changes several things at once ({', '.join(used)}): its effect belongs to all of them together."
        for name, used in changes.items()
        if len(used) > 1
    ]
