"""Progress of a running comparison: a bar, plain lines, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gonio.compare.judging.results import RunRecord


class Watcher(Protocol):
    """Receives the progress of a comparison; must not raise."""

    def start(self, total: int, done: int) -> None:
        """The study has `total` runs; `done` of them are finished already."""

    def run_ended(self, record: RunRecord) -> None:
        """One more run is stored."""

    def stage(self, text: str) -> None:
        """A message, e.g. that costs are measured now."""

    def stop(self) -> None:
        """The end, also after an interruption."""


class Quiet:
    """Writes nothing.

    Example:
        >>> gonio.compare.Quiet().stage("measuring")
    """

    def start(self, total: int, done: int) -> None: ...
    def run_ended(self, record: RunRecord) -> None: ...
    def stage(self, text: str) -> None: ...
    def stop(self) -> None: ...


def trouble(record: RunRecord) -> str | None:
    """One line about a run that did not finish, else None."""
    if record.status == "finished":
        return None
    return f"{record.recipe}, seed {record.seed}: {record.status}: {record.error}"


class Lines:
    """Plain lines for logs: failures at once, progress at most every 10 s and every 10 %.

    Args:
        stream: where to write.
        clock: monotonic seconds; replaceable in tests.

    Example:
        >>> import sys
        >>> watcher = gonio.compare.Lines(sys.stdout)
        >>> watcher.start(total=2, done=0)
        2 runs
        >>> watcher.run_ended(gonio.compare.RunRecord("baseline", 0, "failed", error="no memory"))
        baseline, seed 0: failed: no memory
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total = self._done = self._said = 0
        self._began = self._last = 0.0
        self._before = 0

    def start(self, total: int, done: int) -> None:
        self._total, self._done, self._said, self._before = total, done, done, done
        self._began = self._last = self._clock()
        if done < total:
            self._say(f"{total} runs, {done} done before" if done else f"{total} runs")

    def run_ended(self, record: RunRecord) -> None:
        self._done += 1
        text = trouble(record)
        if text:
            self._say(text)
        now = self._clock()
        due = now - self._last >= 10 and (self._done - self._said) * 10 >= self._total
        if due or self._done == self._total:
            left = (now - self._began) / (self._done - self._before) * (self._total - self._done)
            self._last, self._said = now, self._done
            self._say(f"{self._done} of {self._total} runs" + (f", about {left:.0f} s left" if left else ""))

    def stage(self, text: str) -> None:
        self._say(text)

    def stop(self) -> None:
        pass

    def _say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Bar:
    """A progress bar on a terminal, with failures printed above it as they happen.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> bar = gonio.compare.Bar(Console(file=io.StringIO()))
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
        text = trouble(record)
        if text:
            self._progress.console.print(text, style="red", markup=False, highlight=False)

    def stage(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def stop(self) -> None:
        self._progress.stop()


def watcher_for(stream: TextIO) -> Watcher:
    """A bar on a terminal, sparse plain lines otherwise.

    Example:
        >>> import io
        >>> type(gonio.compare.watcher_for(io.StringIO())).__name__
        'Lines'
    """
    return Bar(Console(file=stream)) if stream.isatty() else Lines(stream)
