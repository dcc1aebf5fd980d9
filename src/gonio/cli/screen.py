"""Data on stdout, talk on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gonio.escaping import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["deliver", "put", "say", "show"]


def put(text: str) -> None:
    """One piece of data for people, to stdout; names in it cannot drive the terminal."""
    typer.echo(plain(text, longest=len(text)))


def say(text: str) -> None:
    """A remark, to stderr."""
    typer.echo(plain(text, longest=len(text)), err=True)


def deliver(text: str, target: str, what: str) -> None:
    """Write a result to a file and say so; `-` is stdout."""
    if target == "-":
        typer.echo(text, nl=not text.endswith("\n"))
        return
    Path(target).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    say(f"{what} written to {target}")


def show(table: RenderableType) -> None:
    """A table on stdout: as wide as the terminal, or 120 columns without colour where there is none."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(table)
