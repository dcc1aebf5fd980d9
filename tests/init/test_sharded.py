"""A sharded weight gets the shards of one full draw: gathered, it is the single-process tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing import spawn

import gonio
from gonio.geometry import Layout
from gonio.init import delta_orthogonal_, he_, lecun_, orthogonal_, variance_scaling_, xavier_

# name: (function, shape of the weight)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "orthogonal_": (orthogonal_, (7, 5)),
    "orthogonal_ grouped": (partial(orthogonal_, layout=Layout(groups=2)), (6, 3, 3, 3)),
    "orthogonal_ transposed": (partial(orthogonal_, layout=Layout(transposed=True)), (3, 5, 2)),
    "he_": (he_, (7, 5)),
    "xavier_ packed": (partial(xavier_, layout=Layout(blocks=3)), (9, 3)),
    "lecun_ conv": (lecun_, (5, 3, 3, 3)),
    "signs": (partial(variance_scaling_, distribution="rademacher", preserve="norm"), (7, 5)),
    "delta_orthogonal_": (delta_orthogonal_, (5, 3, 3, 3)),
}
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def gathered(world: int, rank: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name, (function, shape) in CASES.items():
        for placement, dtype in product(PLACEMENTS, (torch.float32, torch.bfloat16)):
            weight = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [placement])
            # other ranks' generators must not matter: FSDP users seed ranks differently
            function(weight, generator=torch.Generator().manual_seed(rank))
            assert isinstance(weight, DTensor)
            found[f"{name}/{placement}/{dtype}"] = weight.full_tensor()
    return found


def expected(key: str) -> Tensor:
    name, _, dtype = key.split("/")
    function, shape = CASES[name]
    weight = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    return function(weight, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """One of each kind that the verb takes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.mixer = nn.Conv1d(6, 8, 3, groups=2, padding=1)
        self.wider = nn.ConvTranspose1d(8, 5, 2, stride=2)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x).transpose(1, 2)
        return self.head(self.wider(self.mixer(hidden).relu()).mean(-1))


def initialised(world: int | None) -> dict[str, Tensor]:
    """All weights after the verb, of a model that is sharded over so many processes or whole."""
    torch.manual_seed(0)
    model = Net()
    if world is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    gonio.init_(model, orthogonal_, seed=3)
    return {k: p.full_tensor() if isinstance(p, DTensor) else p.detach() for k, p in model.named_parameters()}


def run_rank(rank: int, folder: str, world: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.save({"functions": gathered(world, rank), "model": initialised(world)}, Path(folder) / f"{rank}.pt")
    dist.barrier()  # without it, leaving the group aborts now and then
    dist.destroy_process_group()


def check_model(found: dict[str, Tensor]) -> None:
    for key, whole in initialised(None).items():
        assert torch.equal(found[key], whole), key


def test_one_process(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for key, value in gathered(1, 0).items():
            assert torch.equal(value, expected(key)), key
        check_model(initialised(1))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    spawn(run_rank, args=(str(tmp_path), 2), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for key, value in found["functions"].items():
            assert torch.equal(value, expected(key)), f"{key} on rank {rank}"
        check_model(found["model"])
