"""Progress for logs and terminals: little, and failures at once."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gonio.compare import Bar, Lines, RunRecord, watcher_for

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


def test_bar_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(watcher_for(Terminal()), Bar)
    assert isinstance(watcher_for(io.StringIO()), Lines)
