"""Results go to stdout, messages and progress to stderr."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gonio.escaping import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["print_err", "print_out", "progress", "save", "save_formats", "show"]

_FORMATS = {"html": "page", "json": "JSON", "csv": "CSV", "md": "markdown", "tex": "LaTeX"}
_WIDTH = 100  # columns of a table that does not go to a terminal
_SECONDS = 10.0  # between two lines of progress


def print_out(text: str) -> None:
    """Print to stdout, without control characters."""
    typer.echo(plain(text, longest=len(text)))


def print_err(text: str) -> None:
    """Print to stderr, without control characters."""
    typer.echo(plain(text, longest=len(text)), err=True)


def show(table: RenderableType) -> None:
    """Print to stdout with colours if it is a terminal (unless NO_COLOR is set), otherwise as plain text."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    stream = io.StringIO()
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    Console(file=stream, width=width, color_system=None).print(table)
    print_out("\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines()))


def save(text: str, target: str, what: str) -> None:
    """Write a result to a file, with a message; `-` is stdout."""
    if target == "-":
        typer.echo(text, nl=not text.endswith("\n"))
        return
    Path(target).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    print_err(f"{what} written to {target}")


def save_formats(targets: Mapping[str, str | None], writers: Mapping[str, Callable[[], str]]) -> bool:
    """Write a result in each format that has a target; whether any has one."""
    for name, target in targets.items():
        if target is not None:
            save(writers[name](), target, _FORMATS[name])
    return any(target is not None for target in targets.values())


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total): a bar on a terminal, otherwise a line every ten seconds; on stderr."""
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    start = last = clock()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _SECONDS:
            last = now
            left = (now - start) * (total - done) / done
            shown = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
            print_err(f"{what}: {done} of {total}, about {shown} left")

    return update
