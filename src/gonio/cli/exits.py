"""Exit codes, and which error ends with which."""

from __future__ import annotations

from enum import IntEnum

from gonio.errors import GonioError, Interrupted, InvalidArgumentError, UnknownNameError

__all__ = ["ExitCode", "code_of", "message_of"]


class ExitCode(IntEnum):
    """What the shell is told.

    A defect of gonio itself ends with a traceback and 70, `EX_SOFTWARE`: 1 would say that there is a finding.
    """

    FINE = 0
    FINDING = 1
    USAGE = 2
    REFUSED = 3
    PARTIAL = 4
    DEFECT = 70
    INTERRUPTED = 75
    CTRL_C = 130
    PIPE = 141


def code_of(error: GonioError | OSError) -> ExitCode:
    """The exit code of an error: a wrong name or value is usage, the rest is input that was refused.

    Example:
        >>> from gonio.cli.exits import code_of
        >>> from gonio.errors import UnknownNameError
        >>> code_of(UnknownNameError("recipe", "scale", ["scale-shift"])).name
        'USAGE'
    """
    if isinstance(error, Interrupted):
        return ExitCode.INTERRUPTED
    if isinstance(error, (UnknownNameError, InvalidArgumentError)):
        return ExitCode.USAGE
    return ExitCode.REFUSED


def message_of(error: GonioError | OSError) -> str:
    """The error in words, with the notes that were added on its way."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error)
    return "\n".join([text, *getattr(error, "__notes__", [])])
