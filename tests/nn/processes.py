"""What each gloo process does for the tests of joined statistics; plain tensors go back through files."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.nn import magnitude
from laws.support import Checkpointed
from ranks import WORLD

# name -> (layer, input of all samples, how many of them the first two processes have; others have none)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "unequal": (lambda: gnn.SwitchableNorm2d(3), (6, 3, 4, 4), (5, 1)),
    "empty": (lambda: gnn.SwitchableNorm2d(3), (4, 3, 4, 4), (4, 0)),
    "one value each": (lambda: gnn.SwitchableNorm1d(3), (2, 3), (1, 1)),
    "one value in all": (lambda: gnn.SwitchableNorm1d(3), (1, 3), (1, 0)),
    "one value in the first": (lambda: gnn.SwitchableNorm1d(3), (3, 3), (1, 2)),
    "decoupled": (lambda: gnn.DecoupledConv2d(4, 6, 3, groups=2), (6, 4, 5, 5), (4, 2)),
    "decoupled radii": (
        lambda: gnn.DecoupledConv2d(4, 6, 3, groups=2, magnitude=magnitude.Segmented(learn_radius=True)),
        (6, 4, 5, 5),
        (4, 2),
    ),
    "decoupled empty": (lambda: gnn.DecoupledLinear(4, 3), (4, 4), (0, 4)),
}
LOCAL = (lambda: gnn.SwitchableNorm2d(3, synchronize=False), (6, 3, 4, 4), (5, 1))
GROUPED = {
    "switchable": lambda group: gnn.SwitchableNorm2d(3, process_group=group),
    "decoupled": lambda group: gnn.DecoupledConv2d(3, 4, 3, process_group=group),
}
EACH = 2  # samples per process in the trainings


def joined(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Samples that differ in mean and scale, so that statistics of a part differ from those of the whole."""
    scale = torch.arange(1, shape[0] + 1, dtype=torch.float64).reshape(-1, *(1 for _ in shape[1:]))
    return scale + scale * seeded(*shape, seed=seed, dtype=torch.float64)


def _step(layer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output, gradients of a sum over samples, and buffers."""
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * weights).sum().backward()
    grads = {f"grad of {name}": p.grad for name, p in layer.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **grads, **dict(layer.named_buffers())}


def single(name: str, rank: int | None = None) -> dict[str, Tensor]:
    """A case on all samples, or on those of one process."""
    make, shape, counts = CASES.get(name, LOCAL)
    x, weights = joined(shape), seeded(*make()(joined(shape).float()).shape, seed=9, dtype=torch.float64)
    torch.manual_seed(0)
    layer = make().double()
    counts += (0,) * (WORLD - len(counts))
    return _step(layer, *((x, weights) if rank is None else (t.split(counts)[rank] for t in (x, weights))))


def grouped(name: str, group: dist.ProcessGroup | None, rank: int) -> Tensor:
    """The output of a layer with a process group for the samples of one process."""
    torch.manual_seed(0)
    return GROUPED[name](group).double()(joined((2 * WORLD, 3, 4, 4)).chunk(WORLD)[rank]).detach()


def _network() -> nn.Module:
    torch.manual_seed(0)
    first = gnn.DecoupledConv2d(3, 4, 3, padding=1, magnitude=magnitude.Tanh(learn_radius=True))
    model = nn.Sequential(first, gnn.SwitchableNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    P.attach(model[3], "weight", P.SpectralNorm())  # before .double(), the first vectors would be those of float32
    return model


def one_forward(model: nn.Module, rows: slice) -> Tensor:
    return model(joined((WORLD * EACH, 3, 4, 4))[rows]).square().mean()


def two_forwards(model: nn.Module, rows: slice) -> Tensor:
    """Both before the backward pass: the buffers of the first have moved when its gradient is taken."""
    return one_forward(model, rows) + model(joined((WORLD * EACH, 3, 4, 4), seed=1)[rows]).tanh().mean()


# name -> (what is put around the model, the loss of a part of the batch)
TRAININGS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module, slice], Tensor]]] = {
    "one forward": (DistributedDataParallel, one_forward),
    "two forwards": (DistributedDataParallel, two_forwards),
    "checkpointed": (lambda model: DistributedDataParallel(Checkpointed(model)), one_forward),
    # the exchange of statistics breaks the graph
    "compiled": (lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"), one_forward),
}


def _train(
    model: nn.Module, source: nn.Module, loss: Callable[[nn.Module, slice], Tensor], rows: slice
) -> list[Tensor]:
    """Parameters and buffers after some steps on a part of each batch."""
    optimizer = torch.optim.SGD(source.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, rows).backward()
        optimizer.step()
    return [t.detach().clone() for t in source.state_dict().values()]


def alone(name: str) -> list[Tensor]:
    """The training of one process on all samples."""
    model = _network()
    return _train(model, model, TRAININGS[name][1], slice(None))


def everything() -> dict[str, object]:
    rank = dist.get_rank()
    found: dict[str, object] = {}
    for name in (*CASES, *(["local"] if rank < 2 else [])):
        of_case = single(name, rank)
        for key, value in of_case.items():
            if key.startswith("grad of") and name != "local":
                dist.all_reduce(value)  # a gradient of the sum over processes
        found[name] = of_case
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    for name in GROUPED:
        found[f"group {name}"] = grouped(name, alone, rank)
        found[f"all {name}"] = grouped(name, None, rank)
    if rank == 0:  # the others do not run this layer, as in pipeline parallel training
        found["one stage"] = GROUPED["switchable"](alone).double()(joined((2, 3, 4, 4))).detach()
    rows = slice(EACH * rank, EACH * (rank + 1))
    for name, (around, loss) in TRAININGS.items():
        model = _network()
        found[name] = _train(around(model), model, loss, rows)
    return found
