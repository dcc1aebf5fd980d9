"""Runs as processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from multiprocessing import connection
from typing import Any, cast

from gonio.compare.engines.engine import Job
from gonio.compare.workers import Worker
from gonio.errors import InvalidArgumentError

__all__ = ["Local", "default_jobs"]


class Local:
    """Processes of this machine, which die with the caller and never with each other.

    Args:
        jobs: how many at a time; None is one per core.

    Raises:
        InvalidArgumentError: less than one.

    Example:
        >>> engine = gonio.compare.engines.Local(jobs=2)
        >>> job = engine.start(sorted, [2, 1])
        >>> [ended.result() for ended in engine.wait([job])]
        [[1, 2]]
    """

    shares_files = True

    def __init__(self, jobs: int | None = None) -> None:
        self.slots = default_jobs() if jobs is None else jobs
        if self.slots < 1:
            raise InvalidArgumentError("jobs must be at least 1", str(jobs), "Leave it out for one per core.")

    def start(self, function: Callable[..., Any], *arguments: Any) -> Worker:
        """A process forked from a server that has imported torch."""
        return Worker(function, *arguments)

    def wait(self, jobs: Collection[Job]) -> list[Job]:
        """Those that have ended, at least one."""
        workers = [cast(Worker, job) for job in jobs]  # `start` makes nothing else
        ready = connection.wait([handle for worker in workers for handle in worker.handles])
        return [worker for worker in workers if any(handle in ready for handle in worker.handles)]

    def close(self) -> None:
        """Nothing is held between jobs."""


def default_jobs() -> int:
    """The cores that this process may use.

    Example:
        >>> gonio.compare.default_jobs() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
