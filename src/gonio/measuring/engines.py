"""Where tensors are measured: in this process, or by the workers of a ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.measuring.entry import Entry
from gonio.measuring.operator_norm import Also
from gonio.measuring.source import Source, contents_of
from gonio.measuring.tensor import TensorMeasurement, measure_tensor

__all__ = ["measure_here", "measure_on_ray"]

Progress = Callable[[int, int], None] | None
PARCELS = 4  # per core of the cluster, so that the last ones end together


def measure_here(entries: Sequence[Entry], progress: Progress, also: Also = ()) -> list[TensorMeasurement]:
    """One tensor after the other."""
    made = []
    for done, entry in enumerate(entries, start=1):
        made.append(measure_tensor(entry, also=also))
        if progress is not None:
            progress(done, len(entries))
    return made


def measure_on_ray(
    source: Source, base: Source | None, entries: Sequence[Entry], progress: Progress, also: Also = ()
) -> list[TensorMeasurement]:
    """The same, by workers that open the file themselves: only figures travel."""
    ray = _connected()
    task = ray.remote(num_cpus=1)(_measured)
    parcels = _parcels(entries, PARCELS * max(1, int(ray.cluster_resources().get("CPU", 1))))
    paths = [None if path is None else os.path.abspath(os.fspath(path)) for path in (source, base)]  # type: ignore[arg-type]
    waiting = {task.remote(*paths, numbers, also): numbers for numbers in parcels}
    made: dict[int, TensorMeasurement] = {}
    while waiting:
        (ready, *_), _ = ray.wait(list(waiting))
        made.update(zip(waiting.pop(ready), ray.get(ready), strict=True))
        if progress is not None:
            progress(len(made), len(entries))
    return [made[number] for number in range(len(entries))]


def _connected() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("measure(engine='ray')", "ray", "ray") from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise InvalidArgumentError(
                "measure(engine='ray') joins a cluster that runs",
                "none",
                "Start one (`ray start --head`), or set RAY_ADDRESS, or measure here.",
            ) from error
    return ray


def _measured(source: str, base: str | None, numbers: Sequence[int], also: Also) -> list[TensorMeasurement]:
    entries = contents_of(source, base).entries
    return [measure_tensor(entries[number], also=also) for number in numbers]


def _parcels(entries: Sequence[Entry], count: int) -> list[list[int]]:
    """Numbers of entries, in parcels of about the same number of weights, largest first."""
    parcels: list[list[int]] = [[] for _ in range(max(1, min(count, len(entries))))]
    loads = [0] * len(parcels)
    for number in sorted(range(len(entries)), key=lambda n: -prod(entries[n].shape or ())):
        least = loads.index(min(loads))
        parcels[least].append(number)
        loads[least] += prod(entries[number].shape or ()) + 1
    return [parcel for parcel in parcels if parcel]
