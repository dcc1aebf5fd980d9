"""The tensors of a file spread over a cluster of two nodes on this machine: the figures are those of one process."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gonio.errors import InvalidArgumentError
from gonio.measuring import changes, measure
from gonio.measuring.engines import parcels_of


def test_only_files_are_spread() -> None:
    with pytest.raises(InvalidArgumentError, match=r"distributes the tensors of files; found Linear"):
        measure(torch.nn.Linear(2, 2), engine="ray")
    with pytest.raises(InvalidArgumentError, match=r"distributes the tensors of files; found dict"):
        measure("adapter.safetensors", base={"w": torch.ones(2)}, engine="ray")
    with pytest.raises(InvalidArgumentError, match=r"distributes the tensors of files; found Linear"):
        measure("base.safetensors", torch.nn.Linear(2, 2), engine="ray")
    with pytest.raises(InvalidArgumentError, match=r"distributes the tensors of files; found dict"):
        changes("base.safetensors", "a.safetensors", {"w": torch.ones(2)}, engine="ray")
    for sources in ((torch.nn.Linear(2, 2),), (torch.nn.Linear(2, 2),) * 2, (torch.nn.Linear(2, 2),) * 3):
        with pytest.raises(InvalidArgumentError, match="is 'local' or 'ray'; found 'dask'"):
            measure(*sources, engine="dask")  # type: ignore[call-overload]


def test_parcels_hold_every_entry_once_and_about_equal_numbers_of_weights() -> None:
    sizes = [100, 1, 50, 50, 30, 70, 1, 1] * 8
    parcels = parcels_of(sizes, range(len(sizes)), 3)
    assert len(parcels) == 12
    assert sorted(number for parcel in parcels for number in parcel) == list(range(64))
    loads = [sum(sizes[number] for number in parcel) for parcel in parcels]
    assert max(loads) - min(loads) <= 50
    assert parcels_of(sizes[:1], [0], 9) == [[0]]


class LocalCluster:
    """The part of Ray's interface that is used, in this process: results come back pickled, as from a worker."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2}

    def remote(self, **options: Any) -> Any:
        def task(function: Any) -> Any:
            def call(*words: Any) -> int:
                self.calls.append(pickle.loads(pickle.dumps((function, *words))))
                return len(self.calls) - 1

            return SimpleNamespace(remote=call)

        return task

    def wait(self, waiting: list[int]) -> tuple[list[int], list[int]]:
        return waiting[-1:], waiting[:-1]  # the last first

    def get(self, number: int) -> Any:
        function, *words = self.calls[number]
        return pickle.loads(pickle.dumps(function(*words)))


def saved(folder: Path) -> list[Path]:
    """A base and two models tuned from it, of which one lacks a tensor and the other has one more."""
    draw = torch.Generator().manual_seed(0)
    base = {f"{i}.weight": torch.randn(12 + i, 10, generator=draw) for i in range(6)}
    models = [{name: w + 0.1 * torch.randn(w.shape, generator=draw) for name, w in base.items()} for _ in range(2)]
    del models[0]["2.weight"]
    models[1] |= {"3.weight": base["3.weight"], "new.weight": torch.ones(2, 2)}
    paths = [folder / f"{name}.safetensors" for name in ("base", "first", "second")]
    for path, state in zip(paths, (base, *models), strict=True):
        save_file(state, path)
    return paths


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_give_the_same_figures_for_one_file_and_for_several(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalCluster()
    monkeypatch.setitem(sys.modules, "ray", local)
    monkeypatch.chdir(tmp_path)
    paths = [path.name for path in saved(tmp_path)[:count]]
    seen: list[tuple[int, int]] = []
    spread = measure(*paths, engine="ray", progress=lambda done, total: seen.append((done, total)))
    assert len(local.calls) > 1
    here = measure(*paths)
    assert spread.to_dict() == here.to_dict()
    assert seen[-1][0] == seen[-1][1] == (6 if count < 3 else 7)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("count", [2, 3])
def test_a_cluster_compares_several_files(cluster: Any, tmp_path: Path, count: int) -> None:
    paths = saved(tmp_path)[:count]
    assert measure(*paths, engine="ray").to_dict() == measure(*paths).to_dict()
