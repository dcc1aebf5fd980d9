"""What each of two gloo processes does for the tests of edits on wrapped models; spawned once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from catalog import seeded
from gonio import init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import surgery as S

__all__ = ["EDITS", "WORLD", "network", "run_rank"]

WORLD = 2
X = seeded(4, 2, 5, 5)
FIXED = gnn.magnitude.Tanh(radius=1.0, radius_in="absolute")

EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "init_": lambda m: S.init_(m, init.orthogonal_, gain=2.0),
    "lsuv_": lambda m: S.lsuv_(m, X),
    "calibrate_": lambda m: S.calibrate_(m, [X + 3]),
    "balance_": S.balance_,
    "fold_": S.fold_,
    "swap_": lambda m: S.swap_(m, gnn.DecoupledConv2d.from_conv, magnitude=FIXED),
    "swap_ with new parameters": lambda m: S.swap_(m, gnn.SwitchableNorm2d.from_batch_norm),
    "parametrize_": lambda m: S.parametrize_(m, P.Sphere()),
    "parametrize_ with new parameters": lambda m: S.parametrize_(m, P.WeightNorm()),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, 4)).eval()


def shard(model: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    fully_shard(model[4], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP 2": shard,
    "FSDP 1": lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
}


@torch.no_grad()
def edited_after(wrap: Callable[[nn.Module], nn.Module], edit: Callable[[nn.Module], Any]) -> list[Tensor]:
    """Outputs after an edit of a wrapped model that has run before, and after its undo."""
    model = wrap(network())
    model(X)
    done = edit(model)
    outputs = [model(X).clone()]
    done.undo_()
    return [*outputs, model(X).clone()]


@torch.no_grad()
def undone_after(edit: Callable[[nn.Module], Any]) -> list[Tensor]:
    model = network()
    done = edit(model)
    shard(model)
    done.undo_()
    return []


def run_rank(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    found: dict[str, list[Tensor] | str] = {}
    for name, edit in EDITS.items():
        for kind, wrap in WRAPPERS.items():
            found[f"{kind} {name}"] = _attempt(lambda wrap=wrap, edit=edit: edited_after(wrap, edit))
        found[f"sharded since {name}"] = _attempt(lambda edit=edit: undone_after(edit))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()  # without it, leaving the group aborts now and then
    dist.destroy_process_group()


def _attempt(work: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    try:
        return work()
    except Exception as error:  # the parent decides whether it was expected
        return f"{type(error).__name__}: {error}"
