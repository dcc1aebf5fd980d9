"""Whole studies in their own processes: jobs, accidents, signals and kills change nothing; and their progress."""

from __future__ import annotations

import io
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cli.shell import COMMAND, write_task
from gonio import system
from gonio.errors import GonioError, Interrupted, InvalidArgumentError, StudyError
from gonio.lab import Run, RunRecord, Study, StudyPlan, make_plan, make_script_plan, run, watcher_for
from gonio.lab.running import scheduler
from gonio.lab.running.engines import Local
from gonio.lab.running.engines.local import Worker
from gonio.lab.running.scheduler import Bar, Lines, Watcher
from gonio.lab.running.scripts import execute_script
from lab.own_training import noisy
from lab.plans import OWN, TINY, Here
from lab.processes import alive, continue_study, patience, wait_for_runs, wait_for_silence

RECIPES = ["orthogonal-init", "switchable-norm"]


def plan_of(model: str = "model", *, seeds: int = 2) -> StudyPlan:
    return make_plan(RECIPES, task=f"{TINY}:task", model=f"{TINY}:{model}", seeds=seeds)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, ...]:
    """The runs of a study that nothing happened to."""
    return run(plan_of(), tmp_path_factory.mktemp("reference"), jobs=2).runs()


def test_results_do_not_depend_on_the_number_of_jobs(reference: tuple[RunRecord, ...], tmp_path: Path) -> None:
    study = run(plan_of(), tmp_path, jobs=1)
    assert [record.status for record in reference] == ["finished"] * 6
    assert study.runs() == reference
    assert study.missing() == []
    assert all(effect.step_time and effect.memory for effect in study.results().effects)


def test_more_seeds_run_only_what_is_missing(reference: tuple[RunRecord, ...], tmp_path: Path) -> None:
    first = run(plan_of(seeds=1), tmp_path)
    before = seconds_of(first)
    second = run(plan_of(seeds=2), tmp_path)
    assert second.runs() == reference
    # the CPU time of a run is never the same twice: these rows were not written again
    assert {key: value for key, value in seconds_of(second).items() if key in before} == before
    assert "After 3 runs had been done, seeds 1 were added" in second.results().notes[-1]


def seconds_of(study: Study) -> dict[tuple[str, int], float | None]:
    return {(record.recipe, record.seed): record.seconds for record in study.runs()}


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_must_be_positive(tmp_path: Path, jobs: int) -> None:
    with pytest.raises(InvalidArgumentError, match="jobs must be at least 1"):
        run(plan_of(), tmp_path, jobs=jobs)


@pytest.mark.slow
def test_a_run_that_does_not_end_is_stopped_after_its_time(tmp_path: Path) -> None:
    plan = make_script_plan(["scale-shift"], script=f"{OWN}:hangs", seeds=3)
    study = run(plan, tmp_path, jobs=2, run_timeout=4)
    errors = {(r.recipe, r.seed): r.error for r in study.runs() if r.status == "failed"}
    assert errors == dict.fromkeys([("baseline", 1), ("scale-shift", 1)], "took longer than 4 s and was stopped")
    assert [seed for _, seed in study.missing()] == [1, 1]
    with pytest.raises(InvalidArgumentError, match="run_timeout must be a positive number of seconds; found 0"):
        run(plan, tmp_path, run_timeout=0)


class Slow(Here):
    """By the engine's own clock the fourth call takes half a minute, all others half a second."""

    calls, waits, now = 0, 0, 0.0

    def start(self, function: Any, *arguments: Any) -> Any:
        self.calls += 1
        self.waits = 0
        return super().start(function, *arguments)

    def wait(self, futures: Collection[Any], *, timeout: float | None = None) -> list[Any]:
        self.waits += 1
        self.now += 0.5 if self.calls < 4 else 3.0
        return list(futures) if self.calls < 4 or self.waits > 10 else []


def test_a_run_that_takes_ten_times_the_usual_time_is_remarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = Slow(), io.StringIO()
    monkeypatch.setattr(scheduler, "_SHORT", 10.0)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: engine.now))
    run(make_script_plan([], script=f"{OWN}:score_of_seed", seeds=4), tmp_path, engine=engine, watcher=Lines(log))
    assert log.getvalue().count("running for") == log.getvalue().count("baseline, seed 3: running for ") == 1


