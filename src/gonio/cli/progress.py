"""How far a command is: a bar on a terminal, a line every ten seconds elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from gonio.cli.screen import say

__all__ = ["counting"]

_SECONDS = 10.0


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that shows how far a loop is while the block runs."""
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    start = last = clock()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _SECONDS:
            last = now
            say(f"{what}: {done} of {total}, about {_time((now - start) * (total - done) / done)} left")

    return show


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
