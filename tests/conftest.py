"""What every test shares: one thread, fixed seeds, the `slow` marker."""

from __future__ import annotations

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import random
import signal

import numpy
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # of a shell's background job, whose programs would ignore Ctrl-C as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
logging.getLogger("torch.__trace").propagate = False  # hundreds of empty records per compiled graph


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long; run by `make test-slow`, not by `make test`")
    config.addinivalue_line("markers", "matrix(setting): fills cells of docs/matrix.md; recorded by `make matrix`")
    config.addinivalue_line("markers", "cuda: needs a CUDA device; run by `make test-cuda`")
    config.addinivalue_line("markers", "processes: needs several; run by `make distributed`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests, and those for CUDA, out unless `-m` says which are wanted.

    What several processes found is a fixture named `ranks`, or the test calls `processes.spawned` itself.
    """
    for item in items:
        if isinstance(item, pytest.Function) and (
            "ranks" in item.fixturenames or "spawned" in item.function.__code__.co_names
        ):
            item.add_marker("processes")
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
    torch.set_num_threads(1)  # benchmarks of whole steps set their own
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002  the legacy global state is the one that foreign code reads
