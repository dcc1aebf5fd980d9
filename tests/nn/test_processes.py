"""Statistics and trainings over two data-parallel processes equal those of one process on all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nn.processes import CASES, TRAININGS, alone, everything, single
from processes import spawned
from tolerances import close

CLOSE = close(torch.float64)
pytestmark = pytest.mark.slow  # two processes that import torch: 10 to 16 s


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(everything, tmp_path_factory.mktemp("ranks"))


def assert_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if name in ("output", "input"):
            torch.testing.assert_close(torch.cat([f[name] for f in found]), value, **CLOSE)
        else:
            for f in found:
                torch.testing.assert_close(f[name], value, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], name: str) -> None:
    assert_same([rank[name] for rank in ranks], single(name))


def test_local_statistics_differ(ranks: list[dict[str, Any]]) -> None:
    """Negative control: without synchronisation each process sees its own samples."""
    with pytest.raises(AssertionError, match="not close"):
        assert_same([rank["local"] for rank in ranks], single("local"))


@pytest.mark.parametrize("name", TRAININGS)
def test_training(ranks: list[dict[str, Any]], name: str) -> None:
    """Two forwards before a backward, checkpointing and compilation included."""
    expected = alone(name)
    for rank in ranks:
        for mine, one in zip(rank[name], expected, strict=True):
            torch.testing.assert_close(mine, one, **(CLOSE if one.dtype is torch.float64 else close(torch.float32)))
