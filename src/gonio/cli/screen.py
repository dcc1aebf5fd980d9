"""Data on stdout, talk on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

__all__ = ["deliver", "on_terminal", "put", "say"]


def put(text: str) -> None:
    """One piece of data, to stdout."""
    typer.echo(text)


def say(text: str) -> None:
    """A remark, to stderr."""
    typer.echo(text, err=True)


def deliver(text: str, target: str, what: str) -> None:
    """Write a result to a file and say so; `-` is stdout."""
    if target == "-":
        put(text)
        return
    Path(target).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    say(f"{what} written to {target}")


def on_terminal() -> bool:
    """Whether somebody is watching stderr."""
    return sys.stderr.isatty()
