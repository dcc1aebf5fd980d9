"""Build and train one model of a comparison: the loop that every run of a task goes through."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gonio.compare.planning.plan import BASELINE, Plan, RecipeEntry, Training
from gonio.compare.tasks.task import Split, Task
from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.models import resolve as resolve_model
from gonio.parametrizations import tick_on_step
from gonio.recipes import Recipe
from gonio.recipes.apply import Applied
from gonio.seeding import derive_seed, generator
from gonio.surgery import lsuv_

OPTIMIZERS = ("sgd", "adamw")
_EVALUATION_BATCH = 512


def prepare_process() -> None:
    """Settings under which a result depends on the plan and the seed alone."""
    torch.set_num_threads(1)  # sums are split by thread, so their last bits depend on the count
    torch.use_deterministic_algorithms(True)


def seed_everything(seed: int) -> None:
    """Seed the global generators, which user factories, dropout and the like read; gonio does not."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (for user code that reads it)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the state of the global generators at the end of the block."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(legacy)  # noqa: NPY002


def build(plan: Plan, task: Task, entry: RecipeEntry, seed: int) -> tuple[nn.Module, Applied, str]:
    """The model of one run with its recipe applied, and the recipe's plan as text.

    The model's factory reads generators that depend on the seed alone, and the recipe draws from its
    own, so layers that a recipe does not change start bit-equal to the baseline's.

    Args:
        seed: the run's own, as `plan.seed_of` gives it.
    """
    seed_everything(derive_seed(seed, "model"))
    factory = resolve_model(plan.model)
    model = replace(factory, function=partial(factory.function, **entry.setting.get("model", {})))(**task.sizes)
    if "lsuv" in entry.setting:  # before the recipe, whose own initialisation would win
        examples = task.train.inputs[: entry.setting["lsuv"]["examples"]]
        lsuv_(model, task.outputs(nn.Identity(), examples), seed=seed)
    if entry == plan.baseline and entry.unchanged:
        return model, Recipe(BASELINE).apply_(model, seed=seed), ""
    recipe = Recipe.from_dict(entry.content)
    text = str(recipe.plan(model))
    return model, recipe.apply_(model, seed=seed), text


@dataclass
class Fit:
    """The course of a training run.

    Attributes:
        curve: `train_loss` and `val_score` per epoch.
        best_epoch: the epoch with the best validation score; of equal ones the latest, which has the smallest
            learning rate.
        state: the model's state dict at the end of that epoch.
        diverged: where NaN or Inf occurred; None if everything was finite.
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
    """Train `model` in place; the validation split chooses the epoch that is reported.

    The order of the examples and the augmentation depend on `seed` and the epoch alone,
    so two recipes with one seed see the same batches.

    Args:
        penalty: added to the loss of each step, e.g. a :class:`gonio.Penalty`.
    """
    optimizer = make_optimizer(model, training)
    with suppress(NoMatchError):  # a model without spectral norms has none to advance
        tick_on_step(optimizer, model)
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
        _validate(model, task, done, epoch)
        if done.diverged:
            break
    return done


def _validate(model: nn.Module, task: Task, done: Fit, epoch: int) -> None:
    """Score one epoch and keep its weights if it is the best so far."""
    score = evaluate(model, task, task.validation)
    if score is None:
        done.diverged = f"outputs on the validation split are not finite in epoch {epoch}"
        return
    scores = done.curve["val_score"]
    better = max if task.metric.direction == "max" else min
    if not scores or better(score, *scores) == score:
        done.best_epoch, done.state = epoch, copy.deepcopy(model.state_dict())
    scores.append(score)


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """The optimizer over all parameters of the model, those of its recipe included.

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

    A last batch of one example is dropped, because batch normalisation cannot train on it. The example that is
    dropped changes with the epoch.
    """
    order = torch.randperm(len(task.train), generator=generator(seed, "order", epoch))
    inputs, targets = task.train.inputs[order], task.train.targets[order]
    if task.augment is not None:
        inputs = task.augment(inputs, generator(seed, "augment", epoch))
    for pair in zip(inputs.split(size), targets.split(size), strict=True):
        if len(pair[1]) > 1 or size == 1:
            yield pair


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, split: Split) -> float | None:
    """The task's metric on a split, in evaluation mode; None if an output is not finite."""
    model.eval()
    outputs = torch.cat([task.outputs(model, part) for part in split.inputs.split(_EVALUATION_BATCH)])
    if not bool(torch.isfinite(outputs).all()):
        return None
    return float(task.metric.function(outputs, split.targets))
