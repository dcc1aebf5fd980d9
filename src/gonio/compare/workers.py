"""Processes of their own for single runs, which die with the comparison and never with each other."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

__all__ = ["PROCESS_DIED", "Worker", "die_with_parent"]

# Imported once, in the server from which every worker is forked: a run then starts in 40 ms, not in 3 s.
# torch.optim imports torch._dynamo when the first optimizer is made.
_PRELOAD = ["torch", "torch._dynamo", "torch.optim", "sklearn.datasets", "gonio.compare.cost"]
_ATTEMPTS, _PAUSE = 5, 0.2  # to start a process, and seconds between them
_GRACE = 10.0  # seconds that a process has to end after its result has come
PROCESS_DIED = "the process of this run died"


class Worker:
    """One function call in one new process, whose JSON-able result comes back.

    Args:
        function: importable, as are its arguments' types.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        for attempt in range(_ATTEMPTS):
            self.receiver, sender = context.Pipe(duplex=False)
            self._process: ForkServerProcess = context.Process(
                target=_call, args=(sender, os.getcwd(), function, arguments)
            )
            try:
                with _environment("OMP_NUM_THREADS", "1"), _without_interrupts(), sender:
                    forkserver.ensure_running()
                    self._process.start()
                return
            except (OSError, EOFError):  # the server was killed while it was asked; the next one is started
                self.receiver.close()
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE)
            except KeyboardInterrupt:  # it came while the process started, of which nobody else knows
                if self._process.pid is not None:
                    self.stop()
                raise

    def result(self) -> Any:
        """Wait for the result.

        Raises:
            ChildProcessError: the process died without one; says of what.
        """
        # Both: a process that the function started may keep the pipe open after the worker's death.
        connection.wait([self.receiver, self._process.sentinel])
        try:
            text = self.receiver.recv_bytes() if self.receiver.poll() else None
        except (EOFError, OSError):
            text = None
        self._process.join(_GRACE)
        self.stop()  # and what the function may have left running
        if text is None:
            raise ChildProcessError(f"{PROCESS_DIED} ({_cause(self._process.exitcode)})")
        return json.loads(text)

    @property
    def handles(self) -> tuple[Any, ...]:
        """What :func:`multiprocessing.connection.wait` can wait on; any of them ready: `result` returns."""
        return (self.receiver, self._process.sentinel)

    def stop(self) -> None:
        """End the process now, whatever it does, and every process that it started."""
        self._process.kill()
        with suppress(ProcessLookupError, PermissionError):  # no group yet, or nothing is left of it
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self.receiver.close()


def _call(sender: Connection, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs in the worker."""
    os.setpgid(0, 0)  # a group of its own: what the function starts can be ended with it
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `_without_interrupts`, under a server that others started
    os.chdir(folder)  # relative names of user files mean what they mean to the parent now
    os.dup2(2, 1)  # what user code prints is talk, and standard output is for data
    result = json.dumps(function(*arguments), allow_nan=False).encode()
    with suppress(BrokenPipeError):  # the parent has gone, and this process ends with it
        sender.send_bytes(result)


def die_with_parent() -> None:
    """From now on this process, and its group if it leads one, ends when the one that started it ends."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for_end, args=(parent.sentinel,), daemon=True).start()


def _wait_for_end(sentinel: int) -> None:
    connection.wait([sentinel])
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable while a process is started; the fork server keeps it for its workers."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT, which a process started inside inherits for good.

    Ctrl-C reaches every process of the terminal; the parent alone decides what it means. It is not lost
    here: it arrives at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
