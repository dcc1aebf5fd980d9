"""Two processes: ticks under data parallelism and sharding, and compiled data-parallel training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from catalog import seeded
from gonio import parametrizations as P
from tolerances import close

pytestmark = pytest.mark.slow
WORLD, STEPS = 2, 4


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=index))
    for layer, parametrization in zip((0, 2, 4), (P.SpectralNorm(), P.SpectralNorm(), P.WeightNorm()), strict=True):
        P.attach(model[layer], "weight", parametrization)
    return model


def train(model: nn.Module, source: nn.Module, rows: slice) -> list[Tensor]:
    """Effective outputs after some steps, each on the given rows of a batch of 8."""
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    P.tick_on_step(optimizer, source)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(seeded(8, 6, seed=50 + step)[rows]).square().mean().backward()
        optimizer.step()
    return [model(seeded(8, 6, seed=9)).detach(), *(b.clone() for b in source.buffers())]


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    rows = slice(4 * rank, 4 * rank + 4)
    found = {}
    model = model_of()
    found["ddp"] = train(DistributedDataParallel(model), model, rows)
    model = model_of()
    compiled = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    found["compiled ddp"] = train(compiled, model, rows)
    model = model_of()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    found["fsdp"] = train(model, model, rows)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_ticks_in_two_processes_equal_those_of_one(tmp_path: Path) -> None:
    model = model_of()
    expected = train(model, model, slice(None))
    assert not torch.equal(expected[1], copy.deepcopy(model_of())[0].weight_parametrization.u)
    spawn(run, args=(str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for how, tensors in found.items():
            for mine, one in zip(tensors, expected, strict=True):
                torch.testing.assert_close(mine, one, msg=how, **close(torch.float32))
