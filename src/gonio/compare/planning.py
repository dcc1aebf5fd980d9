"""From a command's words to a plan, with every mistake found before anything is trained."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from gonio.compare.plan import Plan, RecipeEntry, Training
from gonio.compare.results import BASELINE
from gonio.compare.task import Task
from gonio.compare.tasks import resolve as resolve_task
from gonio.compare.training import OPTIMIZERS
from gonio.errors import InvalidArgumentError
from gonio.models import resolve as resolve_model
from gonio.models.user_code import code_digest
from gonio.recipes import Recipe

__all__ = ["BUILT_IN_RECIPES", "make_plan", "versions"]

# One per seed system, in the order of the systems.
BUILT_IN_RECIPES = (
    "orthogonal-init",
    "switchable-norm",
    "decoupled-tanh",
    "self-orthogonality",
    "scale-shift",
)


def make_plan(
    recipes: Sequence[str | Recipe] = BUILT_IN_RECIPES,
    *,
    task: str = "digits",
    model: str | None = None,
    seeds: int | Sequence[int] = 8,
    training: Training | None = None,
    sesoi: float | None = None,
    command: str = "gonio compare",
) -> Plan:
    """Decide a comparison: recipes × seeds on one task and model, the baseline included.

    Every recipe is planned on the model here, so a rule that takes no layer is an error before the
    first run, and not after an hour.

    Args:
        recipes: built-in names, files, or recipes; without the baseline, which always is the first.
        task: see :func:`gonio.compare.tasks.resolve`.
        model: see :func:`gonio.models.resolve`; None is the task's own.
        seeds: how many (0, 1, …), or which.
        training: None is the task's own.
        sesoi: smallest effect of interest in the metric's unit; None is the task's own.
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
    chosen = training or data.training
    _check_training(chosen, data)
    spec = model or data.model
    loaded = [recipe if isinstance(recipe, Recipe) else Recipe.load(recipe) for recipe in recipes]
    with torch.random.fork_rng(devices=[]):  # factories draw; the caller's generator stays as it was
        net = resolve_model(spec)(**data.sizes)
    _check_model(net, spec, data)
    _check_recipes(loaded, net)
    return Plan(
        task=task,
        model=spec,
        recipes=tuple(_entry(recipe) for recipe in (Recipe(BASELINE), *loaded)),
        seeds=_seeds(seeds),
        training=chosen,
        metric=data.metric.name,
        direction=data.metric.direction,
        unit=data.metric.unit,
        splits={name: len(split) for name, split in data.splits.items()},
        data=data.digest(),
        sesoi=_positive("sesoi", data.sesoi if sesoi is None else sesoi),
        worst=data.metric.worst,
        code=_code(task, spec),
        notes=(*data.notes, *_confounded(loaded)),
        versions=versions(),
        command=command,
    )


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


def _entry(recipe: Recipe) -> RecipeEntry:
    return RecipeEntry(recipe.name, recipe.to_dict(), recipe.hash)


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    found = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not found or len(set(found)) < len(found):
        raise InvalidArgumentError(
            "a comparison needs at least one seed, none of them twice", repr(seeds), "Give 8, or (0, 1, 2)."
        )
    return found


def _check_model(model: nn.Module, spec: str, task: Task) -> None:
    """One forward pass and loss of two examples: shapes that do not fit would fail every run."""
    inputs, targets = task.train.inputs[:2], task.train.targets[:2]
    try:
        with torch.no_grad():
            task.loss(model.eval()(inputs), targets)
    except Exception as error:
        raise InvalidArgumentError(
            f"the model {spec!r} must take the inputs of the task {task.name!r}, of shape {tuple(inputs.shape)}, "
            "and its outputs the task's loss",
            f"{type(error).__name__}: {error}",
            "Choose a model for such inputs and targets.",
        ) from error


def _check_recipes(recipes: Sequence[Recipe], model: nn.Module) -> None:
    names = [BASELINE, *(recipe.name for recipe in recipes)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            "each recipe of a comparison needs its own name, and none may be 'baseline'",
            f"{', '.join(twice)} more than once",
            "Rename one of them in its file.",
        )
    for recipe in recipes:
        recipe.plan(model)


def _check_training(training: Training, task: Task) -> None:
    for name in ("epochs", "batch_size", "lr"):
        _positive(name, getattr(training, name))
    if training.optimizer not in OPTIMIZERS:
        raise InvalidArgumentError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)}",
            repr(training.optimizer),
            "Choose one of them.",
        )
    if training.batch_size > len(task.train):
        raise InvalidArgumentError(
            f"batch_size must be at most the {len(task.train)} training examples of {task.name!r}",
            str(training.batch_size),
            "Choose a smaller one.",
        )


def _positive(name: str, value: float) -> float:
    if not value > 0 or value == float("inf"):
        raise InvalidArgumentError(f"{name} must be a positive number", repr(value), "Give a larger one.")
    return value


def _confounded(recipes: Sequence[Recipe]) -> list[str]:
    """A note for each recipe that changes several things at once."""
    verbs = {r.name: [v for v in ("init", "swap", "parametrize", "penalty") if r.rules(v)] for r in recipes}
    return [
        f"{name} changes several things at once ({', '.join(used)}): its effect belongs to all of them together."
        for name, used in verbs.items()
        if len(used) > 1
    ]
