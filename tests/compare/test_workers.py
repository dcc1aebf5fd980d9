"""Single calls in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gonio.compare.engines.local import Worker


def test_the_result_comes_back() -> None:
    assert Worker(sorted, [3, 1, 2]).result() == [1, 2, 3]


def test_a_worker_has_the_folder_that_its_parent_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Worker(os.getcwd).result() == str(tmp_path)


def test_what_a_worker_prints_is_no_data(capfd: pytest.CaptureFixture[str]) -> None:
    Worker(print, "hello").result()
    captured = capfd.readouterr()
    assert captured.out == ""


def test_the_environment_of_the_parent_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    Worker(sorted, []).result()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    Worker(sorted, []).result()
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("function", "argument", "cause"),
    [(os._exit, 3, "exit code 3"), (sys.exit, 0, "exit code 0"), (signal.raise_signal, 9, "signal SIGKILL")],
)
def test_a_death_has_a_cause(function: object, argument: int, cause: str) -> None:
    with pytest.raises(ChildProcessError, match=rf"the process of this run died \({cause}\)"):
        Worker(function, argument).result()  # type: ignore[arg-type]


def test_stopping_ends_a_worker_at_once() -> None:
    worker = Worker(time.sleep, 60)
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < 5
