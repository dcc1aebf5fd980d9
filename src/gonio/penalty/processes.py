"""The processes among which a batch is divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["data_parallel_group"]


def data_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """The process group of DistributedDataParallel, or of a one-dimensional FSDP2 mesh; else None."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: ProcessGroup = model.process_group
        return group
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.ndim == 1:
            sharded: ProcessGroup = mesh.get_group()
            return sharded
    return None
