"""Statistics over two processes equal those of one process on all samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from catalog import seeded
from nn.ranks import CASES, LOCAL, joined, run_rank, step, trained_together
from tolerances import close

CLOSE = close(torch.float64)
pytestmark = pytest.mark.slow  # two processes that import torch: 10 to 16 s


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=2)
    found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    assert not any(isinstance(f, str) for f in found), found
    return found


def single(name: str) -> dict[str, Tensor]:
    make, shape, _ = CASES.get(name, LOCAL)
    torch.manual_seed(0)
    weights = seeded(*make()(joined(shape).float()).shape, seed=9, dtype=torch.float64)
    torch.manual_seed(0)
    return step(make().double(), joined(shape), weights)


def assert_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if name in ("output", "input"):
            torch.testing.assert_close(torch.cat([f[name] for f in found]), value, **CLOSE)
        else:
            for f in found:
                torch.testing.assert_close(f[name], value, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(ranks: list[dict[str, dict[str, Tensor]]], name: str) -> None:
    assert_same([rank[name] for rank in ranks], single(name))


def test_local_statistics_differ(ranks: list[dict[str, dict[str, Tensor]]]) -> None:
    """Negative control: without synchronisation each process sees its own samples."""
    with pytest.raises(AssertionError, match="not close"):
        assert_same([rank["local"] for rank in ranks], single("local"))


def test_data_parallel_training(ranks: list[dict[str, dict[str, Tensor]]]) -> None:
    model = trained_together()
    weights = seeded(4, 4, 4, 4, seed=9, dtype=torch.float64)
    (model(joined((4, 3, 6, 6))) * weights).sum().div(4).backward()
    expected = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    assert_same([rank["data parallel"] for rank in ranks], expected)
