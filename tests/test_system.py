"""What differs between operating systems. The branch of Windows runs on fakes of the modules that only Windows has."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gonio
from gonio import system
from gonio.lab.running.engines.local import Worker, call_apart

POSIX_ALONE = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "readline", "syslog"}
POSIX_CALLS = {"fork", "killpg", "setpgid", "getpgid", "setsid", "sysconf", "getuid", "geteuid", "mkfifo", "nice"}
SIGNALS = {"SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "pthread_sigmask", "alarm", "setitimer"}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """As on Windows, as far as Python code can tell; what is done is recorded."""
    done: dict[str, list[Any]] = {"locking": [], "run": []}
    held: set[int] = set()

    def locking(descriptor: int, mode: int, count: int) -> None:
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        done["locking"].append((mode, at, count))
        if at in held:
            raise PermissionError(13, "Permission denied")
        held.add(at)

    def run(command: list[str], **_: Any) -> None:
        done["run"].append(command)
        with suppress(ProcessLookupError):  # it has ended
            os.kill(int(command[-1]), 9)

    monkeypatch.setattr(system, "WINDOWS", True)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr(subprocess, "run", run)
    return done


def test_nothing_else_uses_what_only_posix_has() -> None:
    root = Path(gonio.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        if path.name == "system.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                found += [f"{path.name}: {name}" for name in names & POSIX_ALONE]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                only = {"os": POSIX_CALLS, "signal": SIGNALS}.get(node.value.id, set())
                found += [f"{path.name}: {node.value.id}.{node.attr}"] if node.attr in only else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/proc"):
                found.append(f"{path.name}: {node.value}")
    assert not found


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a+") as one, (tmp_path / "lock").open("a+") as other:
        system.lock_(one)
        with pytest.raises(BlockingIOError, match="unavailable"):
            system.lock_(other)
    with (tmp_path / "lock").open("a+") as again:
        system.lock_(again)


def test_one_lock_at_a_time_on_windows(tmp_path: Path, windows: dict[str, list[Any]]) -> None:
    with (tmp_path / "lock").open("a+") as one, (tmp_path / "lock").open("a+") as other:
        other.write("12345")
        other.flush()
        system.lock_(one)
        with pytest.raises(BlockingIOError, match="Permission denied"):
            system.lock_(other)
        other.seek(0)
        assert other.read() == "12345"  # the number of the process that holds it can be read
    assert windows["locking"] == [(2, 2**30, 1)] * 2


def test_folders_are_flushed_where_that_exists(tmp_path: Path, windows: dict[str, list[Any]]) -> None:
    system.flush_folder(tmp_path / "absent")  # nothing is opened
    system.WINDOWS = False
    with pytest.raises(FileNotFoundError, match="absent"):
        system.flush_folder(tmp_path / "absent")
    system.flush_folder(tmp_path)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (system.memory() or 0) > 2**28
    monkeypatch.delattr(os, "sysconf")
    assert system.memory() is None


@pytest.mark.slow
def test_a_call_in_a_process_that_imports_anew(windows: dict[str, list[Any]]) -> None:
    assert system.start_method() == "spawn"
    assert call_apart(sorted, [3, 1, 2]) == [1, 2, 3]


def test_a_process_is_stopped_with_all_that_it_started_on_windows(windows: dict[str, list[Any]]) -> None:
    worker = Worker(time.sleep, 60)
    worker.stop()
    (command,) = windows["run"]
    assert command[:4] == ["taskkill", "/F", "/T", "/PID"]
    assert worker._process.exitcode == -9


def test_an_interrupt_is_held_where_signals_can_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked() -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    with system.interrupt_held():
        assert blocked()
    assert not blocked()
    monkeypatch.setattr(system, "WINDOWS", True)
    with system.interrupt_held():
        assert not blocked()
