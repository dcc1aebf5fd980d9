"""Progress for logs and terminals: little, and failures at once."""

from __future__ import annotations

import io

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


def test_lines_come_at_most_every_ten_seconds_and_every_tenth() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    lines.start(total=40, done=0)
    for _ in range(40):
        clock.now += 1
        lines.run_ended(DONE)
    assert stream.getvalue().splitlines() == [
        "40 runs",
        "10 of 40 runs, about 30 s left",
        "20 of 40 runs, about 20 s left",
        "30 of 40 runs, about 10 s left",
        "40 of 40 runs",
    ]


def test_slow_runs_are_reported_by_the_tenth() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    lines.start(total=100, done=0)
    for _ in range(20):
        clock.now += 60
        lines.run_ended(DONE)
    assert stream.getvalue().splitlines()[1:] == [
        "10 of 100 runs, about 5400 s left",
        "20 of 100 runs, about 4800 s left",
    ]


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
