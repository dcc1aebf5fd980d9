"""The interface of an engine, and the one of this machine: processes that end with the comparison, and devices.

The processes are forked from a server that has imported torch, so a run starts in 40 ms instead of 3 s; on Windows each
imports it anew. The server imports this file first, beside the program that starts it; torch is therefore imported
inside of functions.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, forkserver, get_context, parent_process, set_forkserver_preload
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, cast

from gonio import system
from gonio.errors import InvalidArgumentError, with_place

KINDS = ("cpu", "cuda", "mps")
_ATTEMPTS, _PAUSE = 5, 0.2  # to start a process, and seconds between them
_POLL = 1.0  # seconds between two looks at a worker whose fork server is dead
_GRACE = 10.0  # seconds that a process has to end after its result has arrived


class NodeLost(Exception):
    """The machine that computed a call is gone; the call itself can be repeated."""


class Future(Protocol):
    """One function call in a process of its own."""

    def result(self) -> Any:
        """Wait for the JSON-able result.

        Raises:
            ChildProcessError: the call raised an exception, or its process died; gives the cause.
            NodeLost: its machine is gone.
        """

    def stop(self) -> None:
        """Kill the process now."""


class Engine(Protocol):
    """Starts calls and waits for them. It retries nothing and writes nothing; the caller does both."""

    shares_files: bool  # whether its processes see the caller's files

    @property
    def slots(self) -> int:
        """How many calls may run at a time, now."""

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Call `function`, which must be importable, in a process of its own."""

    def wait(self, futures: Collection[Future], *, timeout: float | None = None) -> list[Future]:
        """Wait until at least one of the calls has ended, or `timeout` seconds; returns those that have ended."""

    def close(self) -> None:
        """Release the engine's resources; its calls have ended or were stopped."""


@dataclass(frozen=True)
class Devices:
    """What the runs of a study compute on.

    Attributes:
        kind: `cpu`, `cuda` or `mps`; part of a plan, because results of different kinds differ in their last bits.
        visible: one value of `CUDA_VISIBLE_DEVICES` for each GPU; each process sees one of them, as its first. Empty
            if there is nothing to share out.

    Example:
        >>> gonio.lab.engines.Devices.named("cpu")
        Devices(kind='cpu', visible=())
    """

    kind: str = "cpu"
    visible: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str | None) -> Devices:
        """The devices of a name: `cpu`, `mps`, `cuda` (all GPUs) or `cuda:N`; None: the accelerator if there is one.

        Raises:
            InvalidArgumentError: there is no such device on this machine.
        """
        if name is None:
            return cls.named(next((kind for kind in ("cuda", "mps") if _count(kind)), "cpu"))
        kind, colon, number = name.partition(":")
        if kind not in KINDS or (colon and not (kind == "cuda" and number.isdecimal())):
            raise InvalidArgumentError("a device is cpu, cuda, cuda:N or mps", repr(name), "Choose one of them.")
        count = _count(kind)
        if count <= int(number or 0):
            found = f"{count} such device{'' if count == 1 else 's'} that torch can use"
            raise InvalidArgumentError(f"the device {name!r} must be on this machine", found, "Choose another, or cpu.")
        if kind != "cuda":
            return cls(kind)
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")  # of a shared machine: this process may use these alone
        names = listed.split(",") if listed else [str(index) for index in range(count)]
        return cls(kind, (names[int(number)],) if number else tuple(names[:count]))


def _count(kind: str) -> int:
    """How many devices of a kind there are; asking does not start CUDA in this process."""
    import torch

    if kind == "cuda":
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the driver is asked, so processes can be forked
        return torch.cuda.device_count()
    return int(kind == "cpu" or torch.backends.mps.is_available())


class Local:
    """Processes of this machine; they end with the caller.

    Args:
        jobs: how many at a time, on each GPU if `devices` are GPUs; None is one per core, or one per accelerator.
        devices: what the calls compute on; each process sees one of the GPUs alone.

    Raises:
        InvalidArgumentError: less than one.

    Example:
        >>> engine = gonio.lab.engines.Local(jobs=2)
        >>> call = engine.start(sorted, [2, 1])
        >>> [ended.result() for ended in engine.wait([call])]
        [[1, 2]]
    """

    shares_files = True

    def __init__(self, jobs: int | None = None, devices: Devices | None = None) -> None:
        devices = devices or Devices()
        usual = default_jobs() if devices.kind == "cpu" else 1
        self.slots = (usual if jobs is None else jobs) * max(1, len(devices.visible))
        if self.slots < 1:
            raise InvalidArgumentError("jobs must be at least 1", str(jobs), "Leave it out for one per core.")
        self._workers: dict[str, list[Worker]] = {name: [] for name in devices.visible}

    def start(self, function: Callable[..., Any], *arguments: Any) -> Worker:
        """A process forked from a server that has imported torch; it sees the GPU with the fewest calls."""
        for name, workers in self._workers.items():
            self._workers[name] = [worker for worker in workers if not worker.stopped]
        gpu = min(self._workers, key=lambda name: len(self._workers[name]), default=None)
        worker = Worker(function, *arguments, gpu=gpu)
        if gpu is not None:
            self._workers[gpu].append(worker)
        return worker

    def wait(self, futures: Collection[Future], *, timeout: float | None = None) -> list[Future]:
        """Those that have ended: at least one, or none after `timeout` seconds."""
        workers = [cast(Worker, future) for future in futures]  # `start` makes nothing else
        began = time.monotonic()
        while timeout is None or time.monotonic() - began < timeout:
            connection.wait([handle for worker in workers for handle in worker.handles], timeout or _POLL)
            if ended := [worker for worker in workers if worker.ended]:
                return [*ended]
        return []

    def close(self) -> None:
        """Nothing is held between calls."""


