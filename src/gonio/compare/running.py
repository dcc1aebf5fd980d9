"""Run what a study lacks, as many runs at a time as there are cores."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

from gonio.compare.cost import measure_costs
from gonio.compare.lock import locked
from gonio.compare.one_run import run_one
from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.planning import versions
from gonio.compare.progress import Quiet, Watcher
from gonio.compare.results import RunRecord
from gonio.compare.statistics import require_scipy
from gonio.compare.study import Study
from gonio.compare.workers import Worker
from gonio.errors import Interrupted, InvalidArgumentError

__all__ = ["default_jobs", "run"]


def run(plan: Plan, path: str | Path, *, jobs: int | None = None, watcher: Watcher | None = None) -> Study:
    """Do every run of the plan that the study in `path` lacks, then measure what the recipes cost.

    Each run is a process of its own on one thread. It starts from its seed, so its result depends neither
    on `jobs` nor on the order, and a study that was killed and continued equals one that was not. The
    caller is the only writer: a run is finished exactly when its row is committed.

    Args:
        path: the study's folder; made if absent, continued if it holds the same plan.
        jobs: how many runs at a time; None is one per core.
        watcher: told about progress; see :func:`watcher_for`.

    Raises:
        PlanChangedError: the folder's study was planned otherwise.
        StudyLockedError: another process is running it.
        Interrupted: SIGTERM arrived. KeyboardInterrupt is passed on. In both cases the workers are
            stopped and finished runs are kept.

    Example:
        >>> import tempfile
        >>> training = gonio.compare.Training(epochs=1, batch_size=50, lr=0.05)
        >>> plan = gonio.compare.make_plan([], seeds=2, training=training)  # the baseline alone
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     study = gonio.compare.run(plan, folder, jobs=2)
        ...     [record.status for record in study.runs()]
        ['finished', 'finished']
    """
    jobs = default_jobs() if jobs is None else jobs
    if jobs < 1:
        raise InvalidArgumentError("jobs must be at least 1", str(jobs), "Leave it out for one per core.")
    require_scipy()
    watcher = watcher or Quiet()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), _termination_raises(f"the study {str(path)!r}"):
        study = Study.create_locked(folder, plan)
        try:
            _train(study, jobs, watcher)
            _measure(study, watcher)
        finally:
            watcher.stop()
    return study


def default_jobs() -> int:
    """The cores that this process may use.

    Example:
        >>> gonio.compare.default_jobs() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _train(study: Study, jobs: int, watcher: Watcher) -> None:
    waiting = study.missing()[::-1]
    watcher.start(len(study.plan.grid), len(study.plan.grid) - len(waiting))
    used = versions()
    running: dict[Worker, tuple[RecipeEntry, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                entry, seed = waiting.pop()
                running[Worker(_run_as_data, study.plan, entry, seed)] = (entry, seed)
            for worker in _ready(running):
                entry, seed = running[worker]
                record = _record(worker, entry, seed)
                study.add(entry, record, used)
                del running[worker]
                watcher.run_ended(record)
    finally:
        for worker in running:
            worker.stop()


def _ready(running: dict[Worker, tuple[RecipeEntry, int]]) -> list[Worker]:
    """Wait until at least one worker has ended."""
    ready = connection.wait([handle for worker in running for handle in worker.handles])
    return [worker for worker in running if any(handle in ready for handle in worker.handles)]


def _run_as_data(plan: Plan, entry: RecipeEntry, seed: int) -> dict[str, Any]:
    return run_one(plan, entry, seed).to_dict()


def _record(worker: Worker, entry: RecipeEntry, seed: int) -> RunRecord:
    try:
        return RunRecord(**worker.result())
    except ChildProcessError as error:
        return RunRecord(entry.name, seed, "failed", error=str(error))


def _measure(study: Study, watcher: Watcher) -> None:
    """Costs are measured after the runs, when nothing else of the study uses the machine."""
    entries = study.without_costs()
    if not entries:
        return
    watcher.stage("measuring step time and memory")
    worker = Worker(measure_costs, study.plan, entries)
    try:
        rows = worker.result()
    except ChildProcessError as error:
        watcher.stage(f"costs were not measured: {error}")
    else:
        study.add_costs([tuple(row) for row in rows])
    finally:
        worker.stop()


@contextmanager
def _termination_raises(what: str) -> Iterator[None]:
    """SIGTERM as an exception, so that it unwinds like Ctrl-C."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted(what)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set signal handlers
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
