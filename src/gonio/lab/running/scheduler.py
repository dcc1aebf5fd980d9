"""Run the jobs that a study lacks, as many at a time as the engine has room for, and report the progress.

A `Job` is the unit of work of a worker: a trial of tuning, the examples of the transfer attack, or a run. Its result
depends on the plan and the seed alone, in whatever process it is computed.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gonio.errors import Interrupted, InvalidArgumentError
from gonio.escaping import shorten
from gonio.lab.judging.statistics import require_scipy
from gonio.lab.plan import RecipeEntry, StudyPlan, Tuning, installed_versions
from gonio.lab.record import RunRecord, trouble
from gonio.lab.running.cost import measure_costs
from gonio.lab.running.engines.local import Devices, Engine, Future, Local, NodeLost, call_apart
from gonio.lab.running.scripts import execute_script
from gonio.lab.running.study import Study, locked, made
from gonio.lab.running.training import execute_run, execute_transfer, execute_trial
from gonio.lab.running.tuning import Trial, propose
from gonio.messages import counted
from gonio.recipes import BASELINE

_POLL = 1.0  # seconds between two looks at the running jobs
_FEW, _SHORT = 3, 30.0  # finished runs that say what is usual; seconds that are never remarkable
_LOSSES = 3  # lost nodes after which a job counts as failed; the next command tries it again


def run(
    plan: StudyPlan,
    path: str | Path,
    *,
    jobs: int | None = None,
    engine: Engine | None = None,
    watcher: Watcher | None = None,
    run_timeout: float | None = None,
) -> Study:
    """Do every trial and run of the plan that the study in `path` lacks, then measure the costs of the recipes.

    Each run is a process of its own on one thread. It starts from its seed, so its result depends neither
    on `jobs` nor on the order, and a study that was killed and resumed equals one that was not. Only the
    caller writes to the study: a run is finished exactly when its row is committed.

    Args:
        path: the study's folder; created if absent, resumed if it contains the same plan.
        jobs: how many runs at a time on this machine; None is one per core, or one per accelerator.
        engine: where the runs are computed; None is this machine. It is closed at the end.
        watcher: receives the progress; see :func:`watcher_for`.
        run_timeout: seconds after which a run or trial is stopped and counts as failed; None: never. Without it the
            watcher is told about a run that takes ten times as long as the others.

    Raises:
        InvalidArgumentError: `run_timeout` is not positive.
        PlanChangedError: the folder's study has another plan.
        StudyLockedError: another process is running it.
        Interrupted: SIGTERM arrived. KeyboardInterrupt is passed on. In both cases the workers are
            stopped and finished runs are kept.

    Example:
        >>> import tempfile
        >>> training = gonio.lab.TrainingConfig(epochs=1, batch_size=50, lr=0.05)
        >>> plan = gonio.lab.make_plan([], seeds=2, training=training)  # the baseline alone
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     study = gonio.lab.run(plan, folder, jobs=2)
        ...     [record.status for record in study.runs()]
        ['finished', 'finished']
    """
    if engine is not None and jobs is not None:
        raise InvalidArgumentError(
            "jobs= has no meaning with an engine, which has its own number of slots",
            f"jobs={jobs} and an engine",
            "Leave one of them out.",
        )
    if run_timeout is not None and not run_timeout > 0:
        raise InvalidArgumentError("run_timeout must be a positive number of seconds", repr(run_timeout), "Give 3600.")
    engine = engine or Local(jobs, Devices.named(plan.device))
    require_scipy()
    watcher = watcher or Watcher()
    folder = made(path)
    with locked(folder), _stopped_once(f"the study {str(path)!r}") as check:
        study = Study.create_locked(folder, plan)
        try:
            Scheduler(study, engine, watcher, run_timeout, check).go()
            check()
            _measure(study, watcher, engine)
        finally:
            watcher.stop()
            engine.close()
    return study


class Scheduler:
    """The waiting and the running jobs of a study."""

    def __init__(
        self,
        study: Study,
        engine: Engine,
        watcher: Watcher,
        run_timeout: float | None,
        check: Callable[[], None],
    ) -> None:
        self._study, self._engine, self._watcher, self._run_timeout = study, engine, watcher, run_timeout
        self._check = check  # raises if an interruption was lost
        self._waiting: list[Job] = []
        self._running: dict[Future, Job] = {}
        self._losses: Counter[str] = Counter()
        self._ages: dict[Future, float] = {}  # seconds since the start
        self._durations: list[float] = []

    def go(self) -> None:
        """All trials, then the examples of the transfer attack, then the runs, until each has its row."""
        trials, runs = self._study.trials.left(), len(self._study.missing())
        tuning = self._study.plan.tuning
        total = len(self._study.plan.grid) + (tuning.trials * len(self._study.plan.recipes) if tuning else 0)
        self._watcher.start(total, total - trials - runs)
        for name in self._study.discarded:
            self._watcher.stage(f"damaged in the database, and removed: {name}")
        for jobs_of in (trial_jobs, transfer_jobs, run_jobs):
            self._compute(jobs_of(self._study))

    def _compute(self, jobs: list[Job]) -> None:
        self._waiting = jobs[::-1]
        try:
            while self._waiting or self._running:
                self._check()
                while self._waiting and len(self._running) < self._engine.slots:
                    job = self._waiting.pop()
                    function, arguments = job.call(self._engine)
                    self._running[self._engine.start(function, *arguments)] = job
                began = time.monotonic()
                ended = self._engine.wait(self._running, timeout=_POLL)
                # capped, so that a suspended machine or study does not count
                self._grow_older(min(time.monotonic() - began, 5 * _POLL))
                for future in ended:
                    self._settle(future, self._running[future])
                self._stop_overdue()
        finally:
            for future in self._running:
                future.stop()

    def _grow_older(self, seconds: float) -> None:
        """Count the time of the running jobs, and report one that has run ten times as long as usual."""
        usual = statistics.median(self._durations) if len(self._durations) >= _FEW else None
        for future, job in self._running.items():
            before = self._ages.get(future, 0.0)
            self._ages[future] = before + seconds
            limit = None if usual is None else max(10 * usual, _SHORT)
            if limit is not None and before <= limit < self._ages[future]:
                self._watcher.stage(f"{job.name}: running for {limit:.0f} s; usual are {usual:.2g} s")

    def _stop_overdue(self) -> None:
        overdue = [f for f in self._running if self._run_timeout and self._ages.get(f, 0.0) > self._run_timeout]
        for future in overdue:
            future.stop()
            job = self._running.pop(future)
            record = replace(job.failure, error=f"took longer than {self._run_timeout:g} s and was stopped")
            self._store(job, record, installed_versions())

    def _settle(self, future: Future, job: Job) -> None:
        """Commit the result of a job, or queue the job again if its machine was lost."""
        used = installed_versions()
        try:
            found = future.result()
            record, used = RunRecord(**found["record"]), found["versions"]
        except ChildProcessError as error:
            record = replace(job.failure, error=str(error))
        except NodeLost as error:
            self._losses[job.name] += 1
            if self._losses[job.name] < _LOSSES:
                self._watcher.stage(f"{job.name}: {error}; it is run again")
                self._waiting.append(job)
                del self._running[future]
                return
            record = replace(job.failure, error=f"{error}, {_LOSSES} times")
        del self._running[future]
        self._durations.append(self._ages.pop(future, 0.0))
        self._store(job, record, used)

    def _store(self, job: Job, record: RunRecord, used: Mapping[str, str]) -> None:
        """Commit the record, queue the jobs that can start now, and report it."""
        self._waiting = job.commit(record, used)[::-1] + self._waiting
        if job.counts:
            self._watcher.run_ended(record)
        elif record.status != "finished":
            self._watcher.stage(f"no transfer attack: {record.status}: {record.error}")


def _measure(study: Study, watcher: Watcher, engine: Engine) -> None:
    """Measure the costs after the runs, when the study does not use the machine."""
    entries = study.without_costs()
    if not entries:
        return
    watcher.stage("measuring step time and memory")
    try:
        if study.plan.device == "cpu":
            rows = call_apart(measure_costs, study.plan, entries)
        else:  # a process with a device of its own, as a run has it
            call = engine.start(measure_costs, study.plan, entries)
            try:
                rows = call.result()
            finally:
                call.stop()
    except (ChildProcessError, NodeLost) as error:
        watcher.stage(f"costs were not measured: {error}")
    else:
        study.add_costs([tuple(row) for row in rows])


@contextmanager
def _stopped_once(what: str) -> Iterator[Callable[[], None]]:
    """Turn the first Ctrl-C or SIGTERM into an exception and ignore later ones.

    A second Ctrl-C would interrupt the code that stops the workers and leave some of them running. Gives a function
    that raises the exception again: where a finalizer was running, Python has dropped it.
    """
    asked: list[int] = []

    def check() -> None:
        if asked:
            raise Interrupted(what) if asked[0] == signal.SIGTERM else KeyboardInterrupt

    def handle(number: int, frame: FrameType | None) -> None:
        if not asked:
            asked.append(number)
            check()

    if threading.current_thread() is not threading.main_thread():
        yield check  # Python lets only the main thread set signal handlers
        return

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise it is ignored or handled on purpose
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- jobs -----------------------------------------------------------------------------------------------

Call = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Job:
    """One computation in a process of its own, and how its record is stored.

    Attributes:
        name: for messages.
        failure: the record if the process died; the error is filled in.
        call: for the engine that starts it: the function, which returns a record and versions as data, and its
            arguments.
        commit: writes the record and the versions into the study, and returns the jobs that can start now and could not
            before.
        counts: whether it is one of the runs whose progress is reported.
    """

    name: str
    failure: RunRecord
    call: Callable[[Engine], Call]
    commit: Callable[[RunRecord, Mapping[str, str]], list[Job]]
    counts: bool = True


def run_jobs(study: Study) -> list[Job]:
    """The runs that the study lacks, in the plan's order."""
    return [_run_job(study, entry, seed) for entry, seed in study.missing()]


