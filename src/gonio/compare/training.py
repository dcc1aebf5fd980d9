"""Train one model on one task: the loop that every run of a comparison goes through."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gonio.compare.plan import Training
from gonio.compare.task import Split, Task
from gonio.errors import InvalidArgumentError
from gonio.seeding import generator

__all__ = ["OPTIMIZERS", "Fit", "batches", "evaluate", "fit", "make_optimizer", "outputs_of"]

OPTIMIZERS = ("sgd", "adamw")
_EVALUATION_BATCH = 512


@dataclass
class Fit:
    """A training as it went.

    Attributes:
        curve: `train_loss` and `val_score` per epoch.
        best_epoch: the epoch with the best validation score, the latest of equals: its learning rate
            is the most annealed.
        state: the model's state dict at the end of that epoch.
        diverged: what was not finite, and where; None if everything was.
    """

    curve: dict[str, list[float]] = field(default_factory=lambda: {"train_loss": [], "val_score": []})
    best_epoch: int | None = None
    state: dict[str, Any] | None = None
    diverged: str | None = None


def fit(
    model: nn.Module,
    task: Task,
    *,
    training: Training,
    seed: int,
    penalty: Callable[[], Tensor] | None = None,
) -> Fit:
    """Train `model` in place; which epoch is reported is decided by the validation split.

    The order of the examples and the augmentation depend on `seed` and the epoch, and on nothing else,
    so two recipes with one seed see the same batches.

    Args:
        penalty: added to the loss of each step, e.g. a :class:`gonio.Penalty`.
    """
    optimizer = make_optimizer(model, training)
    steps = sum(1 for _ in batches(task, training.batch_size, seed=seed, epoch=0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.epochs * steps)
    done = Fit()
    for epoch in range(training.epochs):
        model.train()
        total, count = 0.0, 0
        for inputs, targets in batches(task, training.batch_size, seed=seed, epoch=epoch):
            optimizer.zero_grad()
            loss = task.loss(task.outputs(model, inputs), targets)
            objective = loss if penalty is None else loss + penalty()
            if not torch.isfinite(objective):
                done.diverged = f"the training loss is {objective.item()} in epoch {epoch}"
                return done
            objective.backward()
            optimizer.step()
            schedule.step()
            total, count = total + loss.item() * len(targets), count + len(targets)
        done.curve["train_loss"].append(total / count)
        if not _validate(model, task, done, epoch):
            break
    return done


def _validate(model: nn.Module, task: Task, done: Fit, epoch: int) -> bool:
    """Score one epoch, keep its weights if it is the best so far; False if the outputs are not finite."""
    score = evaluate(model, task, task.validation)
    if score is None:
        done.diverged = f"outputs on the validation split are not finite in epoch {epoch}"
        return False
    scores = done.curve["val_score"]
    better = max if task.metric.direction == "max" else min
    if not scores or better(score, *scores) == score:
        done.best_epoch, done.state = epoch, copy.deepcopy(model.state_dict())
    scores.append(score)
    return True


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """The optimizer over all parameters that the model has now, those of its recipe included.

    Raises:
        InvalidArgumentError: unknown optimizer.
    """
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(),
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            nesterov=training.momentum > 0,
        )
    if training.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    raise InvalidArgumentError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}", repr(training.optimizer), "Choose one of them."
    )


def batches(task: Task, size: int, *, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The training split in this epoch's order, augmented, in batches of `size`.

    A last batch of one example is left out: batch normalisation cannot train on it. Which example that
    is changes with the epoch.
    """
    order = torch.randperm(len(task.train), generator=generator(seed, "order", epoch))
    inputs, targets = task.train.inputs[order], task.train.targets[order]
    if task.augment is not None:
        inputs = task.augment(inputs, generator(seed, "augment", epoch))
    for pair in zip(inputs.split(size), targets.split(size), strict=True):
        if len(pair[1]) > 1 or size == 1:
            yield pair


def evaluate(model: nn.Module, task: Task, split: Split) -> float | None:
    """The task's metric on a split, in evaluation mode; None if an output is not finite."""
    outputs = outputs_of(model, task, split.inputs)
    if not bool(torch.isfinite(outputs).all()):
        return None
    return float(task.metric.function(outputs, split.targets))


@torch.no_grad()
def outputs_of(model: nn.Module, task: Task, inputs: Tensor) -> Tensor:
    """The model's outputs in evaluation mode."""
    model.eval()
    return torch.cat([task.outputs(model, part) for part in inputs.split(_EVALUATION_BATCH)])
