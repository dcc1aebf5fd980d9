"""The jobs of a study: trials of tuning, examples for the transfer attack, and runs.

A `Job` is the unit of work that a worker executes. Its functions depend on the plan and the seed alone, so the result
is the same in whatever process they run.
"""

from __future__ import annotations

import math
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from gonio.lab.judging.filter_summary import filter_summary
from gonio.lab.judging.results import RunRecord
from gonio.lab.judging.robustness import from_text, robustness, to_text, transferable
from gonio.lab.planning.plan import BASELINE, AttackConfig, Plan, RecipeEntry, Tuning, installed_versions
from gonio.lab.running.measures import Subject, kind_of
from gonio.lab.running.scripts import run_script
from gonio.lab.running.study import Study
from gonio.lab.running.training import Fit, build, fit, judge, prepare_process, seed_everything
from gonio.lab.running.tuning import Trial, propose, settled
from gonio.lab.tasks import resolve as resolve_task
from gonio.lab.tasks.task import Task
from gonio.seeding import derive_seed

_LONGEST_ERROR = 2000  # characters of an exception's text that a record keeps
Call = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


class Job(Protocol):
    """One computation in a process of its own, and how its record is stored."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def failure(self) -> RunRecord:
        """The record if the process died; the error is filled in."""

    def call(self, study: Study, *, shares_files: bool) -> Call:
        """The function, which returns a record and versions as data, and its arguments.

        Args:
            shares_files: whether its process can reach the study's folder.
        """

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        """Write the record into the study; returns the jobs that can start now and could not before."""


@dataclass(frozen=True)
class RunJob:
    """One recipe × one seed."""

    entry: RecipeEntry
    seed: int

    @property
    def name(self) -> str:
        return f"{self.entry.name}, seed {self.seed}"

    @property
    def failure(self) -> RunRecord:
        return RunRecord(self.entry.name, self.seed, "failed")

    def call(self, study: Study, *, shares_files: bool) -> Call:
        folder = study.scratch(self.entry, self.seed).absolute() if shares_files else None
        if folder is not None and study.path.is_dir():  # else it was moved, which the next commit says
            folder.parent.mkdir(exist_ok=True)
        settings = study.trials.chosen(self.entry)
        return execute_run, (study.plan, self.entry, self.seed, folder, settings, study.transferred())

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        study.add(self.entry, record, used)
        if record.status != "failed":  # the next attempt of a failed run may continue from its checkpoint
            shutil.rmtree(study.scratch(self.entry, self.seed), ignore_errors=True)
        return []


@dataclass(frozen=True)
class TrialJob:
    """One trial: a recipe with other values."""

    entry: RecipeEntry
    number: int
    values: Mapping[str, float]
    tuning: Tuning

    @property
    def name(self) -> str:
        return f"{self.entry.name}, trial {self.number + 1}"

    @property
    def failure(self) -> RunRecord:
        return RunRecord(self.entry.name, self.tuning.seed, "failed", settings=self.values)

    def call(self, study: Study, *, shares_files: bool) -> Call:
        return execute_trial, (study.plan, self.entry, self.tuning.seed, dict(self.values))

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        before = set(study.trials.ready(self.entry))
        study.trials.add(self.entry, Trial(self.number, self.values, record), used)
        study.trials.choose_if_complete(self.entry)
        return _trials(study, self.entry, self.tuning, known=before)


@dataclass(frozen=True)
class TransferJob:
    """Examples that mislead another baseline, whose seed is none of the study's."""

    config: AttackConfig

    @property
    def name(self) -> str:
        return "the baseline of the transfer attack"

    @property
    def failure(self) -> RunRecord:
        return RunRecord(BASELINE, self.config.seed, "failed")

    def call(self, study: Study, *, shares_files: bool) -> Call:
        return execute_transfer, (study.plan, self.config)

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        # a failure is stored too, so that all runs of one study are attacked in the same way
        study.keep_transferred(record.robustness)
        return []


def trial_jobs(study: Study) -> list[Job]:
    """The trials that can be made now."""
    tuning = study.plan.tuning
    if tuning is None:
        return []
    for entry in study.plan.recipes:
        study.trials.choose_if_complete(entry)  # the study was killed between the last trial and the choice
    return [job for entry in study.plan.recipes for job in _trials(study, entry, tuning, known=set())]


def _trials(study: Study, entry: RecipeEntry, tuning: Tuning, *, known: Set[int]) -> list[Job]:
    """The trials of one recipe that can be made now, without the `known` ones."""
    done = study.trials.of(entry)
    return [
        TrialJob(entry, number, propose(study.plan, entry, number, done), tuning)
        for number in study.trials.ready(entry)
        if number not in known
    ]


def transfer_jobs(study: Study) -> list[Job]:
    """The one computation before all attacks, if it is needed and not done yet."""
    config = None if study.plan.scripted else study.plan.threat  # a script's other baseline would be a whole run
    needed = config is not None and study.transferred() is None and study.missing()
    return [TransferJob(config)] if config is not None and needed else []