def _run_job(study: Study, entry: RecipeEntry, seed: int) -> Job:
    """One recipe × one seed."""

    def call(engine: Engine) -> Call:
        if not study.plan.scripted:
            return execute_run, (study.plan, entry, seed, study.trials.chosen(entry), study.transferred())
        folder = study.scratch(entry, seed).absolute() if engine.shares_files else None
        if folder is not None and study.path.is_dir():  # else it was moved, which the next commit says
            folder.parent.mkdir(exist_ok=True)
        return execute_script, (study.plan, entry, seed, folder)

    def commit(record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        study.add(entry, record, used)
        if record.status != "failed":  # the next attempt of a failed run may continue from its checkpoint
            shutil.rmtree(study.scratch(entry, seed), ignore_errors=True)
        return []

    return Job(f"{entry.name}, seed {seed}", RunRecord(entry.name, seed, "failed"), call, commit)


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
        _trial_job(study, entry, tuning, number, propose(study.plan, entry, number, done))
        for number in study.trials.ready(entry)
        if number not in known
    ]


def _trial_job(study: Study, entry: RecipeEntry, tuning: Tuning, number: int, values: dict[str, float]) -> Job:
    """One trial: a recipe with other values."""

    def commit(record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        before = set(study.trials.ready(entry))
        study.trials.add(entry, Trial(number, values, record), used)
        study.trials.choose_if_complete(entry)
        return _trials(study, entry, tuning, known=before)

    arguments = (study.plan, entry, tuning.seed, values)
    failure = RunRecord(entry.name, tuning.seed, "failed", settings=values)
    return Job(f"{entry.name}, trial {number + 1}", failure, lambda _: (execute_trial, arguments), commit)


def transfer_jobs(study: Study) -> list[Job]:
    """The examples that mislead another baseline, whose seed is none of the study's, if they are needed and absent."""
    config = None if study.plan.scripted else study.plan.threat  # a script's other baseline would be a whole run
    if config is None or study.transferred() is not None or not study.missing():
        return []

    def commit(record: RunRecord, used: Mapping[str, str]) -> list[Job]:
        # a failure is stored too, so that all runs of one study are attacked in the same way
        study.keep_transferred(record.robustness)
        return []

    failure, arguments = RunRecord(BASELINE, config.seed, "failed"), (study.plan, config)
    name = "the baseline of the transfer attack"
    return [Job(name, failure, lambda _: (execute_transfer, arguments), commit, counts=False)]


# --- progress -------------------------------------------------------------------------------------------


class Watcher:
    """Receives the progress of a comparison, and must not raise; this one writes nothing.

    Example:
        >>> from gonio.lab.running.scheduler import Watcher
        >>> Watcher().stage("measuring")
    """

    def start(self, total: int, done: int) -> None:
        """The study has `total` runs; `done` of them are finished already."""

    def run_ended(self, record: RunRecord) -> None:
        """One more run is stored."""

    def stage(self, text: str) -> None:
        """A message, e.g. that costs are measured now."""

    def said(self, text: str) -> None:
        """A result that stays on the screen."""

    def stop(self) -> None:
        """The end, also after an interruption."""


class Lines(Watcher):
    """Plain lines for logs: failures at once, progress at most every 10 s and every 10 %.

    Args:
        stream: where to write.
        clock: monotonic seconds; replaceable in tests.

    Example:
        >>> import sys
        >>> from gonio.lab.running.scheduler import Lines
        >>> watcher = Lines(sys.stdout)
        >>> watcher.start(total=2, done=0)
        2 runs
        >>> watcher.run_ended(gonio.lab.RunRecord("baseline", 0, "failed", error="no memory"))
        baseline, seed 0: failed: no memory
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total = self._done = self._said = self._before = 0
        self._began = self._last = 0.0

    def start(self, total: int, done: int) -> None:
        self._total, self._done, self._said, self._before = total, done, done, done
        self._began = self._last = self._clock()
        if done < total:
            self.stage(f"{counted(total, 'run')}, {done} done before" if done else counted(total, "run"))

    def run_ended(self, record: RunRecord) -> None:
        self._done += 1
        if text := trouble(record):
            self.stage(text)
        now = self._clock()
        due = now - self._last >= 10 and (self._done - self._said) * 10 >= self._total
        if due or self._done == self._total:
            left = (now - self._began) / (self._done - self._before) * (self._total - self._done)
            self._last, self._said = now, self._done
            self.stage(
                f"{self._done} of {counted(self._total, 'run')}" + (f", about {left:.0f} s left" if left else "")
            )

    def stage(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    said = stage


_BAR = 44  # columns of the bar, the counts and the time left


class Bar(Watcher):
    """A progress bar on a terminal, with failures printed above it as they happen.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> from gonio.lab.running.scheduler import Bar
        >>> bar = Bar(Console(file=io.StringIO()))
        >>> bar.start(total=2, done=1)
        >>> bar.stop()
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("training")

    def start(self, total: int, done: int) -> None:
        self._progress.update(self._task, total=total, completed=done)
        self._progress.start()

    def run_ended(self, record: RunRecord) -> None:
        self._progress.advance(self._task)
        if text := trouble(record):
            self._progress.console.print(text, style="red", markup=False, highlight=False)

    def stage(self, text: str) -> None:
        room = max(20, self._progress.console.width - _BAR)
        self._progress.update(self._task, description=shorten(text, longest=room))

    def said(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._progress.stop()


def watcher_for(stream: TextIO) -> Watcher:
    """A bar on a terminal, sparse plain lines otherwise.

    Example:
        >>> import io
        >>> type(gonio.lab.watcher_for(io.StringIO())).__name__
        'Lines'
    """
    return Bar(Console(file=stream)) if stream.isatty() else Lines(stream)
