"""Build, train and judge one model of a study: what a worker does.

The result depends on the plan and the seed alone.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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

from gonio.errors import InvalidArgumentError, with_place
from gonio.execution import device_of
from gonio.lab.plan import PRECISIONS, AttackConfig, RecipeEntry, StudyPlan, TrainingConfig, installed_versions
from gonio.lab.record import RunRecord, filter_summary
from gonio.lab.running.measures import FinishedRun, spec_of
from gonio.lab.running.robustness import from_text, robustness, to_text, transferable
from gonio.lab.running.tuning import settled
from gonio.lab.tasks.built_in import resolve as resolve_task
from gonio.lab.tasks.metric import Metric
from gonio.lab.tasks.task import Batch, Examples, Task, seed_everything
from gonio.optim.named import OPTIMIZERS, arguments_of
from gonio.recipes import BASELINE, Recipe
from gonio.recipes.apply import Applied
from gonio.seeding import derive_seed
from gonio.surgery import lsuv_

_EVALUATION_BATCH = 512
_NO_SCORE = "no epoch has a finite validation score"


def prepare_process(device: str = "cpu") -> None:
    """Settings under which a result depends on the plan and the seed alone.

    On an accelerator some operations have no deterministic form; they are used as they are, and the last bits of a
    result may differ between two runs.
    """
    torch.set_num_threads(1)  # sums are split by thread, so their last bits depend on the count
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses deterministic algorithms
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    warnings.filterwarnings("ignore", ".* does not have a deterministic implementation", UserWarning)  # at each step
    # else each new tensor is filled first
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def task_of(plan: StudyPlan) -> Task:
    """The plan's task, with the code and the data that the plan was made with, in a process that is prepared for runs.

    Raises:
        InvalidArgumentError: they are others, so the run could not be compared with those of other processes.
    """
    prepare_process(plan.device)
    plan.check_code()
    task = resolve_task(plan.task)
    if task.digest() != plan.data:
        needs = f"every run of a study reads the data that it was planned with, and {plan.task!r} must give them again"
        do = "Restore the files, or start a new study; draw random numbers from generators with a fixed seed alone."
        raise InvalidArgumentError(needs, "other data", do)
    return task


def build(plan: StudyPlan, task: Task, entry: RecipeEntry, seed: int) -> tuple[nn.Module, Applied, str]:
    """The model of one run with its recipe applied, and the recipe's plan as text.

    The model's factory reads generators that depend on the seed alone, and the recipe draws from its
    own, so layers that a recipe does not change start bit-equal to the baseline's. Both draw on the CPU, so a model
    starts with the same numbers on every device.

    Args:
        seed: the run's own, as `plan.seed_of` gives it.
    """
    seed_everything(derive_seed(seed, "model"))
    model = plan.fresh_model(entry, task.sizes)
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
    training: TrainingConfig,
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
    task = task.on(device_of(model))
    step = TrainingStep(model, task, training, penalty, hold=hold)
    average = Average(model, training.ema)
    schedule = make_schedule(step.optimizer, training, steps_of(task, training))
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
    before = [each for each in scores if math.isfinite(each)]  # a metric may be undefined in some epochs
    better = max if task.metric.direction == "max" else min
    if math.isfinite(score) and better(score, *before, score) == score:
        done.best_epoch, done.state = epoch, copy.deepcopy(model.state_dict())
    scores.append(score)


class TrainingStep:
    """One step of training: forward, loss and penalty, backward, clipping, optimizer.

    A batch is processed in `accumulate` parts, each weighted by its share of the examples, so without batch statistics
    the step equals that of the whole batch.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        training: TrainingConfig,
        penalty: Callable[[], Tensor] | None = None,
        *,
        hold: Callable[[Optimizer], object] | None = None,
    ) -> None:
        self._model, self._task, self._training, self._penalty = model, task, training, penalty
        if training.channels_last:
            _channels_last(model)
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


def _channels_last(model: nn.Module) -> None:
    """Store the filters of two-dimensional convolutions with the channels side by side; outputs follow them.

    `Module.to(memory_format=)` refuses a model that has filters of three-dimensional convolutions as well.
    """
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


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
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)


