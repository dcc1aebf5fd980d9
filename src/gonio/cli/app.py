"""The commands together, and what the shell calls."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

import gonio
from gonio.cli import apply, compare, explain, fold, measure, plan, report, status
from gonio.cli.group import Commands
from gonio.cli.screen import put

__all__ = ["app", "main"]

app = typer.Typer(
    name="gonio",
    cls=Commands,
    help="Measure and control the norms and angles of neural-network weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: rich's panels would double the time that --help takes.
    rich_markup_mode=None,
)
for _name, _module in (
    ("measure", measure),
    ("explain", explain),
    ("plan", plan),
    ("apply", apply),
    ("fold", fold),
    ("compare", compare),
    ("report", report),
    ("status", status),
):
    app.command(_name)(_module.command)


def _version(asked: bool) -> None:
    if asked:
        put(f"gonio {gonio.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        app(prog_name="gonio")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already: a second Ctrl-C would only make a traceback