@pytest.mark.parametrize(("seed", "end"), [(0, "by itself"), (1, "stopped"), (2, "killed")])
def test_the_processes_of_a_run_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, end: str
) -> None:
    journal = tmp_path / "journal"
    plan = make_script_plan([], script=f"{OWN}:leaves_processes", seeds=(seed,))
    journal.unlink(missing_ok=True)
    worker = Worker(_with_journal, str(journal), plan, tmp_path / "run")
    if end == "by itself":
        assert worker.result()["record"]["status"] == "finished"
    else:
        for _ in patience(100, pause=0.05):
            if journal.exists() and journal.read_text().strip():
                break
        if end == "stopped":
            worker.stop()
        else:
            os.kill(worker._process.pid or 0, signal.SIGKILL)
            with pytest.raises(ChildProcessError, match="SIGKILL"):
                worker.result()
    pids = list(map(int, journal.read_text().split()))
    assert len(pids) == 2
    for _ in patience(20, pause=0.05):
        if not [pid for pid in pids if system.alive(pid)]:
            break
    assert not [pid for pid in pids if system.alive(pid)]


def _with_journal(journal: str, plan: StudyPlan, folder: Path) -> dict[str, Any]:
    os.environ["GONIO_TEST_JOURNAL"] = journal  # the fork server has the variables of its first use
    return execute_script(plan, plan.baseline, plan.seeds[0], folder)


@pytest.mark.slow
def test_a_killed_fork_server_takes_no_run_with_it(tmp_path: Path) -> None:
    study = run(make_script_plan([], script=f"{OWN}:kills_its_server", seeds=3), tmp_path, jobs=3)
    assert [(record.status, record.score) for record in study.runs()] == [("finished", float(s)) for s in range(3)]


@pytest.mark.slow
def test_a_folder_that_is_moved_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    class Mover(Watcher):
        def run_ended(self, record: RunRecord) -> None:
            if record.seed == 1:
                (tmp_path / "study").rename(tmp_path / "moved")

    plan = make_script_plan([], script=f"{OWN}:score_of_seed", seeds=6)
    with pytest.raises(StudyError, match=r"the folder was moved or deleted. Move it back, and run the command"):
        run(plan, tmp_path / "study", jobs=1, watcher=Mover())
    assert not (tmp_path / "study").exists()
    assert len(Study.open(tmp_path / "moved").runs()) == 2
    assert len(run(plan, tmp_path / "moved", jobs=1).runs()) == 6


@pytest.mark.slow
def test_killed_and_continued_equals_uninterrupted(reference: tuple[RunRecord, ...], tmp_path: Path) -> None:
    folder = Study.create(tmp_path / "study", plan_of()).path
    process = continue_study(folder)
    wait_for_runs(folder, 2, process)
    time.sleep(random.Random(0).uniform(0, 0.2))
    process.kill()
    process.communicate()
    assert wait_for_silence(process.pid) == []
    found = Study.open(folder).runs()
    assert len(found) >= 2
    assert all(record in reference for record in found)
    study = run(plan_of(), folder, jobs=2)
    assert study.runs() == reference
    assert study.without_costs() == []


@pytest.mark.slow
def test_a_second_process_is_refused_and_termination_keeps_what_is_finished(tmp_path: Path) -> None:
    folder = Study.create(tmp_path / "study", plan_of("slow_model", seeds=20)).path
    process = continue_study(folder)
    wait_for_runs(folder, 1, process)
    second = continue_study(folder)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"process {process.pid} is running it. Wait until that process ends" in errors
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 75, errors
    assert wait_for_silence(process.pid) == []
    assert "was interrupted. Finished runs are stored" in errors
    assert "Traceback" not in errors
    assert 1 <= len(Study.open(folder).runs()) < 60


SEEDS = 300  # more than the kills let finish: the study is never idle
Rows = dict[tuple[str, int], RunRecord]


