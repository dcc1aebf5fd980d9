"""Statistics calibrated in two processes are those of all their batches together, in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

from gonio.surgery import calibrate_
from surgery.processes import CASES, REFUSED, WORLD, buffers, joined, prepared, run_rank
from tolerances import exact

pytestmark = pytest.mark.slow  # two processes that import torch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("calibrate")
    spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert not any(isinstance(each, str) for each in found), found
    return found


@pytest.mark.parametrize("variance", ["total", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], name: str, variance: str) -> None:
    model = prepared(name)
    calibrate_(model, joined(name), variance=variance)
    for rank in ranks:
        for key, value in buffers(model).items():
            torch.testing.assert_close(rank[name][variance][key], value, **exact(torch.float32))


def test_without_joining_the_average_variance_is_that_of_smaller_batches(ranks: list[dict[str, Any]]) -> None:
    """Negative control: batches of one process alone spread less than those of both together."""
    model = prepared("joined")
    calibrate_(model, [*joined("joined")[0].split((5, 1)), *joined("joined")[1].split((2, 3))], variance="mean")
    found = ranks[0]["joined"]["mean"]["0.running_var"]
    assert bool((found > 1.1 * buffers(model)["0.running_var"]).all())


def test_what_would_wait_for_ever_is_refused_in_every_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            "needs as many batches in each; found 1 processes with one more batch than the other 1"
            in (rank["joined, numbers differ"])
        )
        assert "averages over batches; found no batch" in rank["no batch at all"]
        assert set(REFUSED) <= set(rank)
