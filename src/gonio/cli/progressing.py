"""How far a command is: a bar on a terminal, otherwise a line every ten seconds; both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gonio.cli.app import print_err
from gonio.messages import Message, fixed, local, say
from gonio.pages.tables import duration

_SECONDS = 10.0  # between two lines
_STEPS, _SHARE = 3, 0.05  # that must be done before a time is told


class Pace:
    """The time that is left, from the steps so far.

    The first step has the opening of the files in it, and one tensor, such as an embedding, may take as long as
    dozens of others: neither the first nor the longest of the rest counts.

    Args:
        clock: of seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last, self._done = clock(), 0
        self._steps: list[tuple[float, int]] = []  # seconds, and units done in them

    def left(self, done: int, total: int) -> float | None:
        """Seconds until all is done, at the pace of the steps so far.

        None while too few have been taken, and at the end.

        Called after each step with the units done, and all.
        """
        now = self._clock()
        if done > self._done:
            self._steps.append((now - self._last, done - self._done))
            self._last, self._done = now, done
        rest = sorted(self._steps[1:])[:-1]
        units = sum(count for _, count in rest)
        if done == total or len(rest) < _STEPS or units < _SHARE * total:
            return None
        return sum(seconds for seconds, _ in rest) / units * (total - done)


class Meter:
    """Called with (done, total) while work is under way."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock, self._pace = what, clock, Pace(clock)
        self._last = clock()

    def __call__(self, done: int, total: int) -> None:
        left = self._pace.left(done, total)
        if (now := self._clock()) - self._last < _SECONDS:
            return
        self._last = now
        told = {"what": fixed(self._what), "done": f"{done:,}", "total": f"{total:,}"}
        if left is None:
            print_err(say("{what}: {done} of {total}", **told))
        else:
            print_err(say("{what}: {done} of {total}, about {time} left", time=duration(left), **told))

    def about(self, text: Message) -> None:
        """What the work is about, shown until it is done where that is possible."""


@contextmanager
def progress(what: str) -> Iterator[Meter]:
    """A meter of this work; on a terminal a bar, which is gone when the work is done."""
    if not sys.stderr.isatty():
        yield Meter(what)
        return
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.text import Text

    class Headed(Progress):
        said = ""

        def get_renderables(self) -> Iterator[RenderableType]:
            if self.said:
                yield Text(self.said)
            yield self.make_tasks_table(self.tasks)

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    with Headed(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(local(what), left="")

        class OnTerminal(Meter):
            def __call__(self, done: int, total: int) -> None:
                left = self._pace.left(done, total)
                shown = "" if left is None else local(say("about {time} left", time=duration(left)))
                bar.update(task, completed=done, total=total, left=shown)

            def about(self, text: Message) -> None:
                bar.said = local(text)
                bar.refresh()

        yield OnTerminal(what)
