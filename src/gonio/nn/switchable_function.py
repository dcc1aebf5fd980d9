r"""Switchable normalisation as a function of statistics, in plain operations.

Means and biased variances are pairs of arrays: (N, C) of instances, (N, 1) of layers, (1, C) of the batch. They are not
stacked, because a compiler fuses what is computed from separate arrays: the compiled step of a small network (three
such layers) takes 1.14 times that with batch norms, and 1.50 with stacked arrays.

Note [Centred statistics]
With a mean of 1e5 and a spread of 0.1, :math:`E[x^2] - E[x]^2` has no digits left in float32, nor has a
mean that is rounded to float32. So sums are taken of x minus a pivot, which is some mean over a few
positions, never far from the data; the (N, C) arrays that follow are computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.execution import ProcessGroup, total
from gonio.geometry.norms import widen, widest

MixLogits = tuple[Tensor, Tensor]  # of the means and of the variances
Affine = tuple[Tensor | None, Tensor | None]  # scale and shift
Pair = tuple[Tensor, Tensor]  # means and biased variances
NormOutput = tuple[Tensor, Pair | None, Tensor | int]  # output; statistics of the batch, of C channels, and its samples


@dataclass(frozen=True)
class Settings:
    """The settings of a forward that are not tensors."""

    eps: float
    join: bool  # batch statistics are taken over all processes
    defined: tuple[bool, bool, bool]  # which statistics are over more than one value
    single: bool = False  # whether those of the batch are over more than one only if it has more than one sample
    process_group: ProcessGroup | None = None


@dataclass(frozen=True)
class Mixture:
    """The mixture, as y = (x − mean)·rstd."""

    mean: Tensor
    rstd: Tensor


def switchable_norm(
    x: Tensor, logits: MixLogits, affine: Affine, running: Tensor | None, settings: Settings
) -> NormOutput:
    """The normalised x, and the statistics of the batch unless they are given as `running`."""
    values, dims = widen(x), tuple(range(2, x.dim()))
    pivot = pivot_of(values)
    centred = values - spread(pivot, values)
    instance = moments(centred.mean(dims), (centred * centred).mean(dims), pivot)
    layer, batch, weights, count = joint_statistics(instance, logits, running, settings)
    mean, var = (
        sum(weight * part[i] for weight, part in zip(weights[:, i], (instance, layer, batch), strict=False))
        for i in (0, 1)
    )
    mixed = Mixture(mean, (var + settings.eps).rsqrt())
    slope = slope_of(mixed, affine[0])
    out = centred * spread(slope, values) + spread(value_at(pivot, mixed, slope, affine[1]), values)
    return out.to(x.dtype), None if running is not None else (batch[0].squeeze(0), batch[1].squeeze(0)), count


def spread(values: Tensor, x: Tensor) -> Tensor:
    """An array (…, N, C) in the dtype of x, shaped to broadcast against it."""
    return values.to(x.dtype).view(*values.shape, *(1 for _ in x.shape[2:]))


def pivot_of(x: Tensor) -> Tensor:
    """Per sample and channel, the mean of the first row (of at most 16 positions if there are no rows)."""
    few = x.detach()[:, :, :1] if x.dim() > 3 else x.detach()[:, :, :16]
    return few.mean(tuple(range(2, x.dim())))


def moments(mean: Tensor, mean_square: Tensor, pivot: Tensor) -> Pair:
    """Means and biased variances of x from the moments of x − pivot, (N, C)."""
    kind = widest(mean)
    offset = mean.to(kind)
    return pivot.to(kind) + offset, (mean_square.to(kind) - offset.square()).clamp_min(0)


def layer_statistics(instance: Pair) -> Pair:
    """Over the channels of each sample, (N, 1)."""
    mean, var = instance
    center = mean.mean(1, keepdim=True)
    around = mean - center
    return center, torch.addcmul(var, around, around).mean(1, keepdim=True)


def batch_statistics(instance: Pair, *, join: bool, group: ProcessGroup | None = None) -> tuple[Pair, Tensor | int]:
    """Over the samples, of a group's processes if `join`, (1, C), and how many; zeros of an empty batch."""
    mean, var = instance
    if join:
        sums = total(torch.cat([mean.sum(0, keepdim=True), mean.new_full((1, 1), mean.shape[0])], 1), group)
        count: Tensor | int = sums[0, -1].detach()
        center = sums[:, :-1] / at_least_one(count)
    else:
        count = mean.shape[0]
        center = mean.sum(0, keepdim=True) / at_least_one(count)
    around = mean - center
    variance = torch.addcmul(var, around, around).sum(0, keepdim=True)
    return (center, (total(variance, group) if join else variance) / at_least_one(count)), count


def at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def mixing_weights(logits: tuple[Tensor, Tensor], defined: Sequence[bool], kind: torch.dtype) -> Tensor:
    """Softmax over the statistics that are defined, (kinds, 2, 1, 1): of instance, layer and perhaps batch, for
    means and variances."""
    both = torch.stack(logits, 1).to(kind)
    if not all(defined[: len(both)]):  # row by row: a mask would be copied to the device in every step
        rows = zip(both, defined, strict=False)
        both = torch.stack([row if known else torch.full_like(row, -torch.inf) for row, known in rows])
    return both.softmax(0)[..., None, None]


def joint_statistics(
    instance: Pair, logits: MixLogits, running: Tensor | None, settings: Settings
) -> tuple[Pair, Pair, Tensor, Tensor | int]:
    """The statistics of the layers and of the batch, all mixing weights, and the number of samples of the batch."""
    kind = instance[0].dtype
    weights = mixing_weights(logits, settings.defined, kind)
    if running is not None:
        means, variances = running.to(kind)
        return layer_statistics(instance), (means, variances), weights, 0
    batch, count = batch_statistics(instance, join=settings.join, group=settings.process_group)
    if settings.single:
        alone = mixing_weights(logits, (*settings.defined[:2], False), kind)
        weights = torch.where(torch.as_tensor(count == 1), alone, weights)
    return layer_statistics(instance), batch, weights, count


def slope_of(mixed: Mixture, gamma: Tensor | None) -> Tensor:
    """The derivative of the output by x at given statistics."""
    return mixed.rstd if gamma is None else mixed.rstd * gamma.to(mixed.rstd.dtype)


def value_at(pivot: Tensor | None, mixed: Mixture, slope: Tensor, beta: Tensor | None) -> Tensor:
    """The output where x is the pivot, or without one 0."""
    beta = slope.new_zeros(()) if beta is None else beta.to(slope.dtype)
    mean = mixed.mean if pivot is None else mixed.mean - pivot.to(slope.dtype)
    return torch.addcmul(beta, mean, slope, value=-1)