@pytest.mark.slow
@pytest.mark.parametrize(("lives", "kills"), [(60, 200)])
def test_kills_at_random_moments(tmp_path: Path, lives: int, kills: int) -> None:
    """`kills` processes die in `lives` of the study, one of them the parent at each life's end."""
    draw, folder = random.Random(9), tmp_path / "study"
    Study.create(folder, make_script_plan(["scale-shift"], script=f"{OWN}:noisy", seeds=SEEDS))
    kept: Rows = {}
    victims: Counter[str] = Counter()
    for life in range(lives):
        journal = tmp_path / f"journal-{life}"
        journal.touch()
        slow = f"{draw.choice((0, 0.02, 0.1))}"
        with open(tmp_path / "stderr", "a") as errors:
            process = continue_study(folder, errors, GONIO_TEST_JOURNAL=str(journal), GONIO_TEST_SLEEP=slow)
        children = (kills - lives) // lives + (life < (kills - lives) % lives)
        for _ in range(children):
            wait_for_start(journal, draw.randint(0, 4), process)
            time.sleep(draw.uniform(0, 0.2))
            victims[kill_a_child(process, draw)] += 1
        wait_for_start(journal, draw.randint(0, 3), process)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        victims["parent"] += 1
        process.wait()
        assert wait_for_silence(process.pid) == []  # nothing is stuck
        found = rows(folder)  # nothing is unreadable
        assert {key: found.get(key) for key in kept} == kept  # nothing is lost
        begun = Counter(journal.read_text().splitlines())
        # The server may die between forking a process and naming it: the run is begun again, and its end is not heard.
        assert begun.total() - len(begun) <= children
        assert not {f"{recipe} {seed}" for recipe, seed in kept} & set(begun)  # nothing is run twice
        kept = {key: record for key, record in found.items() if record.status == "finished"}
    assert sum(victims.values()) == kills, victims
    assert len(kept) > lives
    check_the_end(folder, tmp_path)


