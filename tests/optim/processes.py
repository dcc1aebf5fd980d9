"""What each of two gloo processes does for the tests of holds, Muon and the tracker; results come through files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gonio
from catalog import seeded

__all__ = ["CASES", "WORLD", "alone", "network", "run_rank"]

WORLD = 2
Case = Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 3))


def _held(norm: Any, step: Any) -> Case:
    def prepare(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
        gonio.hold_(model, optimizer, norm=norm, step=step)
        return optimizer, gonio.Tracker(model, optimizer=optimizer, every=2, also=("filter_rotation", "initial_angle"))

    return prepare


def _muon(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = gonio.optim.Muon(gonio.param_groups(model, matrices=True), lr=0.05)
    return optimizer, gonio.Tracker(model, optimizer=optimizer, every=2)


def _l2(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    return optimizer, gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")


CASES: dict[str, Case] = {
    **{f"{norm} {step}": _held(norm, step) for norm in ("matrix", "filters", "columns") for step in ("free", "fixed")},
    "Muon": _muon,
    "Adam with L2": _l2,
}


def train(model: nn.Module, case: Case, samples: slice, scale: float) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Four steps on a part of the batch; the weights, and the tracker's rows."""
    optimizer, tracker = case(model)
    for step in range(4):
        optimizer.zero_grad()
        x, y = seeded(8, 6, seed=step)[samples], seeded(8, 3, seed=step + 50)[samples]
        ((model(x) * y).sum() * scale).backward()
        optimizer.step()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [w.detach().clone() for w in weights], tracker.rows


def alone(name: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """One process on the joined batch."""
    return train(network(), CASES[name], slice(None), 1 / WORLD)


def shard(model: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    mine = slice(4 * rank, 4 * rank + 4)
    for name, case in CASES.items():
        for kind, wrap in (("DDP", DistributedDataParallel), ("FSDP2", shard)):
            try:
                found[f"{kind} {name}"] = train(wrap(network()), case, mine, 1)
            except Exception:  # the parent reports it
                found[f"{kind} {name}"] = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
