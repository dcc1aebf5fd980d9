"""What each of two gloo processes does for the distributed laws; spawned once for all cases.

Every rank runs every case in the same order and writes plain tensors; the parent compares them with
one process on the joined batch. A case that raises reports its error and the run goes on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from catalog import REGULARIZERS, RegularizerCase, seeded
from laws.support import MODULES, ModuleCase, control
from ranks import WORLD, attempt


class _BatchMean(nn.Linear):
    """Statistics of one process alone: data-parallel training cannot equal the joined batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0)).square()


class _LocalSquares:
    """A penalty that reads its own shard."""

    def value(self, weight: Tensor) -> Tensor:
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        return local.square().sum()


CONTROLS = [control(), control(_BatchMean)]
PENALTY_CONTROL = RegularizerCase(name="local", make=_LocalSquares, shape=(6, 4), reference=torch.sum)
PENALTIES = [case for case in REGULARIZERS if case.reads == "weight" and len(case.shape) == 2]


def batch(case: ModuleCase) -> Tensor:
    """A joined batch: one case-sized batch per process."""
    return seeded(WORLD * case.shape[0], *case.shape[1:], seed=11)


def objective(output: Tensor, *, rows: int) -> Tensor:
    """A mean over samples with weights that depend on nothing but the feature."""
    weights = seeded(*output.shape[1:], seed=7)
    return (output * weights).sum() / rows


def prepared(case: ModuleCase) -> nn.Module:
    """The same module in every process."""
    torch.manual_seed(0)
    return case.make().train()


def stepped(module: nn.Module, rows: Tensor, whole: Tensor) -> list[Tensor]:
    """Gradients of a training step on `rows`, then the output for the `whole` batch after the step.

    The optimizer is made before the first forward, as users do: what it holds must be what is trained.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    objective(module(rows), rows=len(rows)).backward()
    gradients = [_full(torch.zeros_like(p) if p.grad is None else p.grad) for p in module.parameters()]
    optimizer.step()
    with torch.no_grad():
        return [*gradients, module.eval()(whole).clone()]


def data_parallel(case: ModuleCase, rank: int) -> list[Tensor]:
    """Each rank sees its part of the batch."""
    rows = batch(case)[rank * case.shape[0] : (rank + 1) * case.shape[0]]
    return stepped(DistributedDataParallel(prepared(case)), rows, batch(case))


def sharded(case: ModuleCase) -> list[Tensor]:
    """FSDP2 with the same batch on each rank."""
    module = prepared(case)
    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
    return stepped(module, batch(case), batch(case))


def alone(case: ModuleCase) -> list[Tensor]:
    """One process on the joined batch."""
    return stepped(prepared(case), batch(case), batch(case))


def penalised_gradients(case: RegularizerCase) -> list[Tensor]:
    """A penalty of a sharded weight: the DTensor's value and gradient are the whole tensor's."""
    weight = seeded(*case.shape)
    linear = nn.Linear(weight[0].numel(), len(weight), bias=False)
    linear.weight.data.copy_(weight.flatten(1))
    fully_shard(linear, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
    value = case.make().value(linear.weight)
    value.backward()
    return [_full(value), _full(linear.weight.grad)]


def _full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def everything() -> dict[str, list[Tensor] | str]:
    found: dict[str, list[Tensor] | str] = {}
    for case in (*MODULES, *CONTROLS):
        found[f"ddp {case.name}"] = attempt(lambda case=case: data_parallel(case, dist.get_rank()))
        found[f"fsdp {case.name}"] = attempt(lambda case=case: sharded(case))
    for penalty in (*PENALTIES, PENALTY_CONTROL):
        found[f"fsdp {penalty.name}"] = attempt(lambda penalty=penalty: penalised_gradients(penalty))
    return found
