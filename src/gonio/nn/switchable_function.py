r"""Switchable normalisation as a function, in plain operations and as one autograd function.

Between the statistics and the affine map everything is an (N, C) array, so the large tensor is read and
written as often as in batch normalisation, and the input alone is kept for backward.

Note [Few operations]
Between passes over large tensors nothing is left in the cores' caches, and each operation on a small one costs
as much as a thousand entries of a large one. So what is done to means and variances is done to both at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gonio.nn.product import wide
from gonio.nn.ranks import total
from gonio.nn.rows import Rows, has_rows
from gonio.nn.switchable_statistics import (
    Mixed,
    accumulator,
    at_least_one,
    batch_statistics,
    layer_statistics,
    mix,
    mixing_weights,
    moments,
    pivot_of,
    spread,
)

__all__ = ["Settings", "fused", "plain"]

NEAR = 4.0  # mixed standard deviations: with means up to here, E[x²] − E[x]² loses about a decimal digit
Logits = tuple[Tensor, Tensor]  # of the means and of the variances
Affine = tuple[Tensor | None, Tensor | None]  # scale and shift


@dataclass(frozen=True)
class Settings:
    """What is no tensor."""

    eps: float
    join: bool  # batch statistics are taken over all processes
    defined: tuple[bool, bool, bool]  # which statistics are over more than one value


Found = tuple[Tensor, Tensor | None, Tensor | int]  # output; statistics of the batch, (2, 1, C), and its samples


def plain(x: Tensor, logits: Logits, affine: Affine, running: Tensor | None, settings: Settings) -> Found:
    """The normalised x, and the statistics of the batch unless they were given."""
    values, dims = wide(x), tuple(range(2, x.dim()))
    pivot = pivot_of(values)
    centred = values - spread(pivot, values)
    instance = moments(centred.mean(dims), (centred * centred).mean(dims), pivot)
    weights = mixing_weights(logits, settings.defined, instance.dtype)
    mixed, count = _mixed(instance, weights, running, settings)
    slope = _slope(mixed, affine[0])
    out = centred * spread(slope, values) + spread(_value_at(pivot, mixed, slope, affine[1]), values)
    return out.to(x.dtype), mixed.batch if running is None else None, count


def _mixed(instance: Tensor, weights: Tensor, running: Tensor | None, settings: Settings) -> tuple[Mixed, Tensor | int]:
    if running is None:
        batch, count = batch_statistics(instance, join=settings.join)
    else:
        batch, count = running.to(instance.dtype), 0
    return mix(instance, layer_statistics(instance), batch, weights, settings.eps), count


def _slope(mixed: Mixed, gamma: Tensor | None) -> Tensor:
    """The derivative of the output by x at given statistics."""
    return mixed.rstd if gamma is None else mixed.rstd * gamma.to(mixed.rstd.dtype)


def _value_at(pivot: Tensor | None, mixed: Mixed, slope: Tensor, beta: Tensor | None) -> Tensor:
    """The output where x is the pivot, or without one 0."""
    beta = slope.new_zeros(()) if beta is None else beta.to(slope.dtype)
    return torch.addcmul(beta, _seen(mixed.mean, pivot), slope, value=-1)


def _seen(mean: Tensor, pivot: Tensor | None) -> Tensor:
    """A mean of x as one of x − pivot."""
    return mean if pivot is None else mean - pivot.to(mean.dtype)


def fused(x: Tensor, logits: Logits, affine: Affine, running: Tensor | None, settings: Settings) -> Found:
    """As `plain`, with few temporaries."""
    out, batch, count = _Fused.apply(x, *logits, *affine, running, settings)
    return out, batch, count


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean_logits: Tensor,
        var_logits: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        running: Tensor | None,
        settings: Settings,
    ) -> Found:
        logits, affine = (mean_logits, var_logits), (gamma, beta)
        out, weights, pivot, mixed, count = _normalised(wide(x), logits, affine, running, settings)
        ctx.settings, ctx.fixed, ctx.count = settings, running is not None, count
        ctx.save_for_backward(x, *logits, *affine, weights, pivot, *vars(mixed).values())
        batch = None if ctx.fixed else mixed.batch
        ctx.mark_non_differentiable(*(b for b in (batch, count) if isinstance(b, Tensor)))
        ctx.set_materialize_grads(False)
        return out.to(x.dtype), batch, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, mean_logits, var_logits, gamma, beta, weights, pivot, mean, rstd, *means_and_variances = ctx.saved_tensors
        instance, layer, batch = means_and_variances
        if torch.is_grad_enabled():
            given = batch if ctx.fixed else None
            return *_again(x, (mean_logits, var_logits), (gamma, beta), given, ctx.settings, grad), None, None
        mixed = Mixed(mean, rstd, instance, layer, batch)
        values, grad, slope, area = wide(x), wide(grad), _slope(mixed, gamma), math.prod(x.shape[2:])
        rows, centred = Rows.of(values), values if pivot is None else values - spread(pivot, values)
        sums = (rows.sums if has_rows(grad, centred) else _sums)(grad, centred).to(rstd.dtype)
        by_shift, by_scale = sums
        by_scale.addcmul_(_seen(mean, pivot), by_shift, value=-1).mul_(rstd)  # Σ grad·(x − mean)·rstd
        by_logits, line = _through_mixture(ctx, mixed, weights, _by_mixture(sums, rstd, slope, area))
        by_mean, by_var = by_logits.mul_(area).unbind(1)
        by_beta, by_gamma = sums.sum(1)
        parameters = (
            None if t is None else by.to(t.dtype)
            for by, t in ((by_mean, mean_logits), (by_var / 2, var_logits), (by_gamma, gamma), (by_beta, beta))
        )
        if not ctx.needs_input_grad[0]:
            return None, *parameters, None, None
        if pivot is None:
            by_x = rows.scale(values, line)
        else:
            by_x = _scale_(centred, line[1], line[0].addcmul_(line[1], pivot))
        by_x.addcmul_(grad, spread(slope, by_x))
        return by_x.to(x.dtype), *parameters, None, None


Normalised = tuple[Tensor, Tensor, Tensor | None, Mixed, Tensor | int]  # output; weights, pivot, mixture and count


def _normalised(x: Tensor, logits: Logits, affine: Affine, running: Tensor | None, settings: Settings) -> Normalised:
    """See Note [Centred statistics]. To look at the means costs little on CPU. Batches that are joined are centred
    unseen, because all processes must come to the same number of joint sums."""
    if has_rows(x) and not settings.join:
        rows, weights = Rows.of(x), mixing_weights(logits, settings.defined, x.dtype)
        mixed = _mixed_about_zero(rows.sums(x, x).div_(math.prod(x.shape[2:])), weights, running, settings)
        if (mixed.instance[0] * mixed.rstd).abs_().max().item() <= NEAR:
            slope = _slope(mixed, affine[0])
            line = torch.stack([_value_at(None, mixed, slope, affine[1]), slope])
            return rows.scale(x, line), weights, None, mixed, 0 if running is not None else len(x)
    pivot, weights = pivot_of(x), mixing_weights(logits, settings.defined, accumulator(x))
    out = x - spread(pivot, x)
    mixed, count = _mixed(moments(*_means(out), pivot), weights, running, settings)
    slope = _slope(mixed, affine[0])
    return _scale_(out, slope, _value_at(pivot, mixed, slope, affine[1])), weights, pivot, mixed, count


def _mixed_about_zero(instance: Tensor, weights: Tensor, running: Tensor | None, settings: Settings) -> Mixed:
    """From E[x] and E[x²] of every sample and channel, which are overwritten."""
    layer = instance.mean(2, keepdim=True)
    batch = instance.mean(1, keepdim=True) if running is None else running.to(instance.dtype)
    for mean, square in (instance, layer) if running is not None else (instance, layer, batch):
        square.addcmul_(mean, mean, value=-1)
    return mix(instance, layer, batch, weights, settings.eps)


def _scale_(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale·x + shift in place, with one number of each per sample and channel."""
    return x.mul_(spread(scale, x)).add_(spread(shift, x))


