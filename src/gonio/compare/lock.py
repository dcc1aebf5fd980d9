"""One process per study: an operating-system lock that dies with its holder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gonio.errors import StudyLockedError

__all__ = ["locked"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a study's folder; the folder must exist.

    The lock belongs to the open file, so a killed process leaves none behind, whatever the file says.

    Raises:
        StudyLockedError: another process holds it.
    """
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip()
            raise StudyLockedError(str(folder), f"process {holder}" if holder.isdigit() else "") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
