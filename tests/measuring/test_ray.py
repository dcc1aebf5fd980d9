"""The tensors of a file spread over a cluster of two nodes on this machine: the figures are those of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gonio.errors import InvalidArgumentError
from gonio.measuring import measure
from gonio.measuring.measure import _parcels
from gonio.measuring.reading.entry import Entry


def test_only_files_are_spread() -> None:
    with pytest.raises(InvalidArgumentError, match=r"distributes the tensors of files; found Linear"):
        measure(torch.nn.Linear(2, 2), engine="ray")
    with pytest.raises(InvalidArgumentError, match=r"distributes the tensors of files; found dict"):
        measure("adapter.safetensors", base={"w": torch.ones(2)}, engine="ray")
    with pytest.raises(InvalidArgumentError, match="is 'local' or 'ray'; found 'dask'"):
        measure(torch.nn.Linear(2, 2), engine="dask")  # type: ignore[arg-type]


def test_parcels_hold_every_entry_once_and_about_equal_numbers_of_weights() -> None:
    sizes = [100, 1, 50, 50, 30, 70, 1, 1]
    entries = [Entry(str(i), "", None, None, shape=(n,)) for i, n in enumerate(sizes)]
    parcels = _parcels(entries, 3)
    assert sorted(number for parcel in parcels for number in parcel) == list(range(8))
    loads = [sum(sizes[number] for number in parcel) for parcel in parcels]
    assert max(loads) - min(loads) <= 10
    assert _parcels(entries[:1], 9) == [[0]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    utilities = pytest.importorskip("ray.cluster_utils")
    made = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ray's own, on resources that are closed when it ends
def test_a_cluster_gives_the_same_numbers(cluster: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}.weight": torch.randn(40 + i, 30, generator=generator) for i in range(12)}
    state["bad.weight"] = torch.full((3, 3), float("nan"))
    save_file(state, tmp_path / "m.safetensors")
    seen: list[tuple[int, int]] = []
    spread = measure(tmp_path / "m.safetensors", engine="ray", progress=lambda done, total: seen.append((done, total)))
    here = measure(tmp_path / "m.safetensors")
    assert spread.to_dict()["tensors"] == here.to_dict()["tensors"]
    assert spread.findings == here.findings
    assert seen[-1] == (13, 13)
