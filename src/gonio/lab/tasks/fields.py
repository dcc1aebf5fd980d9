"""The kinds of the fields of a task, which is made by code of the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np

from gonio.errors import InvalidArgumentError
from gonio.escaping import shorten
from gonio.lab.plan import AttackConfig, TrainingConfig

if TYPE_CHECKING:
    from gonio.lab.tasks.task import Task


def check_fields(task: Task) -> None:
    """Refuse values of another kind, which would fail later in words of Python, or pass as something else.

    Raises:
        InvalidArgumentError: names the field.
    """
    words = (tuple, list)
    kinds: dict[str, tuple[str, bool]] = {
        "name": ("text", isinstance(task.name, str)),
        "model": ("the name of a model, such as 'file.py:function'", isinstance(task.model, str)),
        "sizes": ("a mapping of num_classes and in_channels to whole numbers", _sizes(task.sizes)),
        "training": ("a gonio.lab.TrainingConfig", isinstance(task.training, TrainingConfig)),
        "sesoi": ("a positive number", is_finite(task.sesoi) and task.sesoi > 0),
        "loss": ("a function of outputs and targets", callable(task.loss)),
        "metrics": ("a tuple of metrics", isinstance(task.metrics, words)),
        "notes": ("a tuple of sentences", isinstance(task.notes, words) and _texts(task.notes)),
        "recipes": ("a tuple of names of recipes", isinstance(task.recipes, words) and _texts(task.recipes)),
        "workers": ("0 or a positive whole number", type(task.workers) is int and task.workers >= 0),
        "threat": ("a gonio.lab.AttackConfig", task.threat is None or isinstance(task.threat, AttackConfig)),
    }
    for name, (what, holds) in kinds.items():
        if not holds:
            found = shorten(repr(getattr(task, name)), longest=80)
            raise InvalidArgumentError(f"Task({name}=) is {what}", found, "Correct it.")
    for values, least in zip(task.standardize or (), (-math.inf, 0.0), strict=False):
        if not all(least < value < math.inf for value in np.ravel(values)):
            needs = "Task(standardize=) is the mean of each channel and its standard deviation, which is above 0"
            raise InvalidArgumentError(needs, f"{task.standardize!r:.80}", "Leave out constant channels.")


def is_finite(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def _texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _sizes(values: object) -> bool:
    known = ("num_classes", "in_channels")
    return isinstance(values, Mapping) and all(
        key in known and isinstance(value, Integral) for key, value in values.items()
    )
