"""Plans and runs without a task or model behind them, the files of those with one, and an engine of one process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gonio.lab import RunRecord, StudyPlan, TrainingConfig
from gonio.lab.plan import RecipeEntry
from gonio.lab.running.engines import NodeLost
from gonio.lab.running.scripts import execute_script
from gonio.lab.running.training import execute_run

TINY, OWN = (str(Path(__file__).with_name(name)) for name in ("tiny.py", "own_training.py"))


def plan_of(*, recipes: int = 1, seeds: int = 8, **changes: object) -> StudyPlan:
    """A plan of the baseline and recipes r0, r1, …"""
    names = ["baseline", *(f"r{i}" for i in range(recipes))]
    plan = StudyPlan(
        task="digits",
        model="digits-cnn",
        recipes=tuple(RecipeEntry(name, {"name": name}, name) for name in names),
        seeds=tuple(range(seeds)),
        training=TrainingConfig(epochs=1, batch_size=2, lr=0.1),
        metric="accuracy",
        direction="max",
        unit="%",
        splits={"train": 2, "validation": 2, "test": 2},
        data="d",
        sesoi=1.0,
        worst=0.0,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def runs_of(name: str, scores: list[float | str | None]) -> list[RunRecord]:
    """One run per seed; a text instead of a score is the status, None is no row."""
    records = []
    for seed, score in enumerate(scores):
        if isinstance(score, str):
            records.append(RunRecord(name, seed, score, error="why"))
        elif score is not None:
            records.append(RunRecord(name, seed, "finished", score))
    return records


def recorded(plan: StudyPlan, entry: RecipeEntry, seed: int = 0) -> RunRecord:
    """A run of a plan in this process."""
    execute = execute_script if plan.scripted else execute_run
    return RunRecord(**execute(plan, entry, seed)["record"])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)


class Ended:
    """A call of an engine that runs it at once; without a result its machine was lost."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def result(self) -> Any:
        if self.found is None:
            raise NodeLost("its node was lost")
        return self.found

    def stop(self) -> None: ...


class Here:
    """An engine that runs each job at once, in this process."""

    shares_files = True
    slots = 1

    def start(self, function: Any, *arguments: Any) -> Any:
        return Ended(function(*arguments))

    def wait(self, futures: Collection[Any], *, timeout: float | None = None) -> list[Any]:
        return list(futures)

    def close(self) -> None: ...
