"""Peak memory of one call: bytes newly allocated by torch, from the profiler's memory events."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.profiler import ProfilerActivity, profile

__all__ = ["highest", "peak_mib"]


def highest(changes: Iterable[int]) -> int:
    """The highest level that is reached by adding up allocations (positive) and releases (negative)."""
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak


def peak_mib(operation: Callable[[], object]) -> float:
    """MiB allocated at the worst moment of a call, beyond what was there before it.

    Of the second of two calls: the profiler does not see the release of what was allocated before it ever ran, as the
    gradients that a step begins by releasing.
    """
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = operation()
        del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return highest(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())) / 2**20
