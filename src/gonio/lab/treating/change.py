"""By how much the change of a fine-tuned model is to be scaled, told by the training data of a task."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from gonio.errors import NotApplicableError
from gonio.lab.tasks.task import Task
from gonio.lab.treating.retrain import mean_loss
from gonio.surgery import shrink_change_

FACTORS = tuple(2.0**-octave for octave in range(11))
_BATCH, _MEASURED = 64, 64


def best_scale(model: nn.Module, base: Any, task: Task, paths: list[str]) -> dict[str, Any]:
    """The options of :func:`gonio.shrink_change_` with the lowest loss on the training data, up to 4096 examples.

    The factors are 1, 1/2, … 1/1024, for all layers and for those of `paths` alone; validation and test data are not
    used. The model is as it was afterwards.

    Raises: NotApplicableError if no factor below 1 has a lower loss than 1.
    """
    scopes: list[dict[str, Any]] = [{}, {"where": paths}] if paths else [{}]
    tried = [(_loss(model, base, task, scope, factor), factor, scope) for scope in scopes for factor in FACTORS]
    _, factor, scope = min(tried, key=lambda each: each[0])
    if factor == 1:
        why = "no smaller change has a lower loss on the training data"
        raise NotApplicableError(
            "shrink_change_", paths[0] if paths else "the model", why, "Leave it.", action="change"
        )
    return {**scope, "factor": factor}


@torch.no_grad()
def _loss(model: nn.Module, base: Any, task: Task, scope: Mapping[str, Any], factor: float) -> float:
    paths = scope.get("where")
    edited = shrink_change_(model, base, where=None if paths is None else lambda path, _: path in paths, factor=factor)
    training = model.training
    try:
        model.eval()
        return mean_loss(model, task, islice(task.train.in_order(_BATCH), _MEASURED))
    finally:
        model.train(training)
        edited.undo_()
