"""What a study has to compute, unit by unit: trials, examples for the transfer attack, and runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gonio.compare.one_run import make_transferable, run_one, run_trial
from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.planning import versions
from gonio.compare.results import BASELINE, RunRecord
from gonio.compare.study import Study
from gonio.compare.threat import Threat
from gonio.compare.tuning import Trial, propose
from gonio.compare.tuning_space import Tuning

__all__ = ["Unit", "run_units", "transfer_units", "trial_units"]


class Unit(Protocol):
    """One computation in a process of its own, and what becomes of its record."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def failure(self) -> RunRecord:
        """The record of a unit whose process died; its error is filled in."""

    def call(self, study: Study, *, shares_files: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function, which gives a record and versions as data, and its arguments.

        Args:
            shares_files: whether it is called where the study's folder can be reached.
        """

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Unit]:
        """Write the record into the study; the units that can be computed now and could not before."""


@dataclass(frozen=True)
class RunUnit:
    """One recipe × one seed."""

    entry: RecipeEntry
    seed: int

    @property
    def name(self) -> str:
        return f"{self.entry.name}, seed {self.seed}"

    @property
    def failure(self) -> RunRecord:
        return RunRecord(self.entry.name, self.seed, "failed")

    def call(self, study: Study, *, shares_files: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        folder = study.scratch(self.entry, self.seed).absolute() if shares_files else None
        settings = study.trials.chosen(self.entry)
        return _run, (study.plan, self.entry, self.seed, folder, settings, study.transferred())

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Unit]:
        study.add(self.entry, record, used)
        if record.status != "failed":  # the next try of a failed run may go on from its checkpoint
            shutil.rmtree(study.scratch(self.entry, self.seed), ignore_errors=True)
        return []


@dataclass(frozen=True)
class TrialUnit:
    """One recipe with other values."""

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

    def call(self, study: Study, *, shares_files: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _trial, (study.plan, self.entry, self.tuning.seed, dict(self.values))

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Unit]:
        before = set(study.trials.ready(self.entry))
        study.trials.add(self.entry, Trial(self.number, self.values, record), used)
        done = study.trials.of(self.entry)
        if len(done) == self.tuning.trials:
            study.trials.choose(self.entry)
        return [
            TrialUnit(self.entry, number, propose(study.plan, self.entry, number, done), self.tuning)
            for number in study.trials.ready(self.entry)
            if number not in before
        ]


@dataclass(frozen=True)
class TransferUnit:
    """Examples that mislead a baseline which is none of the study's."""

    threat: Threat

    @property
    def name(self) -> str:
        return "the baseline of the transfer attack"

    @property
    def failure(self) -> RunRecord:
        return RunRecord(BASELINE, self.threat.seed, "failed")

    def call(self, study: Study, *, shares_files: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _transfer, (study.plan, self.threat)

    def commit(self, study: Study, record: RunRecord, used: Mapping[str, str]) -> list[Unit]:
        # also what failed: the runs of one study are all attacked in the same way
        study.keep_transferred(record.robustness)
        return []


def trial_units(study: Study) -> list[Unit]:
    """The trials that can be made now."""
    tuning = study.plan.tuning
    if tuning is None:
        return []
    for entry in study.plan.recipes:  # killed between the last trial and the choice
        if study.trials.chosen(entry) is None and len(study.trials.of(entry)) == tuning.trials:
            study.trials.choose(entry)
    return [
        TrialUnit(entry, number, propose(study.plan, entry, number, study.trials.of(entry)), tuning)
        for entry in study.plan.recipes
        for number in study.trials.ready(entry)
    ]


def transfer_units(study: Study) -> list[Unit]:
    """The one computation before all attacks, if there are any and it is not done."""
    threat = study.plan.threat
    return [] if threat is None or study.transferred() is not None or not study.missing() else [TransferUnit(threat)]


def run_units(study: Study) -> list[Unit]:
    """The runs to do, in the plan's order."""
    return [RunUnit(entry, seed) for entry, seed in study.missing()]


def _run(
    plan: Plan,
    entry: RecipeEntry,
    seed: int,
    folder: Path | None,
    settings: Mapping[str, float],
    transferred: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return _as_data(run_one(plan, entry, seed, folder, settings=settings, transferred=transferred))


def _trial(plan: Plan, entry: RecipeEntry, seed: int, values: Mapping[str, float]) -> dict[str, Any]:
    return _as_data(run_trial(plan, entry, seed, values))


def _transfer(plan: Plan, threat: Threat) -> dict[str, Any]:
    return _as_data(make_transferable(plan, threat))


def _as_data(record: RunRecord) -> dict[str, Any]:
    """The versions are those of the machine that it was computed on."""
    return {"record": record.to_dict(), "versions": dict(versions())}
