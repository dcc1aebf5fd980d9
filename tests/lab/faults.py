"""A layer under a study that fails, or kills the process, at the n-th thing that is done to a file or the database."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

KILLED = 9
FILES: tuple[tuple[Any, str], ...] = (
    (io, "open"),
    *((os, name) for name in ("fsync", "open", "replace", "mkdir", "unlink", "close")),
    (fcntl, "flock"),
    (shutil, "rmtree"),
)


def fail(what: str) -> None:
    """The disk is full."""
    if what.startswith("sqlite"):
        raise sqlite3.OperationalError("database or disk is full")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)


def kill(what: str) -> None:
    """As `kill -9`, or a power cut on a disk that keeps what was synced."""
    os._exit(KILLED)


class Layer:
    """Counts operations; at number `at` it does `fault`."""

    def __init__(self, at: int, fault: Callable[[str], None]) -> None:
        self.at, self.fault, self.done = at, fault, 0
        self.seen: list[str] = []

    def step(self, what: str) -> None:
        self.done += 1
        self.seen.append(what)
        if self.done == self.at:
            self.fault(what)

    def around(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.step(what)
            return function(*arguments, **named)

        return call

    def connection(self) -> type[sqlite3.Connection]:
        """A connection whose statements, commits and end are operations; a commit has a before and an after."""
        layer = self

        class Connection(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                layer.step(f"sqlite {arguments[0][:20]}")
                return super().execute(*arguments)

            def executemany(self, *arguments: Any) -> sqlite3.Cursor:
                layer.step("sqlite many")
                return super().executemany(*arguments)

            def executescript(self, *arguments: Any) -> sqlite3.Cursor:
                layer.step("sqlite script")
                return super().executescript(*arguments)

            def __exit__(self, *error: Any) -> Any:
                if error[0] is None:
                    layer.step("sqlite commit")
                found = super().__exit__(*error)
                if error[0] is None:
                    layer.step("sqlite committed")
                return found

        return Connection


@contextmanager
def faulty(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, everything that Python code does to files and databases goes through the layer."""
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        for owner, name in FILES:
            patch.setattr(owner, name, layer.around(name, getattr(owner, name)))

        def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
            layer.step("sqlite connect")
            return connect(*arguments, **named, factory=layer.connection())

        patch.setattr(sqlite3, "connect", connected)
        yield
