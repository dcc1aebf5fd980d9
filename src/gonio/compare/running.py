"""Run what a study lacks, as many runs at a time as the engine has room for."""

from __future__ import annotations

import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gonio.compare.cost import measure_costs
from gonio.compare.engines import Engine, Job, Local, NodeLost
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

__all__ = ["run"]

_LOSSES = 3  # lost nodes after which a run counts as failed; the next command tries it again


def run(
    plan: Plan,
    path: str | Path,
    *,
    jobs: int | None = None,
    engine: Engine | None = None,
    watcher: Watcher | None = None,
) -> Study:
    """Do every run of the plan that the study in `path` lacks, then measure what the recipes cost.

    Each run is a process of its own on one thread. It starts from its seed, so its result depends neither
    on `jobs` nor on the order, and a study that was killed and continued equals one that was not. The
    caller is the only writer: a run is finished exactly when its row is committed.

    Args:
        path: the study's folder; made if absent, continued if it holds the same plan.
        jobs: how many runs at a time on this machine; None is one per core.
        engine: where the runs are computed; None is this machine. It is closed at the end.
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
    if engine is not None and jobs is not None:
        raise InvalidArgumentError(
            "an engine knows how many runs it has room for", f"jobs={jobs} beside it", "Leave one of them out."
        )
    engine = engine or Local(jobs)
    require_scipy()
    watcher = watcher or Quiet()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), _termination_raises(f"the study {str(path)!r}"):
        study = Study.create_locked(folder, plan)
        try:
            _Training(study, engine, watcher).go()
            _measure(study, watcher)
        finally:
            watcher.stop()
            engine.close()
    return study


class _Training:
    """The runs of a study: those that wait, and those that are being computed."""

    def __init__(self, study: Study, engine: Engine, watcher: Watcher) -> None:
        self._study, self._engine, self._watcher = study, engine, watcher
        self._waiting = study.missing()[::-1]
        self._running: dict[Job, tuple[RecipeEntry, int]] = {}
        self._losses: Counter[tuple[str, int]] = Counter()

    def go(self) -> None:
        """Until each run has its row."""
        total = len(self._study.plan.grid)
        self._watcher.start(total, total - len(self._waiting))
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._engine.slots:
                    self._start(*self._waiting.pop())
                for job in self._engine.wait(self._running):
                    self._settle(job, *self._running[job])
        finally:
            for job in self._running:
                job.stop()

    def _start(self, entry: RecipeEntry, seed: int) -> None:
        folder = self._study.scratch(entry, seed).absolute() if self._engine.shares_files else None
        self._running[self._engine.start(_run_as_data, self._study.plan, entry, seed, folder)] = (entry, seed)

    def _settle(self, job: Job, entry: RecipeEntry, seed: int) -> None:
        """Commit what a job brought, or give its run back if its machine was lost."""
        used = versions()
        try:
            found = job.result()
            record, used = RunRecord(**found["record"]), found["versions"]
        except ChildProcessError as error:
            record = RunRecord(entry.name, seed, "failed", error=str(error))
        except NodeLost as error:
            self._losses[entry.name, seed] += 1
            if self._losses[entry.name, seed] < _LOSSES:
                self._watcher.stage(f"{entry.name}, seed {seed}: {error}; it is run again")
                self._waiting.append((entry, seed))
                del self._running[job]
                return
            record = RunRecord(entry.name, seed, "failed", error=f"{error}, {_LOSSES} times")
        self._study.add(entry, record, used)
        if record.status != "failed":  # the next try of a failed run may go on from its checkpoint
            shutil.rmtree(self._study.scratch(entry, seed), ignore_errors=True)
        del self._running[job]
        self._watcher.run_ended(record)


def _run_as_data(plan: Plan, entry: RecipeEntry, seed: int, folder: Path | None) -> dict[str, Any]:
    """What a job calls; the versions are those of the machine that it runs on."""
    return {"record": run_one(plan, entry, seed, folder).to_dict(), "versions": dict(versions())}


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
