"""The interface of an engine: it starts function calls in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol


class NodeLost(Exception):
    """The machine that computed a call is gone; the call itself can be repeated."""


class Future(Protocol):
    """One function call in a process of its own."""

    def result(self) -> Any:
        """Wait for the JSON-able result.

        Raises:
            ChildProcessError: the process ended without one; gives the cause.
            NodeLost: its machine is gone.
        """

    def stop(self) -> None:
        """Kill the process now."""


class Engine(Protocol):
    """Starts calls and waits for them. It retries nothing and writes nothing; the caller does both.

    Attributes:
        shares_files: whether its processes see the caller's files.
    """

    shares_files: bool

    @property
    def slots(self) -> int:
        """How many calls may run at a time, now."""

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Call `function`, which must be importable, in a process of its own."""

    def wait(self, futures: Collection[Future], *, timeout: float | None = None) -> list[Future]:
        """Wait until at least one of the calls has ended, or `timeout` seconds; returns those that have ended."""

    def close(self) -> None:
        """Release the engine's resources; its calls have ended or were stopped."""
