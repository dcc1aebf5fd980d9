"""Tensors that are spread over processes (`DTensor`, as under FSDP2) stay so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["identity_like", "is_sharded", "replicated_like"]


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor."""
    return hasattr(x, "device_mesh")


def replicated_like(x: Tensor, reference: Tensor) -> Tensor:
    """A plain tensor that all processes hold alike, in a form that combines with `reference`."""
    if not is_sharded(reference):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = reference.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def identity_like(gram: Tensor) -> Tensor:
    """The identity matrix of the size of a (stack of) square matrices."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return replicated_like(eye, gram)
