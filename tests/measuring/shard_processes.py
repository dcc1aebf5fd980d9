"""What each of several gloo processes does for the tests of the tracker on sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gonio
from catalog import seeded
from gonio.measuring import step_rotation
from ranks import WORLD, attempt

ALSO = ("filter_rotation", "initial_angle", "gradient", "state")


class Network(nn.Module):
    """Linear layers of even and uneven numbers of rows, convolutions, and packed attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)
        self.convolution = nn.Conv2d(1, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.no_grad():
            self.first.weight[4] = 0
            self.second.weight[1] *= 100

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        pixels = self.grouped(self.up(self.convolution(hidden.view(-1, 1, 2, 4)))).flatten(1)[:, :8]
        return self.last(self.attention(hidden[None], hidden[None], hidden[None])[0][0] + pixels)


def mesh(*sizes: int) -> Any:
    names = ("data", "model")[: len(sizes)]
    return dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded(model: nn.Module) -> nn.Module:
    for part in (model.first, model.attention):
        fully_shard(part, mesh=mesh(WORLD))
    return fully_shard(model, mesh=mesh(WORLD))


PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}


def parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, mesh(WORLD), PLAN)


def both(model: nn.Module) -> nn.Module:
    """FSDP2 over tensor parallelism, on a mesh of two dimensions."""
    both_ways = mesh(WORLD // 2, 2)
    parallelize_module(model, both_ways["model"], PLAN)
    return fully_shard(model, mesh=both_ways["data"])


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {"FSDP2": sharded, "TP": parallel}
if WORLD == 4:
    WAYS["FSDP2 and TP"] = both
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9),
}


def train(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> tuple[list[dict[str, Any]], list[str], dict[str, int]]:
    """Rows and findings of four steps, and how many collective operations the steps and a measurement took."""
    optimizer = make(model.parameters())
    tracker = gonio.Tracker(model, optimizer=optimizer, every=2, also=ALSO, **options)
    counts: dict[str, int] = {}
    for step in range(4):
        optimizer.zero_grad()
        (model(seeded(4, 8, seed=step)) * seeded(4, 3, seed=step + 9)).sum().backward()
        with CommDebugMode() as seen:
            optimizer.step()
        for kind, number in seen.get_comm_counts().items():
            counts[str(kind)] = counts.get(str(kind), 0) + number
    with CommDebugMode() as seen:
        tracker.measure()
    for kind, number in seen.get_comm_counts().items():
        counts[str(kind)] = counts.get(str(kind), 0) + number
    return tracker.rows, sorted(f"{one.code} {one.path}" for _, one in tracker.findings), counts


def rotations() -> dict[str, Any]:
    """`step_rotation` of two sharded weights beside that of the same whole ones."""
    from torch.distributed.tensor import Shard, distribute_tensor

    found: dict[str, Any] = {}
    whole = seeded(7, 6), seeded(7, 6, seed=1)
    for dim in (0, 1):
        cut = [distribute_tensor(w, mesh(WORLD), [Shard(dim)]) for w in whole]
        for by_row in (False, True):
            pairs = (vars(step_rotation(*ws, by_row=by_row)) for ws in (whole, cut))
            found[f"{dim} {by_row}"] = [list(fields.values()) for fields in pairs]
    return found


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {"rotations": attempt(rotations)}
    for way, wrap in WAYS.items():
        for name, make in OPTIMIZERS.items():
            found[f"{way} {name}"] = attempt(lambda wrap=wrap, make=make: train(wrap(Network()), make))
    found["gathered"] = attempt(lambda: train(sharded(Network()), OPTIMIZERS["AdamW"], gather=True))
    return found


def alone(name: str) -> tuple[list[dict[str, Any]], list[str], dict[str, int]]:
    return train(Network(), OPTIMIZERS[name])
