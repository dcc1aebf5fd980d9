"""Build and train one model of a comparison: the loop that every run of a task goes through."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from gonio.lab.planning.plan import BASELINE, Plan, RecipeEntry, Training
from gonio.lab.tasks.task import Batch, Examples, Metric, Task
from gonio.models import resolve as resolve_model
from gonio.optim.named import OPTIMIZERS, arguments_of
from gonio.recipes import Recipe
from gonio.recipes.apply import Applied
from gonio.seeding import derive_seed
from gonio.surgery import lsuv_

_EVALUATION_BATCH = 512


def prepare_process(device: str = "cpu") -> None:
    """Settings under which a result depends on the plan and the seed alone.

    On an accelerator some operations have no deterministic form; they are then used with a warning, and the last bits
    of a result may differ between two runs.
    """
    torch.set_num_threads(1)  # sums are split by thread, so their last bits depend on the count
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses deterministic algorithms
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    torch.backends.cudnn.benchmark = False


def seed_everything(seed: int) -> None:
    """Seed the global generators, which user factories, dropout and the like read; gonio does not."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (for user code that reads it)


def build(plan: Plan, task: Task, entry: RecipeEntry, seed: int) -> tuple[nn.Module, Applied, str]:
    """The model of one run with its recipe applied, and the recipe's plan as text.

    The model's factory reads generators that depend on the seed alone, and the recipe draws from its
    own, so layers that a recipe does not change start bit-equal to the baseline's. Both draw on the CPU, so a model
    starts with the same numbers on every device.

    Args:
        seed: the run's own, as `plan.seed_of` gives it.
    """
    seed_everything(derive_seed(seed, "model"))
    factory = resolve_model(plan.model)
    model = replace(factory, function=partial(factory.function, **entry.setting.get("model", {})))(**task.sizes)
    if "lsuv" in entry.setting:  # before the recipe, whose own initialisation would win
        examples = task.train.inputs[: entry.setting["lsuv"]["examples"]]
        lsuv_(model, task.outputs(nn.Identity(), examples), seed=seed)
    model = model.to(plan.device)
    if entry == plan.baseline and entry.unchanged:
        return model, Recipe(BASELINE).apply_(model, seed=seed), ""
    recipe = Recipe.from_dict(entry.content)
    text = str(recipe.plan(model))
    parts = plan.training_of(entry).accumulate
    return model, recipe.apply_(model, seed=seed, accumulate=parts), text


@dataclass
class Fit:
    """The course of a training run.

    Attributes:
        curve: `train_loss` and `val_score` per epoch.
        best_epoch: the epoch with the best validation score; of equal ones the latest, which has the smallest
            learning rate.
        state: the model's state dict at the end of that epoch, with averaged parameters if the training averages.
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
    hold: Callable[[Optimizer], object] | None = None,
    workers: int = 0,
) -> Fit:
    """Train `model` in place, on its device; the validation split chooses the epoch that is reported.

    The order of the examples and the augmentation depend on `seed` and the epoch alone,
    so two recipes with one seed see the same batches.

    Args:
        penalty: added to the loss of each step, e.g. a :class:`gonio.Penalty`, built with the training's `accumulate`.
        hold: is given the optimizer before its schedule is built, e.g. `applied.hold_` of a recipe.
        workers: processes that load the items of a data set.
    """
    step = Step(model, task, training, penalty, hold=hold)
    average = Average(model, training.ema)
    schedule = make_schedule(step.optimizer, training, _steps(task, training))
    done = Fit()
    for epoch in range(training.epochs):
        model.train()
        total, count = 0.0, 0
        for batch in batches(task, training.batch_size, seed=seed, epoch=epoch, training=training, workers=workers):
            loss, objective = step(*batch)
            if not math.isfinite(objective):
                done.diverged = f"the training loss is {objective} in epoch {epoch}"
                return done
            schedule.step()
            average.update()
            total, count = total + loss * len(batch[1]), count + len(batch[1])
        done.curve["train_loss"].append(total / count)
        with average.in_place():
            _validate(model, task, done, epoch, workers)
        if done.diverged:
            break
    return done


def _validate(model: nn.Module, task: Task, done: Fit, epoch: int, workers: int) -> None:
    """Score one epoch and keep its weights if it is the best so far."""
    score = evaluate(model, task, task.validation, workers=workers)
    if score is None:
        done.diverged = f"outputs on the validation split are not finite in epoch {epoch}"
        return
    scores = done.curve["val_score"]
    better = max if task.metric.direction == "max" else min
    if not scores or better(score, *scores) == score:
        done.best_epoch, done.state = epoch, copy.deepcopy(model.state_dict())
    scores.append(score)


class Step:
    """One step of training: forward, loss and penalty, backward, clipping, optimizer.

    A batch is processed in `accumulate` parts, each weighted by its share of the examples, so without batch statistics
    the step equals that of the whole batch.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        training: Training,
        penalty: Callable[[], Tensor] | None = None,
        *,
        hold: Callable[[Optimizer], object] | None = None,
    ) -> None:
        self._model, self._task, self._training, self._penalty = model, task, training, penalty
        self._loss = smoothed(task, training.label_smoothing)
        self._device = device_of(model)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=training.precision == "fp16")
        self.optimizer = make_optimizer(model, training)
        if hold is not None:
            hold(self.optimizer)

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """Take the step; the loss, and the objective with the penalty. If that is not finite, nothing is changed."""
        self.optimizer.zero_grad()
        inputs, targets = inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
        loss = objective = 0.0
        parts = self._training.accumulate
        for x, y in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
            share = len(y) / len(targets)
            part, whole = self._part(x, y, share)
            loss, objective = loss + share * part, objective + whole
            if not math.isfinite(objective):
                return loss, objective
        if self._training.clip is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._training.clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss, objective

    def _part(self, x: Tensor, y: Tensor, share: float) -> tuple[float, float]:
        """Add the gradients of one part, whose loss counts for its share; the loss, and the part of the objective."""
        with autocast(self._device, self._training.precision):
            loss = self._loss(self._task.outputs(self._model, x), y)
        objective = loss if share == 1 else share * loss
        if self._penalty is not None:
            objective = objective + self._penalty()  # 1 / accumulate of the penalty
        found, whole = torch.stack((loss.detach(), objective.detach().to(loss.dtype))).tolist()  # synchronises
        if math.isfinite(whole):
            self._scaler.scale(objective).backward()
        return found, whole


