"""What the comparison asks of whatever computes its runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

__all__ = ["Engine", "Job", "NodeLost"]


class NodeLost(Exception):
    """The machine that computed a job is gone; the job itself has done nothing wrong and can be done again."""


class Job(Protocol):
    """One function call in a process of its own."""

    def result(self) -> Any:
        """Wait for the JSON-able result.

        Raises:
            ChildProcessError: the process ended without one; says of what.
            NodeLost: its machine is gone.
        """

    def stop(self) -> None:
        """End the process now, whatever it does."""


class Engine(Protocol):
    """Starts jobs and waits for them. It retries nothing and writes nothing: the caller does both.

    Attributes:
        shares_files: whether its jobs see the caller's files.
    """

    shares_files: bool

    @property
    def slots(self) -> int:
        """How many jobs may run at a time, now."""

    def start(self, function: Callable[..., Any], *arguments: Any) -> Job:
        """Call `function`, which must be importable, in a process of its own."""

    def wait(self, jobs: Collection[Job]) -> list[Job]:
        """Wait until at least one of the jobs has ended; those that have."""

    def close(self) -> None:
        """Give back what the engine holds; its jobs have ended or were stopped."""
