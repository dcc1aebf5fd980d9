"""What each of two gloo processes does for the tests of holds, Muon and the tracker; results come through files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gonio
from catalog import seeded
from gonio.optim.vectors import NORMS
from ranks import WORLD, attempt

Case = Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 3))


def _held(norm: Any, step: Any) -> Case:
    def prepare(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
        gonio.hold_(model, optimizer, norm=norm, step=step)
        also = ("filter_rotation", "initial_angle")
        return optimizer, gonio.Tracker(model, optimizer=optimizer, every=2, also=also, gather=True)

    return prepare


def _muon(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = gonio.optim.Muon(gonio.param_groups(model, matrices=True), lr=0.05)
    return optimizer, gonio.Tracker(model, optimizer=optimizer, every=2, gather=True)


def _l2(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    return optimizer, gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")


CASES: dict[str, Case] = {
    **{f"{norm} {step}": _held(norm, step) for norm in NORMS for step in ("free", "fixed")},
    "Muon": _muon,
    "Adam with L2": _l2,
}


def train(model: nn.Module, case: Case, samples: slice, scale: float) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Four steps on a part of the batch; the weights, and the tracker's rows."""
    optimizer, tracker = case(model)
    for step in range(4):
        optimizer.zero_grad()
        x, y = seeded(4 * WORLD, 6, seed=step)[samples], seeded(4 * WORLD, 3, seed=step + 50)[samples]
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


def clipped(wrap: Callable[[nn.Module], nn.Module], samples: slice, scale: float) -> list[Tensor]:
    """Three steps of a clipped attention on a part of the batch; its weights, and the largest logits of the last."""
    torch.manual_seed(0)
    model = wrap(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # one that does not amplify rounding
    clip = gonio.clip_qk_(model, optimizer, limit=0.3)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.arange(1, 4 * WORLD + 1)[:, None, None] / 4 * seeded(4 * WORLD, 5, 8, seed=step)  # of unequal sizes
        (model(x[samples]).square().sum() * scale).backward()
        optimizer.step()
    return [*(p.detach().clone() for p in model.parameters()), *clip.largest().values()]


def refused() -> str:
    """What a clip says that does not see the other processes."""
    try:
        clipped(lambda model: model, slice(None), 1)
    except gonio.GonioError as error:
        return str(error)
    return ""


def everything() -> dict[str, Any]:
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    found: dict[str, Any] = {"clip": attempt(lambda: clipped(DistributedDataParallel, mine, 1))}
    found["clip of one process"] = refused()
    for name, case in CASES.items():
        found[f"DDP {name}"] = attempt(lambda case=case: train(DistributedDataParallel(network()), case, mine, 1))
        found[f"FSDP2 {name}"] = attempt(lambda case=case: train(shard(network()), case, mine, 1))
    return found