def run_jobs(study: Study) -> list[Job]:
    """The runs that the study lacks, in the plan's order."""
    return [RunJob(entry, seed) for entry, seed in study.missing()]


# --- in the worker --------------------------------------------------------------------------------------


def execute_run(
    plan: Plan,
    entry: RecipeEntry,
    seed: int,
    folder: Path | None = None,
    settings: Mapping[str, float] | None = None,
    transferred: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build, train and judge one run. Meant for a process of its own: it seeds the global generators.

    Args:
        folder: for the files of a script's run; None: a temporary one.
        settings: tuned values of the recipe.
        transferred: examples that mislead another model, as :func:`to_text` writes them.
    """
    record = RunRecord(entry.name, seed, "failed", settings=settings or {})
    if plan.scripted:
        return _guarded(record, lambda: run_script(plan, entry, seed, folder))

    def run() -> RunRecord:
        tuned, changed = settled(plan, entry, settings or {})
        if plan.measure is not None and kind_of(plan.measure).start:
            return _measured(tuned, changed, *_untrained(tuned, changed, record))
        model, task, done, ended = _trained(tuned, changed, record)
        judged = ended if done.diverged else _judged(ended, done, model, task, plan.workers)
        if plan.threat is not None and judged.status == "finished":
            moved = from_text(transferred) if transferred else None
            judged = replace(judged, robustness=robustness(model, task, plan.threat, moved))
        return judged if plan.measure is None else _measured(tuned, changed, model, task, judged)

    return _guarded(record, run)


def execute_trial(plan: Plan, entry: RecipeEntry, seed: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Build and train with other values; the score is the best of the validation split, the test split is not used."""
    record = RunRecord(entry.name, seed, "failed", settings=values)

    def trial() -> RunRecord:
        _, _, done, ended = _trained(*settled(plan, entry, values), record)
        scores = done.curve["val_score"]
        if ended.error or not scores:
            return replace(ended, plan="", error=ended.error or "no epoch has a validation score")
        best = (max if plan.direction == "max" else min)(scores)
        return replace(ended, status="finished", score=best, best_epoch=done.best_epoch, plan="")

    return _guarded(record, trial)


def execute_transfer(plan: Plan, config: AttackConfig) -> dict[str, Any]:
    """Examples that mislead another baseline, as the record's `robustness`."""
    record = RunRecord(BASELINE, config.seed, "failed")

    def attack() -> RunRecord:
        model, task, _, ended = _trained(plan, plan.baseline, record)
        if ended.error:
            return ended
        return replace(record, status="finished", robustness=to_text(transferable(model, task, config)))

    return _guarded(record, attack)


def _guarded(record: RunRecord, function: Callable[[], RunRecord]) -> dict[str, Any]:
    """The function's record, or the failed record with its exception; with the versions of this machine."""
    started = time.process_time()
    try:
        record = function()
    except (Exception, SystemExit) as error:  # an exception of a user's model or a recipe concerns this run only
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        record = replace(record, error=f"{text} ({Path(where.filename).name}:{where.lineno})")
    record = replace(record, seconds=time.process_time() - started)
    return {"record": record.to_dict(), "versions": dict(installed_versions())}


def _trained(plan: Plan, entry: RecipeEntry, record: RunRecord) -> tuple[nn.Module, Task, Fit, RunRecord]:
    """The model after its last epoch, and the record so far: status `diverged`, with an error only if it did."""
    prepare_process(plan.device)
    task = resolve_task(plan.task)
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
        return replace(record, error="no epoch has a validation score")
    model.load_state_dict(done.state)
    found = judge(model, task, task.test, [task.metric, *task.metrics], workers=workers) or {}
    score = found.pop(task.metric.name, math.nan)
    if not math.isfinite(score):
        return replace(record, error="outputs on the test split are not finite")
    shown = {name: value if math.isfinite(value) else None for name, value in found.items()}
    geometry = filter_summary(model)
    return replace(record, status="finished", score=score, best_epoch=done.best_epoch, geometry=geometry, metrics=shown)


def _untrained(plan: Plan, entry: RecipeEntry, record: RunRecord) -> tuple[nn.Module, Task, RunRecord]:
    """The model as it starts, and a record without a score."""
    prepare_process(plan.device)
    task = resolve_task(plan.task)
    model, _, text = build(plan, task, entry, plan.seed_of(entry, record.seed))
    model.eval()
    return model, task, replace(record, status="finished", plan=text, geometry=filter_summary(model))


def _measured(plan: Plan, entry: RecipeEntry, model: nn.Module, task: Task, record: RunRecord) -> RunRecord:
    """The record with the number of the plan's measure as its score."""
    if plan.measure is None or record.status != "finished":
        return record
    measure = replace(plan.measure, options={**plan.measure.options, **entry.setting.get("measure", {})})
    seed = plan.seed_of(entry, record.seed)
    subject = Subject(model, task, plan.training_of(entry), seed, record.curve, record.robustness)
    score = kind_of(measure).function(subject, **measure.options)
    if not math.isfinite(score):
        return replace(record, status="diverged", score=None, error=f"its {measure.name} is {score}")
    return replace(record, score=float(score))
