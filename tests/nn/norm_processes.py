"""What each of four gloo processes does for the tests of normalisation in data-parallel training."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P

__all__ = ["SIZES", "TRAININGS", "WORLD", "alone", "joined", "run_rank", "statistics"]

WORLD = 4
SIZES = (5, 3, 0, 1)
EACH = 2  # samples per process in the trainings


def joined(samples: int, seed: int = 0) -> Tensor:
    """Samples that differ in mean and scale, so that statistics of a part differ from those of the whole."""
    scale = torch.arange(1, samples + 1, dtype=torch.float64).view(-1, 1, 1, 1)
    return scale + scale * seeded(samples, 3, 4, 4, seed=seed, dtype=torch.float64)


def statistics(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """A switchable norm's output, buffers, and gradients of a sum over samples."""
    layer = gnn.SwitchableNorm2d(3).double()
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * weights).sum().backward()
    grads = {f"grad of {name}": p.grad for name, p in layer.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **grads, **dict(layer.named_buffers())}


def parts(x: Tensor, rank: int) -> Tensor:
    return x.split(SIZES)[rank]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), gnn.SwitchableNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 1))
    for layer in (model[0], model[3]):
        P.attach(layer, "weight", P.SpectralNorm())
    return model.double()


def one_forward(model: nn.Module, rows: slice) -> Tensor:
    return model(joined(WORLD * EACH)[rows]).square().mean()


def two_forwards(model: nn.Module, rows: slice) -> Tensor:
    """Both before the backward pass: the buffers of the first have moved when its gradient is taken."""
    return one_forward(model, rows) + model(joined(WORLD * EACH, seed=1)[rows]).tanh().mean()


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def checkpointed(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(Checkpointed(model))


def compiled(model: nn.Module) -> nn.Module:
    """The exchange of statistics breaks the graph."""
    return torch.compile(DistributedDataParallel(model), backend="aot_eager")


# name -> (what is put around the model, the loss of a part of the batch)
TRAININGS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module, slice], Tensor]]] = {
    "one forward": (wrapped, one_forward),
    "two forwards": (wrapped, two_forwards),
    "checkpointed": (checkpointed, one_forward),
    "compiled": (compiled, one_forward),
}


def train(model: nn.Module, source: nn.Module, loss: Callable[[nn.Module, slice], Tensor], rows: slice) -> list[Tensor]:
    """Parameters and buffers after some steps on a part of each batch."""
    optimizer = torch.optim.SGD(source.parameters(), lr=0.05)
    P.tick_on_step(optimizer, source)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, rows).backward()
        optimizer.step()
    return [t.detach().clone() for t in source.state_dict().values()]


def alone(name: str) -> list[Tensor]:
    """One process on all samples."""
    model = network()
    return train(model, model, TRAININGS[name][1], slice(None))


def _found(rank: int) -> dict[str, object]:
    x, weights = joined(sum(SIZES)), seeded(sum(SIZES), 3, 4, 4, seed=9, dtype=torch.float64)
    unequal = statistics(parts(x, rank), parts(weights, rank))
    for name, value in unequal.items():
        if name.startswith("grad of"):
            dist.all_reduce(value)  # a gradient of the sum over processes
    rows = slice(EACH * rank, EACH * (rank + 1))
    found: dict[str, object] = {"unequal": unequal}
    for name, (around, loss) in TRAININGS.items():
        model = network()
        found[name] = train(around(model), model, loss, rows)
    return found


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        found: object = _found(rank)
    except Exception:  # the parent reports it
        found = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()  # without it, leaving the group aborts now and then
    dist.destroy_process_group()
