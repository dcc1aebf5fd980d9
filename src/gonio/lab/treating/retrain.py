"""`retrain_`: train chosen layers alone for a short time, on the training data of a task."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio import init
from gonio.editing.edit import Edit, Edited
from gonio.editing.twin import copy_of
from gonio.editing.where import Site, Where, left_out, modules_at, refuse_shards, select
from gonio.errors import GonioError, InvalidArgumentError, NotApplicableError
from gonio.execution import device_of
from gonio.geometry import layout_of, matrix_view, unview
from gonio.lab.plan import TrainingConfig
from gonio.lab.running.training import TrainingStep, batches, evaluate, make_schedule, steps_of
from gonio.lab.tasks.task import Batch, Split, Task, seeded
from gonio.lab.treating.inputs import check_takes
from gonio.messages import say
from gonio.seeding import derive_seed
from gonio.surgery import init_, match_statistics_
from gonio.surgery.facts import WEIGHTED, facts_of
from gonio.surgery.recycle import can_act as has_filters

_DEAD = 1e-3  # of the median norm of a layer's filters
_BATCH, _MEASURED = 64, 64  # size and number of the batches that give the scale of new filters, scores and losses
STARTS = (say("its present values"), say("its present weights and the bias 0"), say("new values"))


def retrain_(
    model: nn.Module, task: Task, *, where: Where, epochs: int = 12, lr: float = 2e-2, seed: int = 0
) -> Edited:
    """Train the parameters of chosen layers alone on a task's training data, everything else frozen.

    The model stays in evaluation mode: running statistics do not change, and dropout is off. The layers are trained by
    AdamW without decay, with a cosine schedule, for a tenth of the epochs from each of three starts, at `lr` and at a
    quarter of it: their present values, with filters that are 0 (or below 1/1000 of the median norm) drawn anew; the
    same with the bias 0; and new values (:func:`gonio.init.he_`, with the scale that a batch norm behind the layer
    stores, if there is one; gain 1 and shift 0 for a norm). The start and the rate with the lowest loss on the training
    data are kept for the remaining epochs, unless none has a better score on the training data than the model had, by
    `task.sesoi`. Validation and test data are not used.

    What the layers had learnt is not restored: they learn anew what the frozen rest of the model can use.

    Args:
        where: which layers; those without parameters of their own are left out.
        epochs, lr: of the training; the batch size is that of `task.training`.
        seed: of the new values and of the order of the examples.

    Raises:
        InvalidArgumentError: if `epochs` is below 1, `lr` is not above 0, or the model does not take the task's inputs.
        NoMatchError: if `where` selects no layer with parameters.
        NotApplicableError: if no start gives a finite loss, if none is promising, or if the model is sharded.

    Example:
        >>> task = gonio.lab.tasks.digits()
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> edited = gonio.lab.retrain_(model, task, where="1", epochs=1)
        >>> [change.path for change in edited.changes]
        ['1']
    """
    if epochs < 1 or not 0 < lr < float("inf"):
        found = f"epochs={epochs}, lr={lr}"
        raise InvalidArgumentError("retrain_ needs epochs >= 1 and lr > 0", found, "Leave them out.")
    chosen = select(model, where, verb="retrain_", can_act=can_act)
    refuse_shards(model, "retrain_")
    check_takes(model, task)
    first, size = max(1, epochs // 10), task.training.batch_size
    rates = [
        TrainingConfig(epochs=first, batch_size=size, lr=rate, optimizer="adamw", weight_decay=0.0)
        for rate in (lr, lr / 4)
    ]
    paths = [site.path for site in chosen]
    tried = []
    for name, start in _starts(model, chosen, task, seed):
        for training in rates:
            twin = copy_of(start)
            tried.append((_trained(twin, paths, task, training, seed), name, training, twin))
    loss, name, training, twin = min(tried, key=lambda each: each[0])
    refuse = partial(NotApplicableError, "retrain_", paths[0], action="train")
    if not math.isfinite(loss):
        raise refuse("no start of the training gives a finite loss", "Treat the other layers first.")
    before, after = (_score(each, task) for each in (model, twin))
    sign = 1 if task.metric.direction == "max" else -1
    if before is not None and (after is None or sign * (after - before) < task.sesoi):
        raise refuse("its training does not improve the score on the training data", "Leave it as it is.")
    if epochs > training.epochs:
        loss = _trained(twin, paths, task, replace(training, epochs=epochs - training.epochs), seed + 1)
    trained = modules_at(twin)
    with Edit(model, "retrain_") as edit, torch.no_grad():
        for site in chosen:
            for own, parameter in site.module.named_parameters(recurse=False):
                edit.set_data_(parameter, trained[site.path].get_parameter(own))
            edit.changed(site.path, say("trained for {epochs} epochs from {start}", epochs=epochs, start=name))
        edit.note(say("training loss {loss:.3g}; everything else was frozen", loss=loss))
        edit.note_stays(left_out(model, where, can_act=can_act))
    return edit.done()


def can_act(module: nn.Module) -> str | None:
    """Why :func:`retrain_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.lab.treating.retrain import can_act
        >>> can_act(nn.Linear(2, 2)), can_act(nn.ReLU())
        (None, 'it has no parameters of its own')
    """
    own = [p for p in module._parameters.values() if p is not None]
    if any(is_lazy(p) for p in own):
        return say("it is lazy; run one batch first")
    own = [p for p in own if p.is_floating_point()]
    if not own:
        return say("it has no parameters of its own")
    return say("its parameters are on the meta device") if any(p.is_meta for p in own) else None


def _starts(model: nn.Module, chosen: list[Site], task: Task, seed: int) -> Iterator[tuple[str, nn.Module]]:
    """Copies of the model in evaluation mode with the values from which the layers are trained."""
    drawn = _drawn(model, [site.path for site in chosen], task, seed)
    new = modules_at(drawn)
    for name in STARTS[:2]:
        twin, differs = copy_of(model).eval(), name == STARTS[0]
        modules = modules_at(twin)
        for site in chosen:
            module = modules[site.path]
            bias = module._parameters.get("bias")
            if name == STARTS[1] and isinstance(module, WEIGHTED) and bias is not None:
                differs = differs or bool(bias.any())
                bias.detach().zero_()
            if has_filters(module) is None:
                _revive(module, new[site.path])
        if differs:
            yield name, twin
    yield STARTS[2], drawn


@torch.no_grad()
def _drawn(model: nn.Module, paths: list[str], task: Task, seed: int) -> nn.Module:
    """A copy with new values in these layers, as far as a law of initialisation is known for them."""
    twin = copy_of(model).eval()
    modules = modules_at(twin)
    filters = [path for path in paths if has_filters(modules[path]) is None]
    for path in paths:
        module = modules[path]
        if bool(facts_of(module).removes_scale):
            for name, value in (("weight", 1.0), ("bias", 0.0)):
                if module._parameters.get(name) is not None:
                    module.get_parameter(name).fill_(value)
    if filters:
        init_(twin, init.he_, where=is_in(filters), seed=seed)
        inputs = (task.outputs(lambda x: x, x) for x, _ in first_batches(task))
        with suppress(GonioError):  # no batch norm is behind them: the law's scale stays
            match_statistics_(twin, inputs, where=is_in(filters))
    return twin


def is_in(paths: Collection[str]) -> Where:
    """A selector of these layers."""
    return lambda path, _: path in paths


@torch.no_grad()
def _revive(module: nn.Module, drawn: nn.Module) -> None:
    """Put the new filters in the place of those that are 0 or next to it."""
    weight, layout = module.get_parameter("weight"), layout_of(module)
    rows, new = (matrix_view(each.detach(), layout) for each in (weight, drawn.get_parameter("weight")))
    norms = rows.norm(dim=2, keepdim=True)
    known = norms[norms > 0]
    dead = norms < _DEAD * known.median() if len(known) else norms == 0
    weight.copy_(unview(torch.where(dead, new, rows), weight.shape, layout))


def _trained(model: nn.Module, paths: list[str], task: Task, training: TrainingConfig, seed: int) -> float:
    """Train these layers in place; the loss on the training data then, infinite if a loss was not finite."""
    modules = modules_at(model)
    own = {id(p) for path in paths for p in modules[path].parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in own)
    step = TrainingStep(model, task, training)
    schedule = make_schedule(step.optimizer, training, steps_of(task, training))
    with torch.enable_grad(), seeded(derive_seed(seed, "retrain")):
        for epoch in range(training.epochs):
            for batch in batches(task, training.batch_size, seed=seed, epoch=epoch, training=training):
                if not math.isfinite(step(*batch)[1]):
                    return math.inf
                schedule.step()
        last = batches(task, training.batch_size, seed=seed, epoch=training.epochs, training=training)
        return mean_loss(model, task, last)


def _score(model: nn.Module, task: Task) -> float | None:
    """The metric on the first training examples; None if an output is not finite."""
    inputs, targets = zip(*first_batches(task), strict=True)
    return evaluate(copy_of(model), task, Split(torch.cat(inputs), torch.cat(targets)))


def first_batches(task: Task) -> Iterator[Batch]:
    """Up to 4096 training examples."""
    return islice(task.train.in_order(_BATCH), _MEASURED)


@torch.no_grad()
def mean_loss(model: nn.Module, task: Task, examples: Iterable[Batch]) -> float:
    """The mean loss on batches of examples; infinite if it is not finite."""
    device = device_of(model)
    total, count = 0.0, 0
    for inputs, targets in examples:
        loss: Tensor = task.loss(task.outputs(model, inputs.to(device)), targets.to(device))
        total, count = total + float(loss) * len(targets), count + len(targets)
    return total / count if math.isfinite(total) else math.inf
