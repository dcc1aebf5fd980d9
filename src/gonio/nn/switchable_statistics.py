r"""Statistics of switchable normalisation, and the mixture of them.

Note [Centred statistics]
With a mean of 1e5 and a spread of 0.1, :math:`E[x^2] - E[x]^2` has no digits left in float32, nor has a
mean that is rounded to float32. So sums are taken of x minus a pivot, which is some mean over a few
positions, never far from the data; what is left, an (N, C) array, is computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.nn.ranks import total

__all__ = [
    "Mixed",
    "accumulator",
    "batch_statistics",
    "layer_statistics",
    "mix",
    "mixing_weights",
    "moments",
    "pivot_of",
    "spread",
]

Pair = tuple[Tensor, Tensor]  # a mean and a variance


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype of the small arrays: float64 where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def spread(values: Tensor, x: Tensor) -> Tensor:
    """An (N, C) array in the dtype of x, shaped to broadcast against it."""
    return values.to(x.dtype)[(..., *(None for _ in x.shape[2:]))]


def pivot_of(x: Tensor) -> Tensor:
    """Per sample and channel, the mean of the first row (of at most 16 positions if there are no rows)."""
    few = x.detach()[:, :, :1] if x.dim() > 3 else x.detach()[:, :, :16]
    return few.mean(tuple(range(2, x.dim())))


def moments(mean: Tensor, mean_square: Tensor, pivot: Tensor) -> Pair:
    """Mean and biased variance of x, from the moments of x − pivot; all (N, C)."""
    kind = accumulator(mean)
    offset = mean.to(kind)
    return pivot.to(kind) + offset, (mean_square.to(kind) - offset.square()).clamp_min(0)


def layer_statistics(mean: Tensor, var: Tensor) -> Pair:
    """Over the channels of each sample, (N, 1)."""
    center = mean.mean(1, keepdim=True)
    return center, (var + (mean - center).square()).mean(1, keepdim=True)


def batch_statistics(mean: Tensor, var: Tensor, *, join: bool) -> tuple[Tensor, Tensor, Tensor | int]:
    """Over the samples, of all processes if `join`, (C,), and how many samples; zeros of an empty batch."""
    if not join:
        n = max(mean.shape[0], 1)
        center = mean.sum(0) / n
        return center, (var + (mean - center).square()).sum(0) / n, mean.shape[0]
    sums = total(torch.cat([mean.sum(0), mean.new_full((1,), mean.shape[0])]))
    count = sums[-1].detach()
    center = sums[:-1] / count.clamp_min(1)
    return center, total((var + (mean - center).square()).sum(0)) / count.clamp_min(1), count


def mixing_weights(logits: Tensor, defined: Sequence[bool]) -> Tensor:
    """Softmax over the statistics that are defined; the weights of instance, layer and batch."""
    logits = logits.to(accumulator(logits))
    if not all(defined[: len(logits)]):
        undefined = torch.tensor([not d for d in defined[: len(logits)]], device=logits.device)
        logits = logits.masked_fill(undefined, -torch.inf)
    weights = logits.softmax(0)
    return weights if len(weights) == 3 else torch.nn.functional.pad(weights, (0, 1))


@dataclass(frozen=True)
class Mixed:
    """The mixture, as y = (x − mean)·rstd, and what it is mixed of."""

    mean: Tensor
    rstd: Tensor
    layer: Pair
    batch: Pair


def mix(instance: Pair, batch: Pair, mean_weights: Tensor, var_weights: Tensor, eps: float) -> Mixed:
    """The mixture of instance, layer and batch statistics."""
    layer = layer_statistics(*instance)
    means, variances = zip(instance, layer, batch, strict=True)
    mean = sum((w * m for w, m in zip(mean_weights, means, strict=True)), start=torch.zeros_like(instance[0]))
    var = sum((w * v for w, v in zip(var_weights, variances, strict=True)), start=torch.zeros_like(instance[0]))
    return Mixed(mean, (var + eps).rsqrt(), layer, batch)