def default_jobs() -> int:
    """The number of cores that this process may use.

    Example:
        >>> gonio.lab.engines.default_jobs() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def call_apart(function: Callable[..., Any], *arguments: Any, gpu: str | None = None) -> Any:
    """The JSON-able result of a call in a process of its own, which sees those GPUs.

    Raises:
        ChildProcessError: the call raised an exception, or its process died; gives the cause.
    """
    worker = Worker(function, *arguments, gpu=gpu)
    try:
        return worker.result()
    finally:
        worker.stop()


class Worker:
    """One call of an importable function in one new process, which returns a JSON-able result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, gpu: str | None = None) -> None:
        self.stopped = False
        context: Any = get_context(system.start_method())
        for attempt in range(_ATTEMPTS):
            self._orphaned = False  # the server that has forked it is dead
            self.receiver, sender = context.Pipe(duplex=False)
            self._process: BaseProcess = context.Process(
                target=_call, args=(sender, os.getcwd(), gpu, function, arguments)
            )
            try:
                with server_running(), sender:
                    self._process.start()
                return
            except (OSError, EOFError):  # the server was killed meanwhile; the next attempt starts a new one
                self.receiver.close()
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE)
            except KeyboardInterrupt:  # it arrived while the process started, which nobody else could stop
                if self._process.pid is not None:
                    self.stop()
                raise

    def result(self) -> Any:
        """As :meth:`Future.result`."""
        while not self.ended:
            connection.wait(self.handles, _POLL)
        try:
            text = self.receiver.recv_bytes() if self.receiver.poll() else None
        except (EOFError, OSError):
            text = None
        self._process.join(_GRACE)
        self.stop()  # also what the function may have left running
        if text is None:
            code = self._process.exitcode
            cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            cause = "after the server that had forked it was killed" if self._orphaned else cause
            raise ChildProcessError(f"the process of this run died ({cause})")
        found = json.loads(text)
        if "error" in found:
            raise ChildProcessError(found["error"])
        return found["result"]

    @property
    def handles(self) -> tuple[Any, ...]:
        """Objects for :func:`multiprocessing.connection.wait`; `ended` may change when one of them is ready."""
        # both: a process that the function started may keep the pipe open after the worker's death
        return (self.receiver,) if self._orphaned else (self.receiver, self._process.sentinel)

    @property
    def ended(self) -> bool:
        """Whether `result` returns at once."""
        if self.receiver.poll():
            return True
        if not self._orphaned and not connection.wait([self._process.sentinel], 0):
            return False
        # The sentinel is ready also if the fork server was killed; the worker then goes on without it.
        self._orphaned = system.start_method() == "forkserver" and system.alive(self._process.pid or 0)
        return not self._orphaned

    def stop(self) -> None:
        """Kill the worker, every process of its group and every process that they started now."""
        self.stopped = True
        pid = self._process.pid or 0
        system.kill_tree(pid)
        self._process.kill()
        self._process.join()
        self.receiver.close()


def _call(
    sender: Connection, folder: str, gpu: str | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Runs in the worker."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA starts, which the fork server does not do
    system.lead_group()  # so that processes which the function starts can be killed with it
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `server_running`, for a server that somebody else started
    os.chdir(folder)  # so that relative names of user files mean the same as in the parent
    os.dup2(2, 1)  # output of user code goes to stderr; stdout is for results
    try:
        result = json.dumps({"result": function(*arguments)}, allow_nan=False).encode()
    except Exception as error:
        result = json.dumps({"error": with_place(error)}).encode()
    system.kill_tree(os.getpid(), itself=False)
    with suppress(BrokenPipeError):  # the parent is gone, and this process ends with it
        sender.send_bytes(result)


def die_with_parent() -> None:
    """End this process, and its group if it leads one, as soon as the process that started it ends."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for_end, args=(parent.sentinel,), daemon=True).start()


def _wait_for_end(sentinel: int) -> None:
    connection.wait([sentinel])
    system.end_tree()


# --- the server that processes are forked from --------------------------------------------------------------

# torch.optim imports torch._dynamo when the first optimizer is made.
_PRELOAD = ("torch", "torch._dynamo", "torch.optim", "sklearn.datasets", "gonio.lab.running.training")
_IS_SERVER = "GONIO_FORK_SERVER"
_SETTINGS = {
    _IS_SERVER: "1",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the driver is asked, so processes can be forked
}


@contextmanager
def server_running(*modules: str) -> Iterator[None]:
    """The server runs, and a process that is started in the block never sees a SIGINT.

    Args:
        modules: more that the server imports, if it is started now.
    """
    environment = {name: os.environ.get(name) for name in _SETTINGS}
    with system.interrupt_held():
        try:
            os.environ.update(_SETTINGS)  # the server keeps them for its processes
            if system.start_method() == "forkserver":
                set_forkserver_preload([__name__, *modules])
                _ensure_server()
            yield
        finally:
            for name, value in environment.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _ensure_server() -> None:
    try:
        forkserver.ensure_running()
    except ChildProcessError as error:  # only the process that began it can wait for it
        needs = "runs are processes of the fork server that this process has begun"
        found = "a process that was forked from the one whose server runs"
        do = "Start it with the method spawn, or before the first study."
        raise InvalidArgumentError(needs, found, do) from error


def _preload() -> None:
    """Import what the processes need.

    That makes a million objects that stay. The garbage collector would go through them again and again, which takes a
    third of the time; afterwards it passes over them, also in the forked processes.
    """
    gc.disable()
    for name in _PRELOAD:
        with suppress(ImportError):  # a process that needs it says so
            import_module(name)
    gc.freeze()
    gc.enable()


if os.environ.pop(_IS_SERVER, None):  # the server imports this file first
    _preload()
