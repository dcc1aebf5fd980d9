"""Measure the tensors of files on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.measuring.reading.source import CheckpointPart, Source

Engine = Literal["local", "ray"]
Progress = Callable[[int, int], None] | None
Result = TypeVar("Result")

PARCELS = 4  # per core of the cluster, so that all workers end at about the same time


def check_engine(engine: str, sources: Sequence[Source]) -> None:
    """Raise for an unknown engine, and for sources that it cannot distribute."""
    if engine not in get_args(Engine):
        raise InvalidArgumentError("measure(engine=) is 'local' or 'ray'", repr(engine), "Choose one of them.")
    if engine == "ray":
        for source in sources:
            path_of(source)


def path_of(source: Source) -> str | CheckpointPart:
    """The absolute path of a file, and the key in it, for workers in other folders.

    Raises: InvalidArgumentError for a source that is no file.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidArgumentError(
            "measure(engine='ray') distributes the tensors of files",
            type(source).__name__,
            "Save the weights where all nodes can read them, or measure here.",
        )
    path = os.path.abspath(os.fspath(source))
    return CheckpointPart(path, source.key) if isinstance(source, CheckpointPart) else path


def on_ray(
    function: Callable[..., list[Result]], words: Sequence[Any], sizes: Sequence[int], progress: Progress
) -> list[Result]:
    """The results for all numbers below `len(sizes)`, in order, by workers that open the files themselves.

    Args:
        function: of the words and a list of numbers; gives the result for each.
        sizes: of the work for each number.
    """
    ray = _connected()
    task = ray.remote(num_cpus=1)(function)
    parcels = parcels_of(sizes, PARCELS * max(1, int(ray.cluster_resources().get("CPU", 1))))
    waiting = {task.remote(*words, numbers): numbers for numbers in parcels}
    made: dict[int, Result] = {}
    while waiting:
        (ready, *_), _ = ray.wait(list(waiting))
        made.update(zip(waiting.pop(ready), ray.get(ready), strict=True))
        if progress is not None:
            progress(len(made), len(sizes))
    return [made[number] for number in range(len(sizes))]


def _connected() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False)
    except ImportError as error:
        raise MissingExtraError("measure(engine='ray')", "ray", "ray") from error
    except ConnectionError as error:
        raise InvalidArgumentError(
            "measure(engine='ray') connects to a running cluster",
            "none",
            "Start one (`ray start --head`), or set RAY_ADDRESS, or measure here.",
        ) from error
    return ray


def parcels_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Numbers in parcels of about the same size in all, largest first."""
    parcels: list[list[int]] = [[] for _ in range(max(1, min(count, len(sizes))))]
    loads = [0] * len(parcels)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        parcels[least].append(number)
        loads[least] += sizes[number] + 1
    return [parcel for parcel in parcels if parcel]
