"""`doctor`: measure, prescribe, apply on a copy, measure again, prove, and keep or undo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import nn

from gonio.editing.edit import Edited
from gonio.errors import GonioError, InvalidArgumentError
from gonio.lab.judging.statistics import compared
from gonio.lab.running.robustness import device_of
from gonio.lab.tasks import resolve
from gonio.lab.tasks.task import Task
from gonio.lab.treating.treatment import Step, Treatment
from gonio.measuring import Finding, Measurements, measure
from gonio.measuring.findings.prescriptions import Prescription, prescriptions
from gonio.measuring.findings.rules import stale, trained_without_statistics, worst_first
from gonio.surgery import balance_, calibrate_, equivalent, recycle_, shrink_intruders_
from gonio.surgery.calibrate import can_act

SAME = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative deviations that count as the same function
_OTHERWISE = 5e-2  # of dtypes with less precision
_BATCH = 64  # training inputs that are measured and run at a time
_ORDER = ("calibrate_", "recycle_", "shrink_intruders_", "balance_")  # statistics before weights, scales last
_BLOCK = 16  # held-out examples whose score is one of the pairs


def doctor(
    source: Any, *, task: Task | str | None = None, batch: Any = None, base: Any = None, apply_unproven: bool = False
) -> Treatment:
    """Treat the findings of a model on a copy, and keep what is proved to help and to do no harm.

    The model is measured. For each finding whose rule has a prescription (`gonio.measuring.explain(code)` shows it),
    the verb is applied to a copy of the model, which is measured again. The change is kept if

    1. fewer of the treated findings remain, and no warning or error is new; and
    2. it is proved. Verbs that promise the same function (`balance_`, `recycle_`) are proved by equal outputs on an
       example; others (`calibrate_`, `shrink_intruders_`) by the task. First non-inferiority: the 95 % interval of the
       mean difference of the metric, over pairs of scores of blocks of 16 validation examples, lies above
       −`task.sesoi`, or the scores were not finite before. Then improvement, which is stated and not required: it lies
       above 0. The test split is not used.

    Running statistics are first measured anew in the layers alone that the findings name, then in all.
    Everything else is undone, with the reason. The given model is not changed.

    Args:
        source: a model; or a file or state dict, for which treatments are only named.
        task: a :class:`gonio.lab.Task` or its name; its training inputs are measured and calibrated on, as they are
            without augmentation.
        batch: an input of the model, instead of the task's training inputs.
        base: the model that this one was fine-tuned from, or its state dict: then the change is judged too.
        apply_unproven: keep a change that could be neither proved nor refuted for lack of a task.

    Returns:
        :class:`gonio.lab.Treatment`: printable; `.model`, `.undo_()`, `.recipe`, `.page(path)`.

    Raises:
        InvalidArgumentError: if a task, a batch or a base is given without a model.
        GonioError: as :func:`gonio.measure`.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.mul_(1000), model[0].bias.mul_(1000), model[2].weight.div_(1000)
        >>> treated = gonio.doctor(model, batch=torch.randn(32, 16))
        >>> [finding.code for finding in treated.before.findings], treated.after.findings
        (['G409'], ())
        >>> treated.kept[0].verb, treated.kept[0].proved
        ('balance_', True)
    """
    data = resolve(task) if isinstance(task, str) else task
    if not isinstance(source, nn.Module):
        if data is not None or batch is not None or base is not None:
            asked = "doctor() runs a model on a task or a batch, and compares it with a base"
            raise InvalidArgumentError(asked, type(source).__name__, "Pass the model.")
        found = measure(source)
        return _reported(found)
    model = copy.deepcopy(source)
    inputs = _Inputs(data, batch, base)
    before = found = inputs.measured(model)
    steps: list[Step] = []
    edits: list[Edited] = []
    for otherwise in (False, True):
        for prescription, treats in _prescribed(found, model, otherwise=otherwise)[0]:
            step, edit, found = _tried(model, prescription, treats, found, inputs, apply_unproven)
            steps.append(step)
            edits += [edit] if edit is not None else []
    untreated = _prescribed(found, model)[1]  # what only followed from a treated finding is gone
    return Treatment(before.source, before, found, tuple(steps), untreated, model, tuple(edits))


@dataclass(frozen=True)
class _Inputs:
    """What the model runs on."""

    task: Task | None
    batch: Any
    base: Any = None

    def measured(self, model: nn.Module) -> Measurements:
        """The model, and what has changed since its base."""
        found = measure(model, batch=self.example)
        if self.base is None:
            return found
        return replace(found, findings=worst_first([*found.findings, *measure(self.base, model).findings]))

    @property
    def example(self) -> Any:
        """The batch to measure with; None if there is none."""
        return self.batch if self.batch is not None or self.task is None else next(self.training())

    def training(self) -> Iterator[Any]:
        """Training inputs as the model gets them: the task's, otherwise the batch."""
        if self.task is None:
            yield from () if self.batch is None else (self.batch,)
            return
        for inputs, _ in self.task.train.in_order(_BATCH):
            yield self.task.outputs(lambda x: x, inputs)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> list[float]:
        """The task's metric on blocks of validation examples; NaN where an output is not finite."""
        if self.task is None:
            return []
        made, twin = [], copy.deepcopy(model).eval()
        device = device_of(twin)
        for inputs, targets in self.task.validation.in_order(_BLOCK):
            outputs = self.task.outputs(twin, inputs.to(device)).cpu()
            finite = bool(torch.isfinite(outputs).all())
            made.append(float(self.task.metric.function(outputs, targets)) if finite else float("nan"))
        return made


