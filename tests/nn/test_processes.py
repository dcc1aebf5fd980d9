"""Statistics and trainings over data-parallel processes equal those of one process on all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nn.processes import CASES, GROUPED, TRAININGS, alone, everything, grouped, single
from ranks import spawned
from tolerances import close

CLOSE = close(torch.float64)
pytestmark = pytest.mark.slow  # processes that import torch: 10 to 16 s


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
def test_several_processes_equal_one(ranks: list[dict[str, Any]], name: str) -> None:
    assert_same([rank[name] for rank in ranks], single(name))


@pytest.mark.parametrize("name", GROUPED)
def test_a_process_group_takes_the_place_of_all_processes(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(ranks):
        expected = grouped(name, None, rank)  # here in one process, so of these samples alone
        torch.testing.assert_close(found[f"group {name}"], expected, **CLOSE)
        assert not torch.allclose(found[f"all {name}"], expected, rtol=1e-3)


def test_a_layer_of_one_stage_waits_for_no_other_process(ranks: list[dict[str, Any]]) -> None:
    assert "one stage" in ranks[0]
    assert all("one stage" not in rank for rank in ranks[1:])


def test_local_statistics_differ(ranks: list[dict[str, Any]]) -> None:
    """Negative control: without synchronisation each process sees its own samples."""
    with pytest.raises(AssertionError, match="not close"):
        assert_same([rank["local"] for rank in ranks[:2]], single("local"))


@pytest.mark.parametrize("name", TRAININGS)
def test_training(ranks: list[dict[str, Any]], name: str) -> None:
    """Two forwards before a backward, checkpointing and compilation included."""
    expected = alone(name)
    for rank in ranks:
        for mine, one in zip(rank[name], expected, strict=True):
            torch.testing.assert_close(mine, one, **(CLOSE if one.dtype is torch.float64 else close(torch.float32)))