def _by_mixture(sums: Tensor, rstd: Tensor, slope: Tensor, area: int) -> Tensor:
    """Gradients by the mixed means, and twice those by the mixed variances, per position, (2, N, C).

    From Σ grad and Σ grad·(x − mean)·rstd.
    """
    by_mixed = sums * (slope * (-1 / area))
    by_mixed[1].mul_(rstd)
    return by_mixed


def _through_mixture(ctx: Any, mixed: Mixed, weights: Tensor, by_mixed: Tensor) -> tuple[Tensor, Tensor]:
    r"""Gradients by the logits, (kinds, 2), and by x through its statistics, as q and p of p·x + q, (2, N, C).

    With :math:`a_k` and :math:`b_k` the averages of `by_mixed` over what the statistics k are over, the latter is
    :math:`\sum_k w_k a_k + w'_k b_k (x - \mu_k)`. As `by_mixed` is, the former are per position, and twice as large
    for variances.
    """
    of_layer, of_batch = by_mixed.sum(2, keepdim=True), by_mixed.sum(1, keepdim=True)
    parts = ((by_mixed, mixed.instance), (of_layer, mixed.layer), (of_batch, mixed.batch))
    by_weights = torch.stack([(by * of).sum((1, 2), keepdim=True) for by, of in parts[: len(weights)]])
    by_logits = torch._softmax_backward_data(by_weights, weights, 0, weights.dtype).flatten(1)
    w_instance, w_layer, *w_batch = weights
    line = _about_zero_(by_mixed.mul_(w_instance), mixed.instance)
    line.add_(_about_zero_(of_layer * (w_layer / by_mixed.shape[2]), mixed.layer))
    if w_batch and not ctx.fixed:
        of_batch = total(of_batch) if ctx.settings.join else of_batch
        line.add_(_about_zero_(of_batch * (w_batch[0] / at_least_one(ctx.count)), mixed.batch))
    return by_logits, line


def _about_zero_(line: Tensor, statistics: Tensor) -> Tensor:
    """From a + b·(x − mean) to (a − b·mean) + b·x, in place."""
    constant, slope = line
    constant.addcmul_(slope, statistics[0], value=-1)
    return line


def _again(
    x: Tensor, logits: Logits, affine: Affine, running: Tensor | None, settings: Settings, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients in plain operations, for a caller that will differentiate them."""
    out, *_ = plain(x, logits, affine, running, settings)
    inputs = [t if t is not None and t.requires_grad else None for t in (x, *logits, *affine)]
    needed = [t for t in inputs if t is not None]
    found = iter(torch.autograd.grad(out, needed, grad, create_graph=True, allow_unused=True))
    return tuple(None if t is None else next(found) for t in inputs)


def _means(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means over positions of x and of its square."""
    dims = tuple(range(2, x.dim()))
    if x.is_contiguous() and x.numel():  # vector_norm is the fastest sum of squares over innermost dimensions
        return x.mean(dims), torch.linalg.vector_norm(x, dim=dims).square() / math.prod(x.shape[2:])
    return x.mean(dims), (x * x).mean(dims)


def _sums(grad: Tensor, x: Tensor) -> Tensor:
    """Sums over positions of grad and of grad·x, (2, N, C)."""
    dims = tuple(range(2, x.dim()))
    return torch.stack([grad.sum(dims), (grad * x).sum(dims)])
