"""Weights that are spread over processes (`DTensor`, as under FSDP2) stay so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gonio.execution import is_sharded

__all__ = ["identity_like", "replicated", "replicated_like", "with_placed_gradient"]


def replicated_like(x: Tensor, reference: Tensor) -> Tensor:
    """A plain tensor with the same values in every process, as a DTensor if `reference` is one."""
    if not is_sharded(reference):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = reference.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicated(x: Any) -> Tensor:
    """A DTensor with its partial sums added and its shards gathered in every process; other tensors unchanged."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate

    whole: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return whole


class _Placed(torch.autograd.Function):
    """The identity, with a gradient that is placed like the tensor."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any], output: Any) -> None:
        ctx.placements = inputs[0].placements

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].redistribute(placements=ctx.placements)


def with_placed_gradient(x: Tensor) -> Tensor:
    """`x`, and if it is sharded, with a gradient that is sharded like it: FSDP2 relies on that."""
    if not is_sharded(x):
        return x
    placed: Tensor = _Placed.apply(x)
    return placed


def identity_like(gram: Tensor) -> Tensor:
    """The identity matrix of the size of a (stack of) square matrices."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return replicated_like(eye, gram)
