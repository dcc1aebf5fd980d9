"""A sharded weight gets the shards of one full draw: gathered, it is the single-process tensor."""

from __future__ import annotations

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

import gonio
from gonio.geometry import Layout
from gonio.init import delta_orthogonal_, he_, lecun_, orthogonal_, variance_scaling_, xavier_
from ranks import group, spawned

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


def gathered() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, (function, shape) in CASES.items():
        for placement, dtype in product(PLACEMENTS, (torch.float32, torch.bfloat16)):
            weight = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [placement])
            # other ranks' generators must not matter: FSDP users seed ranks differently
            function(weight, generator=torch.Generator().manual_seed(dist.get_rank()))
            assert isinstance(weight, DTensor)
            found[f"{name}/{placement}/{dtype}"] = weight.full_tensor()
    return found


def expected(key: str) -> Tensor:
    name, _, dtype = key.split("/")
    function, shape = CASES[name]
    weight = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    return function(weight, generator=torch.Generator().manual_seed(0))


def initialised(*, sharded: bool) -> dict[str, Tensor]:
    """All weights after the verb."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 6, padding_idx=0),
        nn.Conv1d(6, 8, 3, groups=2, padding=1),
        nn.ConvTranspose1d(8, 5, 2, stride=2),
        nn.Linear(5, 3),
    )
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    gonio.init_(model, orthogonal_, seed=3, gain=1.0)
    return {k: p.full_tensor() if isinstance(p, DTensor) else p.detach() for k, p in model.named_parameters()}


def found_here() -> dict[str, dict[str, Tensor]]:
    return {"functions": gathered(), "model": initialised(sharded=True)}


def check(found: dict[str, dict[str, Tensor]]) -> None:
    for key, value in found["functions"].items():
        assert torch.equal(value, expected(key)), key
    for key, whole in initialised(sharded=False).items():
        assert torch.equal(found["model"][key], whole), key


def test_one_process(tmp_path: Path) -> None:
    with group(tmp_path):
        check(found_here())


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    for found in spawned(found_here, tmp_path):
        check(found)