Planned = list[tuple[Prescription, list[Finding]]]


def _prescribed(
    found: Measurements, model: nn.Module | None, *, otherwise: bool = False
) -> tuple[Planned, tuple[tuple[Finding, str], ...]]:
    """Findings by treatment, in the order of treatments; and the findings without one, with the reason."""
    treated: dict[tuple[str, str], tuple[Prescription, list[Finding]]] = {}
    untreated: list[tuple[Finding, str]] = []
    statistics = _statistics(model)
    for finding in found.findings:
        prescription = prescriptions()[finding.code]
        if prescription.none:
            untreated.append((finding, prescription.none))
            continue
        if prescription.buffers and finding.path not in statistics:
            untreated.append((finding, prescription.cannot))
            continue
        chosen = prescription.otherwise if otherwise else prescription
        if chosen is not None:
            treated.setdefault((chosen.verb, str(chosen.options)), (chosen, []))[1].append(finding)
    return sorted(treated.values(), key=lambda each: _ORDER.index(each[0].verb)), tuple(untreated)


def _statistics(model: nn.Module | None) -> set[str]:
    """The paths of the running statistics that `calibrate_` measures."""
    layers = [] if model is None else [(path, m) for path, m in model.named_modules() if can_act(m) is None]
    return {f"{path}.{name}".removeprefix(".") for path, _ in layers for name in ("running_mean", "running_var")}


def _reported(found: Measurements) -> Treatment:
    """The treatments of a source without modules, none of which can be applied."""
    plan, untreated = _prescribed(found, None)
    why = "it takes the model's modules: pass the model of the checkpoint (on the command line --model)"
    steps = [Step(p.verb, dict(p.options), _codes(treats), "not applied", why, cannot=p.cannot) for p, treats in plan]
    return Treatment(found.source, found, found, tuple(steps), untreated)


