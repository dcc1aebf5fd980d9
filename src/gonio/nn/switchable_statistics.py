r"""Statistics of switchable normalisation, and the mixture of them.

Means and biased variances lie in one array, means first: (2, N, C) of instances, (2, N, 1) of layers, (2, 1, C) of the
batch. What is done to both is done at once.

Note [Centred statistics]
With a mean of 1e5 and a spread of 0.1, :math:`E[x^2] - E[x]^2` has no digits left in float32, nor has a
mean that is rounded to float32. So sums are taken of x minus a pivot, which is some mean over a few
positions, never far from the data; what is left, an (N, C) array, is computed in float64. Where every mean turns
out to be within a few standard deviations of 0, as in most layers, 0 is as good as a pivot, and float32 as
float64: there x is used as it is, which saves a pass over it forward and one backward.
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
    "at_least_one",
    "batch_statistics",
    "layer_statistics",
    "mix",
    "mixing_weights",
    "moments",
    "pivot_of",
    "spread",
]


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype of the small arrays: float64 where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def spread(values: Tensor, x: Tensor) -> Tensor:
    """An array (…, N, C) in the dtype of x, shaped to broadcast against it."""
    return values.to(x.dtype).view(*values.shape, *(1 for _ in x.shape[2:]))


def pivot_of(x: Tensor) -> Tensor:
    """Per sample and channel, the mean of the first row (of at most 16 positions if there are no rows)."""
    few = x.detach()[:, :, :1] if x.dim() > 3 else x.detach()[:, :, :16]
    return few.mean(tuple(range(2, x.dim())))


def moments(mean: Tensor, mean_square: Tensor, pivot: Tensor) -> Tensor:
    """Means and biased variances of x, (2, N, C), from the moments of x − pivot, (N, C)."""
    kind = accumulator(mean)
    offset = mean.to(kind)
    return torch.stack([pivot.to(kind) + offset, (mean_square.to(kind) - offset.square()).clamp_min(0)])


def layer_statistics(instance: Tensor) -> Tensor:
    """Over the channels of each sample, (2, N, 1)."""
    mean, var = instance
    center = mean.mean(1, keepdim=True)
    around = mean - center
    return torch.stack([center, torch.addcmul(var, around, around).mean(1, keepdim=True)])


def batch_statistics(instance: Tensor, *, join: bool) -> tuple[Tensor, Tensor | int]:
    """Over the samples, of all processes if `join`, (2, 1, C), and how many samples; zeros of an empty batch."""
    mean, var = instance
    if join:
        sums = total(torch.cat([mean.sum(0, keepdim=True), mean.new_full((1, 1), mean.shape[0])], 1))
        count: Tensor | int = sums[0, -1].detach()
        center = sums[:, :-1] / at_least_one(count)
    else:
        count = mean.shape[0]
        center = mean.sum(0, keepdim=True) / at_least_one(count)
    around = mean - center
    variance = torch.addcmul(var, around, around).sum(0, keepdim=True)
    return torch.stack([center, (total(variance) if join else variance) / at_least_one(count)]), count


def at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def mixing_weights(logits: tuple[Tensor, Tensor], defined: Sequence[bool], kind: torch.dtype) -> Tensor:
    """Softmax over the statistics that are defined, (kinds, 2, 1, 1): of instance, layer and perhaps batch, for
    means and variances."""
    both = torch.stack(logits, 1).to(kind)
    if not all(defined[: len(both)]):
        undefined = torch.tensor([[not d] for d in defined[: len(both)]], device=both.device)
        both = both.masked_fill(undefined, -torch.inf)
    return both.softmax(0)[..., None, None]


@dataclass(frozen=True)
class Mixed:
    """The mixture, as y = (x − mean)·rstd, and what it is mixed of."""

    mean: Tensor
    rstd: Tensor
    instance: Tensor
    layer: Tensor
    batch: Tensor


def mix(instance: Tensor, layer: Tensor, batch: Tensor, weights: Tensor, eps: float) -> Mixed:
    """The mixture of instance, layer and batch statistics."""
    of_instance, of_layer, *of_batch = weights
    shared = of_layer * layer
    shared = torch.addcmul(shared, of_batch[0], batch) if of_batch else shared
    mean, var = torch.addcmul(shared, of_instance, instance)
    return Mixed(mean, (var + eps).rsqrt(), instance, layer, batch)
