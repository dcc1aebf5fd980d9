"""What each gloo process does for the tests of joined statistics; plain tensors go back through files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import magnitude

__all__ = ["CASES", "joined", "rows_of", "run_rank", "step", "trained_together"]

# name -> (layer, input of all samples, how many of them each process has)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "unequal": (lambda: gnn.SwitchableNorm2d(3), (6, 3, 4, 4), (5, 1)),
    "empty": (lambda: gnn.SwitchableNorm2d(3), (4, 3, 4, 4), (4, 0)),
    "one value each": (lambda: gnn.SwitchableNorm1d(3), (2, 3), (1, 1)),
    "one value in all": (lambda: gnn.SwitchableNorm1d(3), (1, 3), (1, 0)),
    "decoupled": (lambda: gnn.DecoupledConv2d(4, 6, 3, groups=2), (6, 4, 5, 5), (4, 2)),
    "decoupled radii": (
        lambda: gnn.DecoupledConv2d(4, 6, 3, groups=2, magnitude=magnitude.Segmented(learn_radius=True)),
        (6, 4, 5, 5),
        (4, 2),
    ),
    "decoupled empty": (lambda: gnn.DecoupledLinear(4, 3), (4, 4), (0, 4)),
}
LOCAL = (lambda: gnn.SwitchableNorm2d(3, synchronize=False), (6, 3, 4, 4), (5, 1))


def joined(shape: tuple[int, ...]) -> Tensor:
    """Samples that differ in mean and scale, so that statistics of a part differ from those of the whole."""
    scale = torch.arange(1, shape[0] + 1, dtype=torch.float64).reshape(-1, *(1 for _ in shape[1:]))
    return scale + scale * seeded(*shape, dtype=torch.float64)


def rows_of(x: Tensor, counts: tuple[int, ...], rank: int) -> Tensor:
    return x.split(counts)[rank]


def step(layer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output, gradients of a sum over samples, and buffers."""
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * weights).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **grads, **dict(layer.named_buffers())}


def _run(case: tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]], rank: int) -> dict[str, Tensor]:
    make, shape, counts = case
    torch.manual_seed(0)
    x, weights = joined(shape), seeded(*make()(joined(shape).float()).shape, seed=9, dtype=torch.float64)
    torch.manual_seed(0)
    found = step(make().double(), rows_of(x, counts, rank), rows_of(weights, counts, rank))
    for name in found:
        if name not in ("output", "input", "mean_norm", "running_mean", "running_var", "num_batches_tracked"):
            dist.all_reduce(found[name])  # a gradient of the sum over processes
    return found


def trained_together() -> nn.Module:
    torch.manual_seed(0)
    layer = gnn.DecoupledConv2d(3, 4, 3, magnitude=magnitude.Tanh(learn_radius=True))
    return nn.Sequential(layer, gnn.SwitchableNorm2d(4)).double()


def _data_parallel(rank: int) -> dict[str, Tensor]:
    """DistributedDataParallel with equal parts: averaged gradients are those of the mean over the whole."""
    model = trained_together()
    x, weights = joined((4, 3, 6, 6)), seeded(4, 4, 4, 4, seed=9, dtype=torch.float64)
    wrapped = DistributedDataParallel(model)
    rows = slice(2 * rank, 2 * rank + 2)
    (wrapped(x[rows]) * weights[rows]).sum().div(2).backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def run_rank(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        found: dict[str, dict[str, Tensor]] | str = {name: _run(case, rank) for name, case in CASES.items()}
        found["local"] = _run(LOCAL, rank)
        found["data parallel"] = _data_parallel(rank)
    except Exception:  # the parent reports it
        found = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()  # without it, leaving the group aborts now and then
    dist.destroy_process_group()