def _codes(findings: list[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(finding.code for finding in findings))


def _tried(
    model: nn.Module, prescription: Prescription, treats: list[Finding], before: Measurements, inputs: _Inputs,
    apply_unproven: bool,
) -> tuple[Step, Edited | None, Measurements]:  # fmt: skip
    """One treatment: the step, its edit if it was kept, and the measurements that hold then."""

    def step(verdict: str, proof: str, proved: bool = False) -> Step:
        return Step(prescription.verb, options, _codes(treats), verdict, proof, proved, prescription.cannot)

    options: dict[str, Any] = dict(prescription.options)
    exact = prescription.proof == "same function"
    if not exact and inputs.task is None and not (apply_unproven and inputs.batch is not None):
        why = "not provable without data: pass a task, or a batch with apply_unproven"
        return step("not applied", why), None, before
    untreated, scores = copy.deepcopy(model), [] if exact else inputs.scores(model)
    tried = step("not applied", "")
    for paths in _scopes(prescription, treats, before, model):
        options = dict(prescription.options) | ({"where": paths} if paths else {})
        try:
            edit = _VERBS[prescription.verb](model, inputs, options)
        except GonioError as error:
            tried = step("not applied", f"refused: {error}")
            continue
        after = inputs.measured(model)
        harm = _no_help(before, after, treats)
        proved, proof = (None, harm) if harm else _same(untreated, model, inputs) if exact else _held_out(
            scores, inputs.scores(model), inputs.task
        )  # fmt: skip
        if proved or (proved is None and not harm and apply_unproven):
            return step("kept", proof, bool(proved)), edit, after
        edit.undo_()
        tried = step("undone", proof)
    return tried, None, before


def _scopes(
    prescription: Prescription, treats: list[Finding], found: Measurements, model: nn.Module
) -> list[list[str]]:
    """The layers on which a verb is tried, one list after the other; an empty list for all of them."""
    if prescription.verb == "balance_":
        return [[]]
    if prescription.verb != "calibrate_":
        return [list(dict.fromkeys(finding.path for finding in treats))]
    layers = [path for path, module in model.named_modules() if can_act(module) is None]
    named = {finding.path.rpartition(".")[0] for finding in treats if finding.path}
    named |= {path for path in layers if trained_without_statistics(model.get_submodule(path))}
    gaps = [signal for signal in found.signals if signal.path in layers and stale(signal)]
    first = {gaps[0].path} if gaps else set()  # what follows may be a consequence
    chosen = [path for path in layers if path in named | first]
    return [*([chosen] if chosen and len(chosen) < len(layers) else []), []]


def _where(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call, with the paths as a selector."""
    paths = options.get("where")
    return dict(options) | ({"where": lambda path, _: path in paths} if paths else {})


_VERBS: dict[str, Callable[[nn.Module, _Inputs, dict[str, Any]], Edited]] = {
    "balance_": lambda model, inputs, options: balance_(model, example=inputs.example, **options),
    "calibrate_": lambda model, inputs, options: calibrate_(model, inputs.training(), **_where(options)),
    "recycle_": lambda model, inputs, options: recycle_(model, example=inputs.example, **_where(options)),
    "shrink_intruders_": lambda model, inputs, options: shrink_intruders_(model, inputs.base, **_where(options)),
}


def _no_help(before: Measurements, after: Measurements, treats: list[Finding]) -> str:
    """Why a change did not help; empty if it did."""
    left = {(finding.code, finding.path) for finding in after.findings}
    known = {(finding.code, finding.path) for finding in before.findings}
    new = sorted({f.code for f in after.findings if f.level != "info" and (f.code, f.path) not in known})
    if new:
        return f"it causes other findings: {', '.join(new)}"
    if all((finding.code, finding.path) in left for finding in treats):
        return "the findings remain after it"
    return ""


def _same(before: nn.Module, after: nn.Module, inputs: _Inputs) -> tuple[bool | None, str]:
    """Whether two models compute the same function on an example; None if none can be made."""
    try:
        moved = equivalent(before, after, example=inputs.example)
    except GonioError as error:
        return None, f"the outputs could not be compared: {error}"
    dtypes = [p.dtype for p in after.parameters() if p.is_floating_point()]
    allowed = max((SAME.get(dtype, _OTHERWISE) for dtype in dtypes), default=SAME[torch.float32])
    return moved.relative <= allowed, f"outputs before and after: {moved}"


def _held_out(before: list[float], after: list[float], task: Task | None) -> tuple[bool | None, str]:
    """Whether the held-out score is not worse by the task's smallest effect of interest; None without a task."""
    if task is None:
        return None, "not proved: there was no task; kept because it was asked for"
    if not all(map(isfinite, after)):
        return False, f"outputs on {task.name} are not finite after it"
    if not all(map(isfinite, before)):
        return True, f"outputs on {task.name} were not finite before, and are after it"
    sign = 1 if task.metric.direction == "max" else -1
    seen = compared([sign * (b - a) for a, b in zip(before, after, strict=True)], task.sesoi)
    if seen is None:
        return None, f"{task.name} has too few validation examples for a proof"
    verdict, mean, low, high = seen
    unit = f" {task.metric.unit}".rstrip()
    interval = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]{unit}"
    proof = f"{verdict}: {task.metric.name} on held-out {task.name}: {interval}, margin {task.sesoi:g}"
    return verdict in ("improved", "not inferior"), proof
