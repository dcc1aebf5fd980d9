"""The program `gonio`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

import gonio
from gonio.cli import compare, explain, measure, recipe, report, reproduce
from gonio.cli.group import Commands
from gonio.cli.output import print_out

__all__ = ["app", "main"]

app = typer.Typer(
    name="gonio",
    cls=Commands,
    help="Measure and control the norms and angles of neural-network weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's panels would double the time of --help
    context_settings={"max_content_width": 120},
)
for _name, _command in (
    ("measure", measure.measure),
    ("explain", explain.explain),
    ("list", explain.list_names),
    ("plan", recipe.plan),
    ("apply", recipe.apply),
    ("fold", recipe.fold),
    ("compare", compare.compare),
    ("reproduce", reproduce.reproduce),
    ("report", report.report),
    ("status", report.status),
):
    app.command(_name)(_command)


def _version(requested: bool) -> None:
    if requested:
        print_out(f"gonio {gonio.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program and exit with its code."""
    shell = os.environ.get("_GONIO_COMPLETE", "")
    if shell.endswith("_source"):  # as click spells it; typer reverses the words
        os.environ["_GONIO_COMPLETE"] = f"source_{shell.removesuffix('_source')}"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the descriptor is closed, and no file that is opened later may get it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="replace")  # for an encoding that lacks a character
    try:
        app(prog_name="gonio")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # exiting: a second Ctrl-C would only print a traceback
