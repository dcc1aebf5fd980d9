"""What differs between operating systems: locks, processes that end together, memory. Nothing else asks which it is.

Everywhere but on Windows processes are forked from a server that has imported torch already (40 ms instead of 3 s),
lead a group of their own, and on Linux adopt what their descendants leave behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

WINDOWS = sys.platform == "win32"
_LOCKED_BYTE = 2**30  # Windows locks bytes against reading too; this one lies behind any content
_PR_SET_CHILD_SUBREAPER = 36


def start_method() -> str:
    """How `multiprocessing` starts the processes of a study."""
    return "spawn" if WINDOWS else "forkserver"


def loader_context() -> str | None:
    """How a DataLoader starts workers: forked on Linux, because others could not import a user's file by its name."""
    return "fork" if sys.platform == "linux" else None


def lock_(file: IO[Any]) -> None:
    """Lock an open file until it is closed or the process ends; BlockingIOError if another process has the lock."""
    if not WINDOWS:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    at = file.tell()
    file.seek(_LOCKED_BYTE)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except OSError as error:
        raise BlockingIOError(str(error)) from None
    finally:
        file.seek(at)


def flush_folder(folder: Path) -> None:
    """Make the renaming of a file in a folder last beyond a power failure; Windows does so by itself."""
    if WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


# --- processes ----------------------------------------------------------------------------------------


@contextmanager
def interrupt_held() -> Iterator[None]:
    """A Ctrl-C during the block arrives at its end, and a process started inside never sees one.

    A terminal sends it to every process; only the parent handles it. On Windows the block changes nothing.
    """
    if WINDOWS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def lead_group() -> None:
    """Let this process be killed together with all that it starts, also with what outlives its own parent (Linux)."""
    if not WINDOWS:
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(pid: int, *, itself: bool = True) -> None:
    """Kill a process that leads a group, the group, and every process that they started; those that are left of them.

    `itself=False` spares the process and its group.
    """
    if WINDOWS:
        if itself:
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(pid)], capture_output=True, check=False)
        return
    started = _descendants(pid)
    if itself and pid > 0:
        _kill([pid])
        with suppress(ProcessLookupError, PermissionError):  # no group yet, or nothing is left of it
            os.killpg(pid, signal.SIGKILL)
    _kill(started)


def end_tree() -> None:
    """End this process, its group if it leads one, and every process that it started, now."""
    kill_tree(os.getpid(), itself=WINDOWS or os.getpgid(0) == os.getpid())
    os._exit(1)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie; True where the system does not tell."""
    if WINDOWS:
        return True
    try:
        os.kill(pid, 0)
        return _stat(pid)[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # no /proc
        return True


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, directly or not, also in sessions of their own; empty without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            children.setdefault(int(_stat(path.name)[1]), []).append(int(path.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int | str) -> list[str]:
    """State, parent and more of a process, from /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
