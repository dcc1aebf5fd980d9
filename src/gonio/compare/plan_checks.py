"""What a plan must fulfil before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gonio.compare.plan import Training
from gonio.compare.results import BASELINE
from gonio.compare.task import Task
from gonio.compare.threat import ATTACK_SEED
from gonio.compare.training import OPTIMIZERS
from gonio.compare.tuning_space import TUNING_SEED
from gonio.errors import InvalidArgumentError
from gonio.recipes import Recipe

__all__ = ["check_model", "check_names", "check_training", "positive", "seeds_of"]


def seeds_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """How many (0, 1, …), or which.

    Raises:
        InvalidArgumentError: none, or one twice.
    """
    found = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not found or len(set(found)) < len(found):
        raise InvalidArgumentError(
            "a comparison needs at least one seed, none of them twice", repr(seeds), "Give 8, or (0, 1, 2)."
        )
    taken = sorted({TUNING_SEED, ATTACK_SEED}.intersection(found))
    if taken:
        raise InvalidArgumentError(
            "the seeds of a comparison must not be those of tuning and of attacks", str(taken[0]), "Choose another."
        )
    return found


def check_model(model: nn.Module, spec: str, task: Task) -> None:
    """One forward pass and loss of two examples: shapes that do not fit would fail every run.

    Raises:
        InvalidArgumentError: they do not fit.
    """
    inputs, targets = task.train.inputs[:2], task.train.targets[:2]
    try:
        with torch.no_grad():
            task.loss(task.outputs(model.eval(), inputs), targets)
    except Exception as error:
        raise InvalidArgumentError(
            f"the model {spec!r} must take the inputs of the task {task.name!r}, of shape {tuple(inputs.shape)}, "
            "and its outputs the task's loss",
            f"{type(error).__name__}: {error}",
            "Choose a model for such inputs and targets.",
        ) from error


def check_names(recipes: Sequence[Recipe]) -> None:
    """Names tell the runs apart.

    Raises:
        InvalidArgumentError: one is there twice, or is the baseline's.
    """
    names = [BASELINE, *(recipe.name for recipe in recipes)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            "each recipe of a comparison needs its own name, and none may be 'baseline'",
            f"{', '.join(twice)} more than once",
            "Rename one of them in its file.",
        )


def check_training(training: Training, task: Task) -> None:
    """Numbers that can be trained with.

    Raises:
        InvalidArgumentError: they cannot.
    """
    for name in ("epochs", "batch_size", "lr"):
        positive(name, getattr(training, name))
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


def positive(name: str, value: float) -> float:
    """The value.

    Raises:
        InvalidArgumentError: it is not above 0, or infinite.
    """
    if not value > 0 or value == float("inf"):
        raise InvalidArgumentError(f"{name} must be a positive number", repr(value), "Give a larger one.")
    return value
