"""The command group: every error that gonio raises on purpose becomes a message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from gonio.cli.output import print_err
from gonio.errors import GonioError, Interrupted, InvalidArgumentError, PlanChangedError, UnknownNameError

__all__ = ["Commands", "ExitCode"]


class ExitCode(IntEnum):
    """Exit codes. A defect of gonio ends with a traceback and 70 (`EX_SOFTWARE`), because 1 means a finding."""

    FINE = 0
    FINDING = 1
    USAGE = 2
    REFUSED = 3
    PARTIAL = 4
    DEFECT = 70
    INTERRUPTED = 75
    CTRL_C = 130
    PIPE = 141


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that no handler takes it for a failure."""


class Commands(TyperGroup):
    """Runs a command; every ending has one of the exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with _sigterm_raises():
                return super().invoke(ctx)
        except BrokenPipeError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
            raise typer.Exit(ExitCode.PIPE) from error
        except (GonioError, OSError) as error:
            print_err(f"gonio: {_message(error)}")
            raise typer.Exit(_exit_code(error)) from error
        except KeyboardInterrupt as error:
            resume = "; rerun the same command to resume" if ctx.invoked_subcommand in ("compare", "reproduce") else ""
            print_err(f"gonio: stopped by Ctrl-C{resume}")
            raise typer.Exit(ExitCode.CTRL_C) from error
        except Terminated as error:
            print_err("gonio: terminated")
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except Exception as error:
            if type(error).__module__.startswith(("typer.", "click.")):
                raise
            print_err(traceback.format_exc())
            print_err("gonio: this is a defect of gonio; please report it with the lines above")
            raise typer.Exit(ExitCode.DEFECT) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with their whole summaries; click would cut them."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands])


def _exit_code(error: GonioError | OSError) -> ExitCode:
    """A wrong name or value is a usage error, everything else is refused input."""
    if isinstance(error, Interrupted):
        return ExitCode.INTERRUPTED
    return ExitCode.USAGE if isinstance(error, (UnknownNameError, InvalidArgumentError)) else ExitCode.REFUSED


def _message(error: GonioError | OSError) -> str:
    """The message with the notes that were added to the error."""
    if isinstance(error, PlanChangedError):
        return _plan_changes(error)
    named = isinstance(error, OSError) and error.filename is not None
    text = f"{error.filename}: {error.strerror}" if named else str(error)  # type: ignore[union-attr]
    return "\n".join([text, *getattr(error, "__notes__", [])])


def _plan_changes(error: PlanChangedError) -> str:
    """The differences of two plans as a table."""
    rows = [("setting", "study", "command"), *((key, old[:60], new[:60]) for key, old, new in error.changes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    do = "Repeat the study's settings to resume it, or choose another folder; only seeds and recipes can be added."
    return "\n  ".join(["the study has another plan:", *lines]) + f"\n{do}"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Inside the block SIGTERM raises :class:`Terminated`; only a main thread can have a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
