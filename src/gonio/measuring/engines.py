"""Measure the tensors of files: here, in several processes, or on a Ray cluster; with a journal to go on from."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch

from gonio.errors import InvalidArgumentError, import_extra
from gonio.measuring.journal import Journal, stamps
from gonio.measuring.reading.source import CheckpointPart, Source

Engine = Literal["local", "ray"]
Progress = Callable[[int, int], None] | None
Result = TypeVar("Result")
Parts = Iterator[tuple[list[int], list[Result]]]

PARCELS = 4  # per worker, so that all end at about the same time
SMALL = 1 << 20  # entries below which tensors share a parcel of a journal


@dataclass(frozen=True)
class Spread:
    """How the tensors of files are measured.

    Attributes:
        engine: `local`, in `jobs` processes, or `ray`.
        journal: the path of a file that keeps the rows, so that a stopped measurement goes on from there.
    """

    engine: Engine = "local"
    jobs: int = 1
    journal: str | os.PathLike[str] | None = None

    def check(self, sources: Sequence[Source]) -> None:
        """Raise for an unknown engine or number of jobs, and for sources that are no files."""
        if self.engine not in get_args(Engine):
            raise InvalidArgumentError("measure(engine=) is 'local' or 'ray'", repr(self.engine), "Choose one of them.")
        if isinstance(self.jobs, bool) or not isinstance(self.jobs, int) or self.jobs < 1:
            raise InvalidArgumentError("measure(jobs=) is a number of processes", repr(self.jobs), "Write 1 or more.")
        if self.engine == "ray" and self.jobs > 1:
            raise InvalidArgumentError("measure(jobs=) is for engine='local'", "engine='ray'", "Leave one of them out.")
        option = "engine='ray'" if self.engine == "ray" else "jobs=" if self.jobs > 1 else "journal="
        for source in sources if option != "journal=" or self.journal is not None else ():
            path_of(source, option)

    def journal_of(
        self, kind: type[Result], sources: Sequence[Source], **options: Any
    ) -> AbstractContextManager[Journal[Result] | None]:
        """The journal of rows of this kind, to be opened; None without one."""
        if self.journal is None:
            return nullcontext()
        files = [stamps(path_of(source, "journal="), besides=self.journal) for source in sources]
        about = {"rows": kind.__name__, "files": files, "options": options, "versions": versions()}
        return Journal(self.journal, about, kind)


def versions() -> dict[str, str]:
    """Of gonio, torch and Python."""
    try:
        own = version("gonio")
    except PackageNotFoundError:  # run from a source tree that is not installed
        own = "not installed"
    return {"gonio": own, "torch": torch.__version__, "python": platform.python_version()}


def path_of(source: Source, option: str = "engine='ray'") -> str | CheckpointPart:
    """The absolute path of a file, and the key in it, for workers in other folders.

    Raises: InvalidArgumentError for a source that is no file.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"measure({option}) {'keeps' if option == 'journal=' else 'distributes'} the tensors of files",
            type(source).__name__,
            "Save the weights where all processes can read them, or leave the option out.",
        )
    path = os.path.abspath(os.fspath(source))
    return CheckpointPart(path, source.key) if isinstance(source, CheckpointPart) else path


class Kept(Protocol[Result]):
    """Rows that were made before, by number; new ones are added."""

    rows: dict[int, Result]

    def add(self, number: int, row: Result) -> None: ...


def results(
    local: Callable[[Sequence[int]], Parts[Result]],
    function: Callable[..., list[Result]],
    words: Callable[[], Sequence[Any]],
    sizes: Sequence[int],
    spread: Spread,
    progress: Progress,
    kept: Kept[Result] | None = None,
) -> list[Result]:
    """The results for all numbers below `len(sizes)`, in order.

    Args:
        local: the results for numbers, part by part, here.
        function: of the words and a list of numbers, on a worker that opens the files itself.
        sizes: of the work for each number.
        kept: has results, which are not made again, and gets the others.
    """
    made, fine = {} if kept is None else dict(kept.rows), spread.journal is not None
    left = [number for number in range(len(sizes)) if number not in made]
    if spread.engine == "ray":
        parts = _on_ray(function, words(), sizes, left, fine)
    elif spread.jobs > 1:
        parts = _in_processes(function, words(), sizes, left, fine, spread.jobs)
    else:
        parts = local(left)
    for numbers, found in parts:
        for number, one in zip(numbers, found, strict=True):
            made[number] = one
            if kept is not None:
                kept.add(number, one)
        if progress is not None:
            progress(len(made), len(sizes))
    return [made[number] for number in range(len(sizes))]


def _in_processes(
    function: Callable[..., list[Result]],
    words: Sequence[Any],
    sizes: Sequence[int],
    left: Sequence[int],
    fine: bool,
    jobs: int,
) -> Parts[Result]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepared, initargs=(threads,))
    try:
        waiting = {pool.submit(function, *words, part): part for part in parcels_of(sizes, left, jobs, fine)}
        for ready in as_completed(waiting):
            yield waiting.pop(ready), ready.result()
    except BrokenProcessPool as error:
        raise InvalidArgumentError(
            "measure(jobs=) reads tensors in processes of its own",
            "a process that ended",
            "In a script call it below `if __name__ == '__main__':`; where memory is short, use fewer jobs.",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _prepared(threads: int) -> None:
    """A worker leaves Ctrl-C to the process that started it, and shares the cores with the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _on_ray(
    function: Callable[..., list[Result]], words: Sequence[Any], sizes: Sequence[int], left: Sequence[int], fine: bool
) -> Parts[Result]:
    ray = _connected()
    task = ray.remote(num_cpus=1)(function)
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = {task.remote(*words, part): part for part in parcels_of(sizes, left, cores, fine)}
    while waiting:
        (ready, *_), _ = ray.wait(list(waiting))
        yield waiting.pop(ready), ray.get(ready)


def _connected() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_extra("ray", "measure(engine='ray')", package="ray", extra="ray")
    try:
        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise InvalidArgumentError(
            "measure(engine='ray') connects to a running cluster",
            "none",
            "Start one (`ray start --head`), or set RAY_ADDRESS, or measure here.",
        ) from error
    return ray


def parcels_of(sizes: Sequence[int], left: Sequence[int], workers: int, fine: bool = False) -> list[list[int]]:
    """The numbers that are left in parcels, largest first: of about the same size in all, some for each worker.

    Args:
        fine: parcels of one number, or of some small ones together, so that a stop loses little.
    """
    ordered = sorted(left, key=lambda n: -sizes[n])
    if fine:
        small = [n for n in ordered if sizes[n] < SMALL]
        step = max(1, SMALL // (max((sizes[n] for n in small), default=0) + 1))
        step = min(step, -(-len(small) // (PARCELS * workers)) or 1)
        return [
            *([n] for n in ordered if sizes[n] >= SMALL),
            *(small[i : i + step] for i in range(0, len(small), step)),
        ]
    parcels: list[list[int]] = [[] for _ in range(max(1, min(PARCELS * workers, len(ordered))))]
    loads = [0] * len(parcels)
    for number in ordered:
        least = loads.index(min(loads))
        parcels[least].append(number)
        loads[least] += sizes[number] + 1
    return [parcel for parcel in parcels if parcel]
