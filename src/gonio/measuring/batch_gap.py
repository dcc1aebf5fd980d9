"""How far a norm's output in evaluation is from what it gives in training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["train_eval_gap"]


@torch.no_grad()
def train_eval_gap(norm: nn.Module, inputs: Any, output: Any) -> float | None:
    r"""Root mean square of the output with the batch's statistics minus `output`, over the deviation of `output`.

    None for what keeps no running statistics or has seen no batch, for a batch of which there are none (one value per
    channel), and over several processes, which would have to be asked together. The norm's statistics do not move.
    """
    if not _has_statistics(norm) or not isinstance(output, Tensor) or output.numel() < 2 or _several_processes():
        return None
    trained = _in_training(norm, inputs)
    if trained is None:
        return None
    size = output.double().std(correction=0)
    gap = (trained.double() - output.double()).square().mean().sqrt()
    found = float(gap / size)
    return found if size > 0 and found < float("inf") else None


def _has_statistics(norm: nn.Module) -> bool:
    """Whether it computes with running statistics that at least one batch has moved."""
    mean, var = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
    if mean is None or var is None or norm.training:
        return False
    return bool(mean.any()) or bool((var != 1).any())  # an instance norm counts no batches


def _several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _in_training(norm: nn.Module, inputs: Any) -> Tensor | None:
    """Its output in training mode; hooks are passed by, and its buffers are as before."""
    kept = {name: buffer.clone() for name, buffer in norm._buffers.items() if buffer is not None}
    norm.training = True
    try:
        found = norm.forward(*inputs)
    except (ValueError, RuntimeError):  # a single value per channel; a norm that trains on other devices only
        return None
    finally:
        norm.training = False
        for name, value in kept.items():
            norm._buffers[name].copy_(value)  # type: ignore[union-attr]
    return found if isinstance(found, Tensor) else None
