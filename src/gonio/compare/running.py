"""Run what a study lacks, as many runs at a time as the engine has room for."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from gonio.compare.cost import measure_costs
from gonio.compare.engines import Engine, Job, Local, NodeLost
from gonio.compare.lock import locked
from gonio.compare.plan import Plan
from gonio.compare.planning import versions
from gonio.compare.progress import Quiet, Watcher
from gonio.compare.results import RunRecord
from gonio.compare.statistics import require_scipy
from gonio.compare.study import Study
from gonio.compare.units import TransferUnit, Unit, run_units, transfer_units, trial_units
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
    """Do every trial and run of the plan that the study in `path` lacks, then measure what the recipes cost.

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
    with locked(folder), _stopped_once(f"the study {str(path)!r}"):
        study = Study.create_locked(folder, plan)
        try:
            _Crew(study, engine, watcher).go()
            _measure(study, watcher)
        finally:
            watcher.stop()
            engine.close()
    return study


class _Crew:
    """The units of a study: those that wait, and those that are being computed."""

    def __init__(self, study: Study, engine: Engine, watcher: Watcher) -> None:
        self._study, self._engine, self._watcher = study, engine, watcher
        self._waiting: list[Unit] = []
        self._running: dict[Job, Unit] = {}
        self._losses: Counter[str] = Counter()

    def go(self) -> None:
        """First all trials, then what the attacks need, then the runs; until each has its row."""
        trials, runs = self._study.trials.left(), len(self._study.missing())
        tuning = self._study.plan.tuning
        total = len(self._study.plan.grid) + (tuning.trials * len(self._study.plan.recipes) if tuning else 0)
        self._watcher.start(total, total - trials - runs)
        for units in (trial_units, transfer_units, run_units):
            self._compute(units(self._study))

    def _compute(self, units: list[Unit]) -> None:
        self._waiting = units[::-1]
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._engine.slots:
                    self._start(self._waiting.pop())
                for job in self._engine.wait(self._running):
                    self._settle(job, self._running[job])
        finally:
            for job in self._running:
                job.stop()

    def _start(self, unit: Unit) -> None:
        function, arguments = unit.call(self._study, shares_files=self._engine.shares_files)
        self._running[self._engine.start(function, *arguments)] = unit

    def _settle(self, job: Job, unit: Unit) -> None:
        """Commit what a job brought, or give its unit back if its machine was lost."""
        used = versions()
        try:
            found = job.result()
            record, used = RunRecord(**found["record"]), found["versions"]
        except ChildProcessError as error:
            record = replace(unit.failure, error=str(error))
        except NodeLost as error:
            self._losses[unit.name] += 1
            if self._losses[unit.name] < _LOSSES:
                self._watcher.stage(f"{unit.name}: {error}; it is run again")
                self._waiting.append(unit)
                del self._running[job]
                return
            record = replace(unit.failure, error=f"{error}, {_LOSSES} times")
        self._waiting = unit.commit(self._study, record, used)[::-1] + self._waiting
        del self._running[job]
        if not isinstance(unit, TransferUnit):
            self._watcher.run_ended(record)
        elif record.status != "finished":
            self._watcher.stage(f"no transfer attack: {record.status}: {record.error}")


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
def _stopped_once(what: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM unwind the block as exceptions, the first of them alone.

    What comes after it (a second Ctrl-C, out of impatience) would unwind what stops the workers, and leave some alive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set signal handlers
        return
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        raise Interrupted(what) if number == signal.SIGTERM else KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody ignores or handles it on purpose
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