def make_optimizer(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """The optimizer over all parameters of the model, those of its recipe included.

    Raises:
        UnknownNameError: unknown optimizer.
    """
    values = {name: getattr(training, name) for name in arguments_of(training.optimizer)}
    given = {name: value for name, value in values.items() if value is not None}
    return OPTIMIZERS[training.optimizer](model, **given)


def make_schedule(optimizer: Optimizer, training: TrainingConfig, steps: int) -> LRScheduler:
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


def _smallest(training: TrainingConfig | None) -> int:
    """Examples that a batch needs: two in each part, because batch normalisation cannot train on one."""
    return 2 * training.accumulate if training else 2


def steps_of(task: Task, training: TrainingConfig) -> int:
    """Batches of one epoch."""
    return task.train.steps(training.batch_size, smallest=min(_smallest(training), training.batch_size))


def batches(
    task: Task, size: int, *, seed: int, epoch: int, training: TrainingConfig | None = None, workers: int = 0
) -> Iterator[Batch]:
    """The training split in this epoch's order, augmented, in batches of `size`.

    A last batch that is too small for batch normalisation is dropped: one example, or less than two in each part of
    `training.accumulate`. The examples that are dropped change with the epoch.
    """
    smallest = min(_smallest(training), size)
    return task.train.shuffled(size, seed=seed, epoch=epoch, smallest=smallest, augment=task.augment, workers=workers)


def evaluate(model: nn.Module, task: Task, split: Examples, *, workers: int = 0) -> float | None:
    """The task's metric on a split, in evaluation mode and full precision; None if an output is not finite."""
    found = metrics_on(model, task, split, [task.metric], workers=workers)
    return None if found is None else found[task.metric.name]


@torch.no_grad()
def metrics_on(
    model: nn.Module, task: Task, split: Examples, metrics: Sequence[Metric], *, workers: int = 0
) -> dict[str, float] | None:
    """Several metrics on a split, by name, computed on the CPU; None if an output is not finite."""
    model.eval()
    device = device_of(model)
    pairs = [
        (task.outputs(model, inputs.to(device, copy=True)).cpu(), targets.cpu())  # a model may change them in place
        for inputs, targets in split.in_order(_EVALUATION_BATCH, workers=workers)
    ]
    outputs, targets = torch.cat([each for each, _ in pairs]), torch.cat([each for _, each in pairs])
    if not bool(torch.isfinite(outputs).all()):
        return None
    # one that changes its outputs in place must not change those of the next
    return {m.name: m.value(outputs.clone() if len(metrics) > 1 else outputs, targets) for m in metrics}


# --- one call of a worker -------------------------------------------------------------------------------


def execute_run(
    plan: StudyPlan,
    entry: RecipeEntry,
    seed: int,
    settings: Mapping[str, float] | None = None,
    transferred: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build, train and judge one run. Meant for a process of its own: it seeds the global generators.

    Args:
        settings: tuned values of the recipe.
        transferred: examples that mislead another model, as :func:`to_text` writes them.
    """
    record = RunRecord(entry.name, seed, "failed", settings=settings or {})

    def run() -> RunRecord:
        tuned, changed = settled(plan, entry, record.settings)
        if plan.measure is not None and spec_of(plan.measure).start:
            return _measured(tuned, changed, *_untrained(tuned, changed, record))
        model, task, done, ended = _trained(tuned, changed, record)
        judged = ended if done.diverged else _judged(ended, done, model, task, plan.workers)
        if plan.threat is not None and judged.status == "finished":
            moved = from_text(transferred) if transferred else None
            judged = replace(judged, robustness=robustness(model, task, plan.threat, moved))
        return _measured(tuned, changed, model, task, judged)

    return guarded(record, run)


def execute_trial(plan: StudyPlan, entry: RecipeEntry, seed: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Build and train with other values; the score is the best of the validation split, the test split is not used."""
    record = RunRecord(entry.name, seed, "failed", settings=values)

    def once(number: int) -> RunRecord:
        _, _, done, ended = _trained(*settled(plan, entry, values), replace(record, seed=seed + number))
        scores = [score for score in done.curve["val_score"] if math.isfinite(score)]
        if ended.error or not scores:
            return replace(ended, seed=seed, plan="", error=ended.error or _NO_SCORE)
        best = (max if plan.direction == "max" else min)(scores)
        return replace(ended, seed=seed, status="finished", score=best, best_epoch=done.best_epoch, plan="")

    def trial() -> RunRecord:
        first, *others = [once(number) for number in range(plan.tuning.repeats if plan.tuning else 1)]
        if lost := next((each for each in (first, *others) if each.score is None), None):
            return lost
        return replace(first, score=statistics.fmean(each.score or 0.0 for each in (first, *others)))

    return guarded(record, trial)


def execute_transfer(plan: StudyPlan, config: AttackConfig) -> dict[str, Any]:
    """Examples that mislead another baseline, as the record's `robustness`."""
    record = RunRecord(BASELINE, config.seed, "failed")

    def attack() -> RunRecord:
        model, task, _, ended = _trained(plan, plan.baseline, record)
        if ended.error:
            return ended
        return replace(record, status="finished", robustness=to_text(transferable(model, task, config)))

    return guarded(record, attack)


def guarded(record: RunRecord, function: Callable[[], RunRecord]) -> dict[str, Any]:
    """The function's record, or the failed record with its exception; with the versions of this machine."""
    started = time.process_time()
    try:
        record = function()
    except (Exception, SystemExit) as error:  # an exception of a user's model or a recipe concerns this run only
        record = replace(record, error=with_place(error))
    record = replace(record, seconds=time.process_time() - started)
    return {"record": record.to_dict(), "versions": dict(installed_versions())}


def _trained(plan: StudyPlan, entry: RecipeEntry, record: RunRecord) -> tuple[nn.Module, Task, Fit, RunRecord]:
    """The model after its last epoch, and the record so far: status `diverged`, with an error only if it did."""
    task = task_of(plan)
    own_seed = plan.seed_of(entry, record.seed)
    model, applied, text = build(plan, task, entry, own_seed)
    seed_everything(derive_seed(own_seed, "train"))  # a recipe or model may have drawn any amount before
    training, penalty, hold = plan.training_of(entry), applied.penalty, applied.hold_
    done = fit(model, task, training=training, seed=own_seed, penalty=penalty, hold=hold, workers=plan.workers)
    curve = {key: [value if math.isfinite(value) else None for value in values] for key, values in done.curve.items()}
    return model, task, done, replace(record, status="diverged", curve=curve, plan=text, error=done.diverged)


def _judged(record: RunRecord, done: Fit, model: nn.Module, task: Task, workers: int) -> RunRecord:
    """The record with the test score of the epoch that the validation split chose."""
    if done.state is None:
        return replace(record, error=_NO_SCORE)
    model.load_state_dict(done.state)
    found = metrics_on(model, task, task.test, [task.metric, *task.metrics], workers=workers)
    if found is None:
        return replace(record, error="outputs on the test split are not finite")
    score = found.pop(task.metric.name)
    if not math.isfinite(score):
        return replace(record, error=f"its {task.metric.name} on the test split is {score}")
    shown = {name: value if math.isfinite(value) else None for name, value in found.items()}
    geometry = filter_summary(model)
    return replace(record, status="finished", score=score, best_epoch=done.best_epoch, geometry=geometry, metrics=shown)


def _untrained(plan: StudyPlan, entry: RecipeEntry, record: RunRecord) -> tuple[nn.Module, Task, RunRecord]:
    """The model as it starts, and a record without a score."""
    task = task_of(plan)
    model, _, text = build(plan, task, entry, plan.seed_of(entry, record.seed))
    model.eval()
    return model, task, replace(record, status="finished", plan=text, geometry=filter_summary(model))


def _measured(plan: StudyPlan, entry: RecipeEntry, model: nn.Module, task: Task, record: RunRecord) -> RunRecord:
    """The record with the number of the plan's measure, taken on the CPU, as its score, if the plan has a measure."""
    if plan.measure is None or record.status != "finished":
        return record
    measure = replace(plan.measure, options={**plan.measure.options, **entry.setting.get("measure", {})})
    seed = plan.seed_of(entry, record.seed)
    run = FinishedRun(model.cpu(), task, plan.training_of(entry), seed, record.curve, record.robustness)
    score = spec_of(measure).function(run, **measure.options)
    if not math.isfinite(score):
        return replace(record, status="diverged", score=None, error=f"its {measure.name} is {score}")
    reached = {} if record.score is None else {task.metric.name: record.score}  # what the measure stands in for
    return replace(record, score=float(score), metrics={**record.metrics, **reached})
