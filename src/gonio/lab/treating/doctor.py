"""`doctor`: measure, prescribe, apply on a copy, measure again, prove, and keep or undo."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from gonio.editing.edit import Edited
from gonio.editing.twin import copy_of, left_alone
from gonio.editing.where import modules_at
from gonio.errors import GonioError, InvalidArgumentError, NotApplicableError
from gonio.lab.judging.results import Results
from gonio.lab.tasks import resolve
from gonio.lab.tasks.task import Task
from gonio.lab.treating.inputs import Inputs, check_takes
from gonio.lab.treating.proof import held_out, not_finite, same_function, scores, study_of
from gonio.lab.treating.retrain import first_batches, is_in, mean_loss, retrain_
from gonio.lab.treating.suspects import calibrated_layers, statistics_of, suspects
from gonio.lab.treating.treatment import Treatment, TreatmentStep
from gonio.measuring import Finding, Measurements, measure
from gonio.measuring.findings.remedies import Remedy
from gonio.measuring.findings.rules import rule_texts
from gonio.messages import fixed, said_by, say
from gonio.surgery import (
    balance_,
    calibrate_,
    even_out,
    even_out_,
    match_statistics_,
    recycle,
    recycle_,
    shrink_change_,
    shrink_intruders_,
)

_MEASURED = 64  # batches that tell the scale of a layer
_RETRAINED = 4  # layers at most
_FACTORS = tuple(2.0**-octave for octave in range(11))  # of a change that is made smaller
_NOTES = 3  # of a verb, that a reason quotes
# What the model still knows comes first, then guesses; then new training of layers that findings name, as long as the
# statistics behind them are the old ones, and of others after new statistics. Verbs that keep the function come last,
# because they would hide where a damage is.
_ORDER = (
    "match_statistics_", "shrink_change_", "shrink_intruders_", "even_out_", "retrain_ named", "calibrate_", "retrain_",
    "balance_", "recycle_",
)  # fmt: skip
# New statistics of a damaged layer are a damage behind it; what learns to fit them cannot become what it was.
_TRAINING_FIRST = tuple({"calibrate_": "retrain_", "retrain_": "calibrate_"}.get(verb, verb) for verb in _ORDER)
_HIDING = ("calibrate_", "even_out_")  # new statistics and guesses end findings that are not wholly repaired
_PLACES = {verb: place for place, verb in enumerate(_ORDER)}
UNPROVABLE = say("not provable without data: pass a task, or a batch of training inputs with apply_unproven=True")
NEEDS_TASK = say("not provable without data: pass a task, whose training data it takes")
NO_DATA = say(
    "refused: it averages over data, and the batch is random numbers; pass a task, or a batch of training inputs"
)
NO_EVIDENCE = say(
    "refused: its findings are of outputs on random numbers; pass a task, or a batch of training inputs to see whether "
    "they are there on data"
)
NO_MODULES = say("it takes the model's modules: pass the model of the checkpoint")


def doctor(
    source: Any, *, task: Task | str | None = None, batch: Any = None, base: Any = None, apply_unproven: bool = False
) -> Treatment:
    """Treat the findings of a model on a copy, and keep what is proved to help and to do no harm.

    The model is measured. For each finding whose rule has a prescription (`gonio.measuring.explain(code)` shows it),
    its verbs are applied to a copy of the model, one after the other, each only if the finding is still there; the copy
    is measured again. A change is kept if no error is new, nor a warning if it need not improve the score, and if it is
    proved:

    1. Verbs that promise the same function (`balance_`, `recycle_`) are proved by equal outputs on an example, and at
       least one of the treated findings must be gone.
    2. Others by the task: a study (:class:`gonio.lab.Results`, the step's `results`) compares the treated model with
       the untreated one in pairs of scores of up to 20 blocks of validation examples. First non-inferiority: the 95 %
       interval of the mean difference of the metric lies above −`task.sesoi`. Then improvement: it lies above 0.
       Guesses (`even_out_`), new training (`retrain_`) and a smaller change (`shrink_change_`, by the power of 1/2 that
       the training data prefer) are kept only if they improve the score. The test split is not used.

    What the model still knows is tried first (`match_statistics_`), then guesses, then statistics, then `retrain_` of
    one named layer after the other on the task's training data, which is also tried where guesses or new statistics
    have ended a finding, because they can hide a damage; verbs that keep the function come last. Running statistics are
    first measured anew in the layers alone that the findings name, then in all. If a layer was then trained with them,
    training with the old statistics is tried as well, and kept if its validation score is better by `task.sesoi`.
    Everything else is undone, with the reason. The given model is not changed.

    Args:
        source: a model; or a file or state dict, for which treatments are only named.
        task: a :class:`gonio.lab.Task` or its name; its training inputs are measured and calibrated on, as they are
            without augmentation.
        batch: an input of the model, instead of the task's training inputs; or a
            :class:`gonio.seeding.RandomInput`, whose values are no data: then findings that compare the batch with the
            training data (G410) do not count, nothing is averaged over it, and nothing that only its outputs show is
            treated without a task, except by verbs that keep the function.
        base: the model that this one was fine-tuned from, or its state dict: then the change is judged too.
        apply_unproven: keep a change that could be neither proved nor refuted for lack of a task.

    Returns:
        :class:`gonio.lab.Treatment`: printable; `.model`, `.undo_()`, `.recipe`, `.page(path)`.

    Raises:
        InvalidArgumentError: if a task, a batch or a base is given without a model, or inputs that the model does not
            take.
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
        return _reported(measure(source))
    if data is not None:
        check_takes(source, data)
    inputs = Inputs(data, batch, base)
    case = _Case(source, inputs, apply_unproven).treated(_ORDER)
    if data is not None and case.trained_with_new_statistics:
        other = _Case(source, inputs, apply_unproven).treated(_TRAINING_FIRST)
        case = other if other.score(data) >= case.score(data) + data.sesoi else case
    return case.result()


Planned = list[tuple[Remedy, list[Finding]]]
_Key = tuple[str, str]


def _key(finding: Finding) -> _Key:
    return finding.code, finding.path


def _keys(findings: Iterable[Finding]) -> set[_Key]:
    return set(map(_key, findings))


class _Case:
    """One model under treatment: its copy, what is found in it now, and the steps so far."""

    def __init__(self, model: nn.Module, inputs: Inputs, apply_unproven: bool) -> None:
        self.given, self.model = model, copy_of(model)
        self.inputs, self.apply_unproven = inputs, apply_unproven
        with left_alone(model):
            whole = inputs.measured(self.model)
        self.notes = inputs.notes(whole)
        self.before = self.found = inputs.counted(whole)
        self.steps: list[tuple[TreatmentStep, list[Finding]]] = []
        self.edits: list[Edited] = []
        self._scores: list[float | None] = []
        self._retrained: set[tuple[str, int]] = set()  # layers, with the number of edits before

    def treated(self, order: Iterable[str]) -> _Case:
        """The case after all remedies, in this order of their verbs."""
        for verb in order:
            for remedy, treats in self.planned(verb):
                self.treat(remedy, treats)
        return self

    @property
    def trained_with_new_statistics(self) -> bool:
        """Whether a layer was trained after running statistics had been measured anew."""
        verbs = [step.verb for step, _ in self.steps if step.verdict == "kept"]
        return "calibrate_" in verbs and "retrain_" in verbs[verbs.index("calibrate_") :]

    def score(self, task: Task) -> float:
        """The mean score on held-out data, with the sign that makes larger better; -inf if an output is not finite."""
        made = scores(self.model, task)
        known = [score for score in made if score is not None]
        if len(known) < len(made):
            return float("-inf")
        return statistics.fmean(known) * (1 if task.metric.direction == "max" else -1)

    def planned(self, verb: str) -> Planned:
        """The remedies with this verb, each with the findings that it treats."""
        treated: dict[str, tuple[Remedy, list[Finding]]] = {}
        verb, _, named = verb.partition(" ")
        considered = list(self.found.findings)
        if verb == "retrain_" and self.inputs.task is not None:
            hidden = [
                f for step, treats in self.steps if step.verdict == "kept" and step.verb in _HIDING for f in treats
            ]
            gone = [f for f in hidden if _key(f) not in _keys(considered)]
            considered = [f for f in [*considered, *gone] if bool(f.path) == bool(named)]
        for finding in considered:
            for remedy in rule_texts()[finding.code].prescription.remedies:
                if remedy.verb == verb and not _why_not(remedy, finding, self.model):
                    treated.setdefault(str(remedy), (remedy, []))[1].append(finding)
        return list(treated.values())

    def treat(self, remedy: Remedy, treats: list[Finding]) -> None:
        """Try one remedy, in one scope after the other: the first that is proved is kept, of `retrain_` each."""
        if remedy.proof != "same function":  # layers that random numbers alone show are left out
            treats = [finding for finding in treats if self.inputs.is_evidence(finding)] or treats
        if remedy.verb == "retrain_":
            gone = [finding for finding in treats if _key(finding) not in _keys(self.found.findings)]
            paths = suspects(treats, self.found, self.model) + suspects(gone, self.before, self.given)
            for path in list(dict.fromkeys(paths))[:_RETRAINED]:
                if (path, len(self.edits)) in self._retrained:  # since then nothing has changed
                    continue
                self._retrained.add((path, len(self.edits)))
                self.steps.append((self._tried(remedy, treats, {"where": [path]}), treats))
            return
        tried: TreatmentStep | None = None
        for paths in _scopes(remedy, treats, self.found, self.model):
            tried = self._tried(remedy, treats, {"where": paths} if paths else {})
            if tried.verdict == "kept":
                break
        if tried is not None:
            self.steps.append((tried, treats))

    def _tried(self, remedy: Remedy, treats: list[Finding], scope: Mapping[str, Any]) -> TreatmentStep:
        """One attempt; what is not proved is undone."""
        options: dict[str, Any] = {**remedy.options, **scope}
        cannot = fixed(remedy.cannot)
        step = TreatmentStep(remedy.verb, options, _codes(treats), fixed("not applied"), "", cannot=cannot)
        exact = remedy.proof == "same function"
        if not exact and (why := self._unprovable(remedy, treats)):
            return replace(step, proof=why)
        untreated = copy_of(self.model) if exact else None
        if not exact and self.inputs.task is not None and not self._scores:
            self._scores = scores(self.model, self.inputs.task)
        try:
            if remedy.verb == "shrink_change_":
                options = best_scale(self.model, self.inputs.base, _task_of(self.inputs), options.get("where", []))
                step = replace(step, options=options)
            edit = _VERBS[remedy.verb](self.model, self.inputs, options)
        except GonioError as error:
            why = not_finite(untreated, self.inputs.example, self.found.findings) if untreated is not None else ""
            return replace(step, proof=why or say("refused: {error}", error=said_by(error)))
        if not edit.changes:
            edit.undo_()
            return replace(step, proof=say("it finds nothing to change"))
        after = self.inputs.counted(self.inputs.measured(self.model))
        harm = _no_help(self.found, after, edit, treats, better=remedy.proof == "better held-out score")
        now: list[float | None] = []
        results: Results | None = None
        if not exact and self.inputs.task is not None:
            now = scores(self.model, self.inputs.task)
            done = {"verb": remedy.verb, "options": options}
            results = study_of(self.inputs.task, self.inputs.data, self.before.source, done, self._scores, now)
        if harm:
            proved, proof = None, harm
        elif untreated is not None:
            proved, proof = same_function(untreated, self.model, self.inputs.example)
            if proved is None:
                proof = not_finite(untreated, self.inputs.example, self.found.findings) or proof
        elif results is not None:
            proved, proof = held_out(results, better=remedy.proof == "better held-out score")
        else:
            proved, proof = None, say("not proved: there was no task; kept because it was asked for")
        step = replace(step, proof=proof, results=results)
        if not (proved or (proved is None and not harm and self.apply_unproven)):
            edit.undo_()
            return replace(step, verdict=fixed("undone"))
        self.found, self._scores = after, now  # of a verb that keeps the function, scores are made anew if needed
        self.edits.append(edit)
        ended = [finding for finding in treats if _key(finding) not in _keys(after.findings)]
        return replace(step, verdict=fixed("kept"), proved=bool(proved), codes=_codes(ended or treats))

    def _unprovable(self, remedy: Remedy, treats: list[Finding]) -> str:
        """Why a change of the function is not tried; empty if it is."""
        if self.inputs.task is not None:
            return ""
        if remedy.reads == "task":
            return NEEDS_TASK
        if self.inputs.random and remedy.reads == "data":
            return NO_DATA
        if not any(self.inputs.is_evidence(finding) for finding in treats):
            return NO_EVIDENCE
        return "" if self.apply_unproven and self.inputs.batch is not None else UNPROVABLE

    def result(self) -> Treatment:
        """The outcome, without the steps that were not applied to findings that another one has treated."""
        left = _keys(self.found.findings)
        steps = [step for step, treats in self.steps if step.verdict != "not applied" or left & _keys(treats)]
        untreated = _untreated(self.found, self.model)
        made = Treatment(self.before.source, self.before, self.found, tuple(steps), untreated, self.model)
        return replace(made, edits=tuple(self.edits), notes=self.notes)


def _why_not(remedy: Remedy, finding: Finding, model: nn.Module) -> str:
    """Why a remedy is not for this finding; empty if it is."""
    if remedy.of == "buffers":
        return "" if finding.path in statistics_of(model) else remedy.cannot
    path, _, name = finding.path.rpartition(".")
    owner = modules_at(model).get(path)
    return remedy.cannot if owner is not None and name in dict(owner.named_buffers(recurse=False)) else ""


def _untreated(found: Measurements, model: nn.Module) -> tuple[tuple[Finding, str], ...]:
    """The findings that have no treatment, with the reason."""
    left: list[tuple[Finding, str]] = []
    for finding in found.findings:
        prescription = rule_texts()[finding.code].prescription
        whys = [_why_not(remedy, finding, model) for remedy in prescription.remedies]
        if prescription.none or all(whys):
            left.append((finding, fixed(prescription.none or whys[0])))
    return tuple(left)


def _reported(found: Measurements) -> Treatment:
    """The treatments of a source without modules, none of which can be applied."""
    named: dict[str, tuple[Remedy, list[Finding]]] = {}
    for finding in found.findings:
        for remedy in rule_texts()[finding.code].prescription.remedies:
            named.setdefault(str(remedy), (remedy, []))[1].append(finding)
    ordered = sorted(named.values(), key=lambda each: _PLACES[each[0].verb])
    steps = [
        TreatmentStep(r.verb, dict(r.options), _codes(treats), fixed("not applied"), NO_MODULES, cannot=fixed(r.cannot))
        for r, treats in ordered
    ]
    none = tuple((f, fixed(told)) for f in found.findings if (told := rule_texts()[f.code].prescription.none))
    return Treatment(found.source, found, found, tuple(steps), none)


def _codes(findings: list[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(finding.code for finding in findings))


def _scopes(remedy: Remedy, treats: list[Finding], found: Measurements, model: nn.Module) -> list[list[str]]:
    """The layers on which a verb is tried, one list after the other; an empty list for all of them."""
    if remedy.verb == "balance_":
        return [[]]
    if remedy.verb == "calibrate_":
        return calibrated_layers(treats, found, model)
    able, parts = _CAN_ACT.get(remedy.verb), modules_at(model)
    paths = suspects(treats, found, model)
    if able is not None:  # no verb can act on a scripted layer
        paths = [p for p in paths if not isinstance(parts[p], torch.jit.ScriptModule) and able(parts[p]) is None]
    return [paths] if paths else []


def _where(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call, with the paths as a selector."""
    paths = options.get("where")
    return {**options, "where": is_in(paths)} if paths else dict(options)


def _task_of(inputs: Inputs) -> Task:
    """The task, which there is: a remedy that reads it is not tried without one."""
    return cast(Task, inputs.task)


def best_scale(model: nn.Module, base: Any, task: Task, paths: list[str]) -> dict[str, Any]:
    """The options of :func:`gonio.shrink_change_` with the lowest loss on the training data, up to 4096 examples.

    The factors are 1, 1/2, … 1/1024, for all layers and for those of `paths` alone; validation and test data are not
    used. The model is as it was afterwards.

    Raises: NotApplicableError if no factor below 1 has a lower loss than 1.
    """
    scopes: list[dict[str, Any]] = [{}, {"where": paths}] if paths else [{}]
    tried = [{**scope, "factor": factor} for scope in scopes for factor in _FACTORS]
    best = min(tried, key=lambda options: _loss(model, base, task, options))
    if best["factor"] == 1:
        why = "no smaller change has a lower loss on the training data"
        raise NotApplicableError(
            "shrink_change_", paths[0] if paths else "the model", why, "Leave it.", action="change"
        )
    return best


@torch.no_grad()
def _loss(model: nn.Module, base: Any, task: Task, options: Mapping[str, Any]) -> float:
    """The mean loss on the training data with the smaller change, which is undone."""
    edited, training = shrink_change_(model, base, **_where(options)), model.training
    try:
        return mean_loss(model.eval(), task, first_batches(task))
    finally:
        model.train(training)
        edited.undo_()


_CAN_ACT = {"even_out_": even_out.can_act, "match_statistics_": recycle.can_act, "recycle_": recycle.can_act}
_VERBS: dict[str, Callable[[nn.Module, Inputs, dict[str, Any]], Edited]] = {
    "balance_": lambda model, inputs, options: balance_(model, example=inputs.example, **options),
    "calibrate_": lambda model, inputs, options: calibrate_(model, inputs.training(), **_where(options)),
    "even_out_": lambda model, inputs, options: even_out_(model, **_where(options)),
    "match_statistics_": lambda model, inputs, options: match_statistics_(
        model, islice(inputs.training(), _MEASURED), **_where(options)
    ),
    "recycle_": lambda model, inputs, options: recycle_(model, example=inputs.example, **_where(options)),
    "retrain_": lambda model, inputs, options: retrain_(model, _task_of(inputs), **_where(options)),
    "shrink_change_": lambda model, inputs, options: shrink_change_(model, inputs.base, **_where(options)),
    "shrink_intruders_": lambda model, inputs, options: shrink_intruders_(model, inputs.base, **_where(options)),
}


def _no_help(
    before: Measurements,
    after: Measurements,
    edit: Edited,
    treats: list[Finding],
    *,
    better: bool,
) -> str:
    """Why a change did not help; empty if it did. A better score is help enough, and outweighs a new warning."""
    left, known = _keys(after.findings), _keys(before.findings)
    harmful = ("error",) if better else ("error", "warn")
    new = sorted({f.code for f in after.findings if f.level in harmful and _key(f) not in known})
    if new:
        return say("it causes other findings: {codes}", codes=", ".join(new))
    if better or not _keys(treats) <= left:
        return ""
    if edit.notes:  # such as the reasons why filters stay
        return say("the findings remain after it ({notes})", notes="; ".join(edit.notes[:_NOTES]))
    return say("the findings remain after it")
