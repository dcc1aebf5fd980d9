"""What each of two gloo processes does for the tests of `calibrate_`; plain tensors go back through files."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from catalog import seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError
from gonio.surgery import calibrate_

__all__ = ["CASES", "REFUSED", "WORLD", "buffers", "joined", "prepared", "run_rank"]

WORLD = 2


def batch_norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def switchable(*, synchronize: bool = True) -> nn.Module:
    first, last = (gnn.SwitchableNorm2d(n, synchronize=synchronize) for n in (3, 4))
    return nn.Sequential(first, nn.Conv2d(3, 4, 1), last)


def batch(samples: int, seed: int) -> Tensor:
    """Samples that differ in mean and scale, so that statistics of a part differ from those of the whole."""
    scale = torch.arange(1.0, samples + 1).view(-1, 1, 1, 1) + seed
    return scale + scale * seeded(samples, 3, 4, 4, seed=seed)


# name -> (model, samples of each batch by process)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "equal": (batch_norms, ((4, 4), (4, 4))),
    "numbers differ": (batch_norms, ((4, 2, 3), (5,))),
    "one process has none": (batch_norms, ((4, 2), ())),
    "not joined": (lambda: switchable(synchronize=False), ((4, 2, 3), (5,))),
    "joined": (switchable, ((5, 2), (1, 3))),
    "joined with an empty batch": (switchable, ((5, 2), (3, 0))),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "joined, numbers differ": (switchable, ((4, 2, 3), (5,))),
    "no batch at all": (batch_norms, ((), ())),
}


def mine(name: str, rank: int) -> list[Tensor]:
    sizes = {**CASES, **REFUSED}[name][1]
    return [batch(n, seed=10 * rank + index) for index, n in enumerate(sizes[rank])]


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
    return {**CASES, **REFUSED}[name][0]()


def _calibrated(name: str, rank: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for variance in ("total", "mean"):
        model = prepared(name)
        calibrate_(DistributedDataParallel(model), mine(name, rank), variance=variance)
        found[variance] = buffers(model)
    return found


def _refusal(name: str, rank: int) -> str:
    try:
        calibrate_(prepared(name), mine(name, rank))
    except InvalidArgumentError as error:
        return str(error)
    return "nothing was refused"


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        found: object = {name: _calibrated(name, rank) for name in CASES} | {n: _refusal(n, rank) for n in REFUSED}
    except Exception:  # the parent reports it
        found = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()  # without it, leaving the group aborts now and then
    dist.destroy_process_group()