def check_the_end(folder: Path, scratch: Path) -> None:
    """The study can still be finished, and is what it would have been without the kills."""
    ended = run(Study.open(folder).plan, folder, jobs=2).runs()
    assert [record.status for record in ended] == ["finished"] * (2 * SEEDS)
    for record in ended[:: SEEDS // 3]:
        expected = noisy(Run({"name": record.recipe}, seed=record.seed, folder=scratch))
        assert record.score == expected


def rows(folder: Path) -> Rows:
    return {(record.recipe, record.seed): record for record in Study.open(folder).runs()}


def wait_for_start(journal: Path, more: int, process: subprocess.Popen[str]) -> None:
    """Until so many further runs have begun, or the study has ended."""
    goal = len(journal.read_text().splitlines()) + more
    for _ in patience(300, pause=0.005):
        if process.poll() is not None or len(journal.read_text().splitlines()) >= goal:
            return
    raise AssertionError("the study is stuck")


def kill_a_child(process: subprocess.Popen[str], draw: random.Random) -> str:
    """Kill a worker, the server that forks them, or the tracker beside it."""
    for _ in patience(300, pause=0.01):
        if children := sorted(set(map(int, alive(process.pid))) - {process.pid}):
            with suppress(ProcessLookupError):  # it ended while we chose
                os.kill(draw.choice(children), signal.SIGKILL)
            return "child"
        assert process.poll() is None, "the study ended by itself"
    raise AssertionError("the study has started nothing")


class Impatient:
    """Never gets anything done: a signal comes while it waits, and others while its jobs are stopped."""

    shares_files = False
    slots = 3

    def __init__(self, first: signal.Signals) -> None:
        self.first = first
        self.stopped: list[int] = []
        self.closed = False

    def start(self, function: Any, *arguments: Any) -> _Job:
        return _Job(self)

    def wait(self, futures: Collection[Any], *, timeout: float | None = None) -> list[Any]:
        os.kill(os.getpid(), self.first)
        return []

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.closed = True


class _Job:
    def __init__(self, engine: Impatient) -> None:
        self.engine = engine

    def result(self) -> Any:
        raise AssertionError

    def stop(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        self.engine.stopped.append(id(self))


@pytest.fixture
def noise_plan() -> StudyPlan:
    return make_script_plan(["scale-shift"], script=f"{OWN}:score_of_seed", seeds=2)


@pytest.mark.parametrize(
    ("first", "raised", "message"),
    [
        (signal.SIGINT, KeyboardInterrupt, "^$"),
        (signal.SIGTERM, Interrupted, "was interrupted. Finished runs are stored"),
    ],
)
def test_every_worker_is_stopped_whatever_comes_after(
    noise_plan: StudyPlan, first: signal.Signals, raised: type[BaseException], message: str, tmp_path: Path
) -> None:
    engine = Impatient(first)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised, match=message):
        run(noise_plan, tmp_path, engine=engine)
    assert (len(set(engine.stopped)), engine.closed) == (3, True)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert Study.create(tmp_path, noise_plan).missing() == list(noise_plan.grid)  # and the lock is free


def test_who_ignores_ctrl_c_goes_on_ignoring_it(noise_plan: StudyPlan, tmp_path: Path) -> None:
    """As in a shell's background job: the study goes on, and what else ends it is no Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(GonioError, match="it went on"):
            run(noise_plan, tmp_path, engine=_GoesOn(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class _GoesOn(Impatient):
    def wait(self, futures: Collection[Any], *, timeout: float | None = None) -> list[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        raise GonioError("it went on")

    def start(self, function: Any, *arguments: Any) -> Any:
        return Local(1).start(sorted, [2, 1])


class Finalizing(Local):
    """A Ctrl-C that arrives while a finalizer runs, whose exceptions Python drops."""

    def wait(self, futures: Any, *, timeout: float | None = None) -> Any:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return super().wait(futures, timeout=timeout)


def test_a_lost_ctrl_c_still_stops_the_study(noise_plan: StudyPlan, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run(noise_plan, tmp_path, engine=Finalizing(1))
    assert len(Study.open(tmp_path).missing()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_ctrl_c_twice_in_a_terminal(pause: float, tmp_path: Path) -> None:
    """The second reaches the command at its first, second or last breath."""
    write_task(tmp_path)
    words = ["compare", "orthogonal-init", "--task", "tiny.py:tiny", "--model", "tiny.py:slow", "--seeds", "4"]
    process = subprocess.Popen(
        [*COMMAND, *words, "--jobs", "2", "-o", "study"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_runs(tmp_path / "study", 1, process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches every process
    time.sleep(pause)
    for _ in range(2):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert wait_for_silence(process.pid) == []
    assert "Traceback" not in said
    with closing(sqlite3.connect(tmp_path / "study" / "study.db")) as database:
        (rows,) = database.execute("SELECT COUNT(*) FROM runs WHERE status = 'finished'").fetchone()
    assert 1 <= rows < 8


DONE = RunRecord("r", 0, "finished", 1.0)
LOST = RunRecord("r[red]", 3, "failed", error="ValueError: [bold]no[/bold]")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("total", "seconds", "every"), [(40, 1, 10), (10, 60, 1), (200, 6, 20)])
def test_lines_come_at_most_every_ten_seconds_and_every_tenth(total: int, seconds: int, every: int) -> None:
    stream, clock = io.StringIO(), Clock()
    watcher = Lines(stream, clock)
    watcher.start(total=total, done=0)
    for _ in range(total):
        clock.now += seconds
        watcher.run_ended(DONE)
    between = [f"{n} of {total} runs, about {seconds * (total - n)} s left" for n in range(every, total, every)]
    assert stream.getvalue().splitlines() == [f"{total} runs", *between, f"{total} of {total} runs"]


def test_a_continued_study_says_so_and_estimates_from_its_own_runs() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    lines.start(total=10, done=6)
    clock.now += 20
    lines.run_ended(DONE)
    assert stream.getvalue().splitlines() == ["10 runs, 6 done before", "7 of 10 runs, about 60 s left"]


def test_a_failure_is_said_at_once() -> None:
    stream = io.StringIO()
    lines = Lines(stream, Clock())
    lines.start(total=40, done=0)
    lines.run_ended(LOST)
    assert stream.getvalue().splitlines()[1:] == ["r[red], seed 3: failed: ValueError: [bold]no[/bold]"]


def test_bar_prints_failures_as_they_are() -> None:
    stream = io.StringIO()
    bar = Bar(Console(file=stream, force_terminal=True, width=120))
    bar.start(total=2, done=0)
    bar.run_ended(DONE)
    bar.run_ended(LOST)
    bar.stage("measuring")
    bar.stop()
    assert "r[red], seed 3: failed: ValueError: [bold]no[/bold]" in stream.getvalue()
    assert "2/2" in stream.getvalue()


def test_bar_shows_its_counts_beside_a_long_claim() -> None:
    stream = io.StringIO()
    bar = Bar(Console(file=stream, force_terminal=True, width=100))
    bar.start(total=2, done=1)
    bar.stage("trying: " + "moving scale between neurons costs accuracy in int8, and moving it back regains it " * 2)
    bar.stop()
    last = [line for line in stream.getvalue().splitlines() if "trying" in line][-1]
    assert "1/2" in last
    assert "-:--:--" in last


def test_bar_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(watcher_for(Terminal()), Bar)
    assert isinstance(watcher_for(io.StringIO()), Lines)
