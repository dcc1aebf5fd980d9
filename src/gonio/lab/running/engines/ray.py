"""Runs as tasks of an already running Ray cluster.

A task calls its function in a process that a server of its worker forks, as on one machine. A run then starts in a
fraction of a second, where a new worker of Ray has to import torch, and one that dies leaves the worker to the next.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, cast

from gonio.errors import InvalidArgumentError, NotApplicableError, first_line, import_extra
from gonio.lab.running.engines.local import Future, NodeLost, call_apart, server_running

_ANSWER = 20.0  # seconds for a cluster to accept a connection
_POLL = 1.0  # seconds until an interruption is noticed
_GONE = 3.0  # seconds after a worker's end in which the end of its node becomes known


class Ray:
    """Tasks of an already running Ray cluster, each in a process of its own. Ray retries none of them.

    Connects to the cluster at `address`, at `RAY_ADDRESS`, or on this machine; it neither starts nor stops one. Every
    node needs the same gonio, and the user's files under the same paths. Only the driver writes the study.

    Args:
        address: of the cluster's head, as `ray.init` takes it.
        cpus, gpus: resources of one run, which always computes on one thread.
        jobs: largest number of runs at a time; None: as many as fit into the cluster.

    Raises:
        MissingExtraError: ray is not installed.
        NotApplicableError: there is no cluster to connect to.
        InvalidArgumentError: no node has room for one run.

    Example:
        >>> gonio.lab.engines.Ray(cpus=0)  # with a cluster: gonio.lab.run(plan, "study", engine=Ray())
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: a run needs cpus above 0, gpus from 0 on and at least one job; found ...
    """

    shares_files = False

    def __init__(
        self, *, address: str | None = None, cpus: float = 1.0, gpus: float = 0.0, jobs: int | None = None
    ) -> None:
        if not cpus > 0 or not gpus >= 0 or (jobs is not None and jobs < 1):
            raise InvalidArgumentError(
                "a run needs cpus above 0, gpus from 0 on and at least one job",
                f"cpus={cpus}, gpus={gpus}, jobs={jobs}",
                "Leave them out for one core per run, as many runs as fit.",
            )
        self._ray, self._cpus, self._gpus, self._jobs = _library(), cpus, gpus, jobs
        self._connected = not self._ray.is_initialized()
        if self._connected:
            self._connect(address)
        if self._room() < 1:
            nodes = [(node.get("CPU", 0), node.get("GPU", 0)) for node in self._nodes()]
            self.close()
            raise InvalidArgumentError(
                f"a run of {cpus:g} CPUs and {gpus:g} GPUs needs a node that has them",
                f"nodes with {nodes}",
                "Ask for less, or add a node.",
            )
        self._task = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(_call)

    def _connect(self, address: str | None) -> None:
        where = address or os.environ.get("RAY_ADDRESS", "auto")
        try:
            _knock(where)  # Ray itself retries for a quarter of an hour
            self._ray.init(address=where, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise NotApplicableError(
                "--engine ray",
                "this machine" if where == "auto" else where,
                f"no Ray cluster answers there: {error}",
                "Start one with `ray start --head`, or name its head in RAY_ADDRESS.",
            ) from error

    @property
    def slots(self) -> int:
        """How many runs fit on the nodes that are alive; at least 1, because nodes may come back."""
        return max(1, self._room() if self._jobs is None else min(self._jobs, self._room()))

    def _nodes(self) -> list[dict[str, float]]:
        """The resources of the nodes that are alive."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _room(self) -> int:
        needs = [(name, need) for name, need in (("CPU", self._cpus), ("GPU", self._gpus)) if need]
        return sum(min(int(node.get(name, 0) / need + 1e-9) for name, need in needs) for node in self._nodes())

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """A task; it waits in the cluster's queue until a node has room."""
        return _Task(self._ray, self._task.remote(os.getcwd(), function, arguments))

    def wait(self, futures: Collection[Future], *, timeout: float | None = None) -> list[Future]:
        """Those that have ended: at least one, or none after `timeout` seconds."""
        tasks = {cast(_Task, future).reference: future for future in futures}
        ready: list[Any] = []
        began = time.monotonic()
        while not ready and (timeout is None or time.monotonic() - began < timeout):
            ready, _ = self._ray.wait(list(tasks), num_returns=1, timeout=_POLL)
        return [tasks[reference] for reference in ready]

    def close(self) -> None:
        """Disconnect if the engine connected; the cluster keeps running."""
        if self._connected:
            self._ray.shutdown()
            self._connected = False


class _Task:
    """A call in the cluster."""

    def __init__(self, ray: ModuleType, reference: Any) -> None:
        self._ray = ray
        self.reference = reference
        self._nodes = self._alive()

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}

    def _node_lost(self) -> bool:
        """Whether a node is gone that was there at the start: one that shuts down ends its workers before itself."""
        deadline = time.monotonic() + _GONE
        while not (gone := self._nodes - self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return bool(gone)

    def result(self) -> Any:
        """As :meth:`gonio.lab.engines.Future.result`."""
        errors = self._ray.exceptions
        try:
            result, death = json.loads(self._ray.get(self.reference))
        except (errors.NodeDiedError, errors.LocalRayletDiedError) as error:
            raise NodeLost(f"its node was lost ({first_line(error)})") from error
        except errors.OutOfMemoryError as error:
            raise ChildProcessError(f"the node ran out of memory and ended the run ({first_line(error)})") from error
        except errors.RayError as error:
            if isinstance(error, errors.WorkerCrashedError) and self._node_lost():
                raise NodeLost("its worker ended with a node") from error
            said = f"{first_line(error, kind=True)}"
            raise ChildProcessError(f"the process of this run died ({said})") from error
        if death:
            raise ChildProcessError(death)
        return result

    def stop(self) -> None:
        """Cancel the task, running or waiting."""
        self._ray.cancel(self.reference, force=True)


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at `host:port`; Ray reads other forms of an address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER):
            pass


def _call(folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Runs on a node: the result and how the process died, one of them None, as text, as between local processes."""
    if os.path.isdir(folder):
        os.chdir(folder)  # so that relative names of user files mean the same as in the driver
    with server_running("ray"):  # which the worker's own program imports, and each process with it: 0.4 s
        pass
    try:
        # Ray names the task's GPUs anew for each, and the server that forks keeps the variables that it started with.
        return json.dumps([call_apart(function, *arguments, gpu=os.environ.get("CUDA_VISIBLE_DEVICES")), None])
    except ChildProcessError as error:
        return json.dumps([None, str(error)])


def _library() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import, which reads it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return import_extra("ray", "--engine ray", package="ray", extra="ray")
