"""What each gloo process does for the tests of edits and of `calibrate_`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from catalog import VERBS, seeded
from gonio import init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import surgery as S
from ranks import WORLD, attempt


def batch_norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def switchable(*, synchronize: bool = True) -> nn.Module:
    first, last = (gnn.SwitchableNorm2d(n, synchronize=synchronize) for n in (3, 4))
    return nn.Sequential(first, nn.Conv2d(3, 4, 1), last)


def batch(samples: int, seed: int) -> Tensor:
    """Samples that differ in mean and scale, so that statistics of a part differ from those of the whole."""
    scale = torch.arange(1.0, samples + 1).view(-1, 1, 1, 1) + seed
    return scale + scale * seeded(samples, 3, 4, 4, seed=seed)


Batches = tuple[tuple[int, ...], tuple[int, ...]]
# name -> (model, samples of each batch in the first two processes; others have none)
CALIBRATED: dict[str, tuple[Callable[[], nn.Module], Batches]] = {
    "equal": (batch_norms, ((4, 4), (4, 4))),
    "numbers differ": (batch_norms, ((4, 2, 3), (5,))),
    "one process has none": (batch_norms, ((4, 2), ())),
    "not joined": (lambda: switchable(synchronize=False), ((4, 2, 3), (5,))),
    "joined": (switchable, ((5, 2), (1, 3))),
    "joined with an empty batch": (switchable, ((5, 2), (3, 0))),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Batches]] = {
    "joined, numbers differ": (switchable, ((4, 2, 3), (5,))),
    "no batch at all": (batch_norms, ((), ())),
}


def mine(name: str, rank: int) -> list[Tensor]:
    sizes = {**CALIBRATED, **REFUSED}[name][1]
    others = (0,) * len(sizes[0]) if name.startswith("joined") else ()
    return [batch(n, seed=10 * rank + index) for index, n in enumerate(sizes[rank] if rank < 2 else others)]


def joined(name: str) -> list[Tensor]:
    """The batches that one process must be given: those of both, one by one or, if layers join them, together."""
    first, second = mine(name, 0), mine(name, 1)
    if name.startswith("joined"):
        return [torch.cat(pair) for pair in zip(first, second, strict=True)]
    return first + second


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def prepared(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {**CALIBRATED, **REFUSED}[name][0]()


def _calibrated(name: str, rank: int) -> dict[str, Any]:
    found = {}
    for variance in ("total", "mean"):
        model = prepared(name)
        S.calibrate_(DistributedDataParallel(model), mine(name, rank), variance=variance)
        found[variance] = buffers(model)
    return found


def calibrated() -> dict[str, Any]:
    rank = dist.get_rank()
    refused = {name: attempt(lambda name=name: S.calibrate_(prepared(name), mine(name, rank))) for name in REFUSED}
    return {name: _calibrated(name, rank) for name in CALIBRATED} | {k: str(v) for k, v in refused.items()}


X = VERBS[0].inputs()
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
    return VERBS[0].model().eval()


def shard(model: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    fully_shard(model[4], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parallelize(model: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("copies", "parts"))["parts"]
    return parallelize_module(model, mesh, {"4": ColwiseParallel(), "6": RowwiseParallel()})


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP 2": shard,
    "tensor parallelism": parallelize,
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


def edited() -> dict[str, list[Tensor] | str]:
    found: dict[str, list[Tensor] | str] = {}
    for name, edit in EDITS.items():
        for kind, wrap in WRAPPERS.items():
            found[f"{kind} {name}"] = attempt(lambda wrap=wrap, edit=edit: edited_after(wrap, edit))
        found[f"sharded since {name}"] = attempt(lambda edit=edit: undone_after(edit))
    return found
