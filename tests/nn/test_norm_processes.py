"""Switchable norms and spectral norms in four data-parallel processes equal one process on all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

from catalog import seeded
from nn.norm_processes import SIZES, TRAININGS, WORLD, alone, joined, run_rank, statistics
from tolerances import close

pytestmark = pytest.mark.slow  # four processes that import torch
CLOSE = close(torch.float64)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("norms")
    spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert not any(isinstance(each, str) for each in found), found
    return found


def test_batches_of_unequal_size_and_an_empty_one(ranks: list[dict[str, Any]]) -> None:
    weights = seeded(sum(SIZES), 3, 4, 4, seed=9, dtype=torch.float64)
    expected = statistics(joined(sum(SIZES)), weights)
    for name, value in expected.items():
        if name in ("output", "input"):
            torch.testing.assert_close(torch.cat([rank["unequal"][name] for rank in ranks]), value, **CLOSE)
        else:
            for rank in ranks:
                torch.testing.assert_close(rank["unequal"][name], value, msg=name, **CLOSE)


@pytest.mark.parametrize("name", TRAININGS)
def test_training(ranks: list[dict[str, Any]], name: str) -> None:
    """Two forwards before a backward, checkpointing and compilation included."""
    expected = alone(name)
    for rank in ranks:
        for mine, one in zip(rank[name], expected, strict=True):
            if one.is_floating_point():
                # running statistics are float32, whichever sums led to them
                torch.testing.assert_close(mine, one, **(CLOSE if one.dtype is torch.float64 else close(one.dtype)))
            else:
                assert torch.equal(mine, one)
