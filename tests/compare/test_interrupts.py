"""Ctrl-C out of impatience: what comes after the first one changes nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cli.shell import COMMAND, write_task
from compare.processes import wait_for_runs, wait_for_silence
from gonio.compare import Plan, Study, make_script_plan, run
from gonio.compare.engines import Local
from gonio.errors import GonioError, Interrupted

OWN = str(Path(__file__).with_name("own_training.py"))


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

    def wait(self, jobs: Collection[Any]) -> list[Any]:
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
def plan() -> Plan:
    return make_script_plan(["scale-shift"], script=f"{OWN}:score_of_seed", seeds=2)


@pytest.mark.parametrize(
    ("first", "raised", "message"),
    [
        (signal.SIGINT, KeyboardInterrupt, "^$"),
        (signal.SIGTERM, Interrupted, "was interrupted. Every finished run is kept"),
    ],
)
def test_every_worker_is_stopped_whatever_comes_after(
    plan: Plan, first: signal.Signals, raised: type[BaseException], message: str, tmp_path: Path
) -> None:
    engine = Impatient(first)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised, match=message):
        run(plan, tmp_path, engine=engine)
    assert (len(set(engine.stopped)), engine.closed) == (3, True)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert Study.create(tmp_path, plan).missing() == list(plan.grid)  # and the lock is free


def test_who_ignores_ctrl_c_goes_on_ignoring_it(plan: Plan, tmp_path: Path) -> None:
    """As in a shell's background job: the study goes on, and what else ends it is no Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(GonioError, match="it went on"):
            run(plan, tmp_path, engine=_GoesOn(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class _GoesOn(Impatient):
    def wait(self, jobs: Collection[Any]) -> list[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        raise GonioError("it went on")

    def start(self, function: Any, *arguments: Any) -> Any:
        return Local(1).start(sorted, [2, 1])


@pytest.mark.parametrize("pause", [0.0, 0.02, 0.3])
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
