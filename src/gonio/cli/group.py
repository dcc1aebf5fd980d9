"""The command group: every error that gonio raises on purpose becomes a message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from gonio.cli.exits import ExitCode, code_of, message_of
from gonio.cli.screen import say
from gonio.errors import GonioError

__all__ = ["Commands", "Terminated"]


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that nothing on the way takes it for a failure."""


class Commands(TyperGroup):
    """Runs a command and translates how it ended."""

    def invoke(self, ctx: Any) -> Any:
        """Run; leave with one of :class:`ExitCode`."""
        try:
            with _terminating():
                return super().invoke(ctx)
        except BrokenPipeError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
            raise typer.Exit(ExitCode.PIPE) from error
        except (GonioError, OSError) as error:
            say(f"gonio: {message_of(error)}")
            raise typer.Exit(code_of(error)) from error
        except KeyboardInterrupt as error:
            goes_on = "; the same command goes on where it was" if ctx.invoked_subcommand == "compare" else ""
            say(f"gonio: stopped by Ctrl-C{goes_on}")
            raise typer.Exit(ExitCode.CTRL_C) from error
        except Terminated as error:
            say("gonio: terminated")
            raise typer.Exit(ExitCode.INTERRUPTED) from error
        except Exception as error:
            if type(error).__module__.startswith("typer."):
                raise
            say(traceback.format_exc())
            say("gonio: this is a defect of gonio itself; please report it with the lines above")
            raise typer.Exit(ExitCode.DEFECT) from error


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` inside the block; only a main thread can have a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