def device_of(model: nn.Module) -> torch.device:
    """That of the model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context in which outputs and losses are computed; penalties are computed outside of it."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, PRECISIONS[precision])


def smoothed(task: Task, label_smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss that is trained on."""
    return partial(F.cross_entropy, label_smoothing=label_smoothing) if label_smoothing else task.loss


class Average:
    r"""A moving average of the parameters: :math:`a \leftarrow d_t a + (1 - d_t) w`.

    With :math:`d_t = \min(d, (1 + t) / (10 + t))` after t steps, so that the start is forgotten. Buffers are the
    model's own: running statistics are averages already.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = [*model.parameters()] if decay else []
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        self._decay, self._steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """Take up the parameters after one more step."""
        self._steps += 1
        share = 1 - min(self._decay, (1 + self._steps) / (10 + self._steps))
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(parameter, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages as the parameters of the model, for the block."""
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)


# --- what a training can be -----------------------------------------------------------------------------

SCHEDULES = ("cosine", "constant", "step", "one-cycle")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_optimizer(model: nn.Module, training: Training) -> Optimizer:
    """The optimizer over all parameters of the model, those of its recipe included.

    Raises:
        UnknownNameError: unknown optimizer.
    """
    values = {name: getattr(training, name) for name in arguments_of(training.optimizer)}
    given = {name: value for name, value in values.items() if value is not None}
    return OPTIMIZERS[training.optimizer](model, **given)


def make_schedule(optimizer: Optimizer, training: Training, steps: int) -> LRScheduler:
    """The learning rate of each step; it is advanced once per step.

    Args:
        steps: of one epoch.
    """
    total, warm = training.epochs * steps, round(training.warm_up * steps)
    left = max(1, total - warm)
    schedule: LRScheduler
    if training.schedule == "one-cycle":
        rates = [group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, rates, total_steps=total + 1, cycle_momentum=False)
    if warm:  # SequentialLR wants the first one made first
        rise = LinearLR(optimizer, 0.01, total_iters=warm)
    if training.schedule == "cosine":
        schedule = CosineAnnealingLR(optimizer, left)
    elif training.schedule == "step":
        schedule = MultiStepLR(optimizer, [left // 2, left * 3 // 4], gamma=0.1)
    else:
        schedule = LambdaLR(optimizer, lambda _: 1.0)
    return SequentialLR(optimizer, [rise, schedule], [warm]) if warm else schedule


# --- data -----------------------------------------------------------------------------------------------


def _smallest(training: Training | None) -> int:
    """Examples that a batch needs: two in each part, because batch normalisation cannot train on one."""
    return 2 * training.accumulate if training else 2


def _steps(task: Task, training: Training) -> int:
    """Batches of one epoch."""
    return task.train.steps(training.batch_size, smallest=min(_smallest(training), training.batch_size))


def batches(
    task: Task, size: int, *, seed: int, epoch: int, training: Training | None = None, workers: int = 0
) -> Iterator[Batch]:
    """The training split in this epoch's order, augmented, in batches of `size`.

    A last batch that is too small for batch normalisation is dropped: one example, or less than two in each part of
    `training.accumulate`. The examples that are dropped change with the epoch.
    """
    smallest = min(_smallest(training), size)
    return task.train.shuffled(size, seed=seed, epoch=epoch, smallest=smallest, augment=task.augment, workers=workers)


def evaluate(model: nn.Module, task: Task, split: Examples, *, workers: int = 0) -> float | None:
    """The task's metric on a split, in evaluation mode and full precision; None if an output is not finite."""
    found = judge(model, task, split, [task.metric], workers=workers)
    return None if found is None else found[task.metric.name]


@torch.no_grad()
def judge(
    model: nn.Module, task: Task, split: Examples, metrics: Sequence[Metric], *, workers: int = 0
) -> dict[str, float] | None:
    """Several metrics on a split, by name, computed on the CPU; None if an output is not finite."""
    model.eval()
    device = device_of(model)
    pairs = [
        (task.outputs(model, inputs.to(device)).cpu(), targets)
        for inputs, targets in split.in_order(_EVALUATION_BATCH, workers=workers)
    ]
    outputs, targets = torch.cat([each for each, _ in pairs]), torch.cat([each for _, each in pairs])
    if not bool(torch.isfinite(outputs).all()):
        return None
    return {metric.name: float(metric.function(outputs, targets)) for metric in metrics}
