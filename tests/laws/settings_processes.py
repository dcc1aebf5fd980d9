"""What each of several gloo processes does for the settings of training that need them; spawned once for all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gonio
from gonio.errors import GonioError
from gonio.geometry.norms import whole
from laws.settings import SUBJECTS, Subject, step
from ranks import WORLD

REFUSED = "refused"
Result = list[Tensor] | str  # the state after the training; the sentence of a refusal; or an error with its place


def mesh_of(kind: str) -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("copies", "shards")) if kind == "HSDP" else flat()


def flat() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def state(model: nn.Module) -> list[Tensor]:
    return [whole(t).detach().clone() for t in model.state_dict().values()]


def trained(
    subject: Subject, wrap: Callable[[nn.Module], nn.Module], *, spread: bool = True, joined: bool = False
) -> list[Tensor]:
    """Two steps; each process has its part of the batch if it is `spread`, and the penalty is told so if `joined`."""
    model = subject.model()
    wrapped = wrap(model)
    options = {"process_group": dist.group.WORLD} if joined else {}
    penalty = subject.penalty(wrapped, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for _ in range(2):
        step(wrapped, part(subject) if spread else subject.x(), penalty, optimizer)
    return state(model)


def part(subject: Subject) -> Tensor:
    """Of the batch, for this process."""
    return subject.x().chunk(WORLD)[dist.get_rank()]


def data_parallel(subject: Subject) -> list[Tensor]:
    return trained(subject, DistributedDataParallel)


def sharded(subject: Subject) -> list[Tensor]:
    return trained(subject, lambda model: fully_shard(model, mesh=flat()))


def hybrid(subject: Subject) -> list[Tensor]:
    return trained(subject, lambda model: fully_shard(model, mesh=mesh_of("HSDP")), joined=True)


def tensor_parallel(subject: Subject) -> list[Tensor]:
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    return trained(subject, lambda model: parallelize_module(model, flat(), plan), spread=False)


def saved(subject: Subject) -> list[Tensor]:
    """Sharded; saved after one step and loaded into a new model for the second. Measured at the end."""
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    for number in range(2):
        model = fully_shard(subject.model(), mesh=flat())
        penalty = subject.penalty(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0)
        if number:
            weights, moments = get_state_dict(model, optimizer)
            loaded = {"model": weights, "optimizer": moments}
            dcp.load(loaded, checkpoint_id=str(folder[0]))
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step(model, part(subject), penalty, optimizer)
        if number == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=str(folder[0]))
    dist.barrier()  # no process reads the folder any more
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    found, trained_tensors = state(model), [whole(p).detach().clone() for p in model.parameters()]
    if any(p.ndim > 1 for p in model.parameters()):
        gonio.Tracker(model).step(0)
    gonio.measure(model, batch=subject.x())  # reads weights, for which a spectral norm's vectors advance
    assert all(torch.equal(whole(p), before) for p, before in zip(model.parameters(), trained_tensors, strict=True))
    return found


def flattened(subject: Subject) -> list[Tensor]:
    """FSDP 1, which is no column of the page: it is refused where Parameters are computed."""
    return trained(subject, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=True))


DISTRIBUTED: dict[str, Callable[[Subject], list[Tensor]]] = {
    "DDP": data_parallel,
    "FSDP2": sharded,
    "HSDP": hybrid,
    "TP": tensor_parallel,
    "DCP": saved,
}


def _attempt(work: Callable[[Subject], list[Tensor]], subject: Subject) -> Result:
    try:
        return work(subject)
    except Exception as error:  # the parent reports it
        by_torch = isinstance(error, NotImplementedError) and "currently only support" in str(error)
        return f"{REFUSED if by_torch or isinstance(error, GonioError) else type(error).__name__}: {error}"


def everything() -> dict[str, Result]:
    """What this process finds for each setting and subject."""
    found: dict[str, Result] = {}
    for setting, work in {**DISTRIBUTED, "FSDP1": flattened}.items():
        for subject in SUBJECTS:
            found[f"{setting} {subject.name}"] = _attempt(work, subject)
            dist.barrier()
    return found
