"""What every test shares: one thread (or OMP_NUM_THREADS), fixed seeds, what is slow, a probe of the compiler."""

from __future__ import annotations

import functools
import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import random
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

os.environ["GONIO_CACHE"] = "off"  # a test that measures a file twice means to measure it twice
for _name in ("LC_ALL", "LC_MESSAGES", "LANG"):  # what commands print is compared with English
    if os.environ.get(_name, "").lower().startswith("zh"):
        os.environ[_name] = "C.UTF-8"

THREADS = int(os.environ["OMP_NUM_THREADS"])

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # of a shell's background job, whose programs would ignore Ctrl-C as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(THREADS)
logging.getLogger("torch.__trace").propagate = False  # hundreds of empty records per compiled graph


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long; run by `make test-slow`, not by `make test`")
    config.addinivalue_line("markers", "grid(n): of its cases one in n is run, and all by `-k` and `make test-slow`")
    config.addinivalue_line("markers", "matrix(setting): fills cells of docs/matrix.md; recorded by `make matrix`")
    config.addinivalue_line("markers", "cuda: needs a CUDA device; run by `make test-cuda`")
    config.addinivalue_line("markers", "processes: needs several; run by `make distributed`")
    config.addinivalue_line("markers", "inductor: needs torch's own compiler; skipped where a probe cannot compile")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A function that lets one of the processes of pytest-xdist make a file, which all of them then read."""

    def made(name: str, make: Callable[[Path], object]) -> Path:
        if "PYTEST_XDIST_TESTRUNUID" not in os.environ:
            path = tmp_path_factory.mktemp("once") / name
            make(path)
            return path
        path = tmp_path_factory.getbasetemp().parent / name
        try:
            path.with_suffix(".begun").touch(exist_ok=False)
        except FileExistsError:
            for _ in range(6000):
                if path.exists() or path.with_suffix(".failed").exists():
                    break
                time.sleep(0.1)
            assert path.exists(), f"another process could not make {name}"
            return path
        try:
            make(path.with_suffix(".part"))
        except BaseException:
            path.with_suffix(".failed").touch()
            raise
        return path.with_suffix(".part").rename(path)

    return made


@functools.cache
def failure_of_inductor() -> str | None:
    """Why torch's own compiler does not work here; it can lack a compiler, or kernels for the processor's settings."""

    def probe(x: torch.Tensor) -> torch.Tensor:
        return (x.softmax(1).log().abs() + x * x.sign()).sum()

    try:
        for dtype in (torch.float32, torch.float64):
            torch.compile(probe, fullgraph=True)(torch.ones(8, 67, dtype=dtype, requires_grad=True)).backward()
    except Exception as error:  # whatever a C++ compiler, its cache and torch can raise
        return f"torch's compiler fails on a small function: {type(error).__name__}"
    finally:
        torch._dynamo.reset()
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("inductor") and (reason := failure_of_inductor()):
        pytest.skip(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests, and those for CUDA, out unless `-m` says which are wanted.

    Of a grid the cases are slow whose name's checksum is not a multiple of n: a sample that does not change, over all
    of its axes. `-k` wants all of them.
    What several processes found is a fixture named `ranks`, or the test calls `processes.spawned` itself.
    """
    for item in items:
        if isinstance(item, pytest.Function) and (
            "ranks" in item.fixturenames or "spawned" in item.function.__code__.co_names
        ):
            item.add_marker("processes")
        grid = item.get_closest_marker("grid")
        if grid and not config.option.keyword and zlib.crc32(item.name.encode()) % grid.args[0]:
            item.add_marker("slow")
    if config.option.markexpr:
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (left if item.get_closest_marker("slow") or item.get_closest_marker("cuda") else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """The global generators start equal in each test, so no test depends on its neighbours."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)  # benchmarks of whole steps set their own
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002  the legacy global state is the one that foreign code reads
