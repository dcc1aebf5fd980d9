r"""Switchable normalisation as a function, in plain operations and as one autograd function.

Between the statistics and the affine map everything is an (N, C) array, so the large tensor is read and
written as often as in batch normalisation, and the input alone is kept for backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gonio.nn.product import wide
from gonio.nn.ranks import total
from gonio.nn.switchable_statistics import Mixed, accumulator, batch_statistics, mix, moments, pivot_of, spread

__all__ = ["Settings", "fused", "plain"]


@dataclass(frozen=True)
class Settings:
    """What is no tensor."""

    eps: float
    join: bool  # batch statistics are taken over all processes


Found = tuple[Tensor, Tensor, Tensor, Tensor | int]  # output; mean, variance and samples of the batch


def plain(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    affine: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor] | None,
    settings: Settings,
) -> Found:
    """The normalised x, and the statistics of the batch."""
    values, dims = wide(x), tuple(range(2, x.dim()))
    pivot = pivot_of(values)
    centred = values - spread(pivot, values)
    instance = moments(centred.mean(dims), (centred * centred).mean(dims), pivot)
    *batch, count = (*running, 0) if running else batch_statistics(*instance, join=settings.join)
    mixed = mix(instance, (batch[0], batch[1]), *weights, settings.eps)
    scale, shift = _affine(mixed, pivot, affine)
    out = centred * spread(scale, values) + spread(shift, values)
    return out.to(x.dtype), batch[0], batch[1], count


def _affine(mixed: Mixed, pivot: Tensor, affine: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of x − pivot: y = scale·(x − pivot) + shift."""
    scale = mixed.rstd * affine[0]
    return scale, (pivot.to(scale.dtype) - mixed.mean) * scale + affine[1]


def fused(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    affine: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor] | None,
    settings: Settings,
) -> Found:
    """As `plain`, with few temporaries."""
    known = (None, None) if running is None else running
    out, mean, var, count = _Fused.apply(x, *weights, *affine, *known, settings)
    return out, mean, var, count


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean_weights: Tensor,
        var_weights: Tensor,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        settings: Settings,
    ) -> Found:
        values = wide(x)
        pivot = pivot_of(values)
        out = values - spread(pivot, values)
        instance = moments(*_means(out), pivot)
        if running_mean is None or running_var is None:
            mean, var, count = batch_statistics(*instance, join=settings.join)
        else:
            mean, var, count = running_mean, running_var, 0
        mixed = mix(instance, (mean, var), mean_weights, var_weights, settings.eps)
        scale, shift = _affine(mixed, pivot, (gamma, beta))
        out.mul_(spread(scale, out)).add_(spread(shift, out))
        ctx.settings, ctx.fixed, ctx.count = settings, running_mean is not None, count
        ctx.save_for_backward(x, mean_weights, var_weights, gamma, beta, pivot, *instance, mean, var)
        batch = (mean.clone(), var.clone(), count)
        ctx.mark_non_differentiable(*(b for b in batch if isinstance(b, Tensor)))
        ctx.set_materialize_grads(False)
        return out.to(x.dtype), *batch

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        if torch.is_grad_enabled():
            return _again(ctx, grad)
        x, mean_weights, var_weights, gamma, _, pivot, mean, var, batch_mean, batch_var = ctx.saved_tensors
        weights = mean_weights, var_weights
        values, grad = wide(x), wide(grad)
        centred = values - spread(pivot, values)
        mixed = mix((mean, var), (batch_mean, batch_var), *weights, ctx.settings.eps)
        by_shift, by_square = _sums(grad, centred)
        by_scale = by_square - (mixed.mean - pivot) * by_shift  # the sum of grad·(x − mixed mean)
        by_mean, by_var = -gamma * mixed.rstd * by_shift, -0.5 * gamma * mixed.rstd**3 * by_scale
        parameters = (
            torch.stack([(by_mean * m).sum() for m in (mean, mixed.layer[0], batch_mean)]),
            torch.stack([(by_var * v).sum() for v in (var, mixed.layer[1], batch_var)]),
            (mixed.rstd * by_scale).sum(0),
            by_shift.sum(0),
        )
        through_mean, through_var = _through_statistics(ctx, (by_mean, by_var), weights, (mean, var), mixed)
        slope = 2 * through_var / math.prod(x.shape[2:])
        shift = through_mean / math.prod(x.shape[2:]) - slope * (mean - pivot)
        centred.mul_(spread(slope, centred)).add_(spread(shift, centred))
        centred.addcmul_(grad, spread(gamma * mixed.rstd, centred))
        return centred.to(x.dtype), *parameters, None, None, None


def _through_statistics(
    ctx: Any,
    by_mixed: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    instance: tuple[Tensor, Tensor],
    mixed: Mixed,
) -> tuple[Tensor, Tensor]:
    """Gradients by the instance means and variances, through everything that is mixed of them."""
    (mean_i, mean_l, mean_b), (var_i, var_l, var_b) = weights
    by_mean, by_var = by_mixed
    over_channels = by_mean.mean(1, keepdim=True), by_var.mean(1, keepdim=True)
    through_var = var_i * by_var + var_l * over_channels[1]
    through_mean = mean_i * by_mean + mean_l * over_channels[0]
    through_mean = through_mean + 2 * var_l * (instance[0] - mixed.layer[0]) * over_channels[1]
    if ctx.fixed:
        return through_mean, through_var
    over_samples = torch.stack([by_mean.sum(0), by_var.sum(0)])
    if ctx.settings.join:
        over_samples = total(over_samples)
    over_samples = over_samples / (ctx.count.clamp_min(1) if isinstance(ctx.count, Tensor) else max(ctx.count, 1))
    through_var = through_var + var_b * over_samples[1]
    through_mean = through_mean + mean_b * over_samples[0]
    through_mean = through_mean + 2 * var_b * (instance[0] - mixed.batch[0]) * over_samples[1]
    return through_mean, through_var


def _again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients in plain operations, for a caller that will differentiate them."""
    *inputs, _, _, _, mean, var = ctx.saved_tensors
    x, mean_weights, var_weights, gamma, beta = inputs
    running = (mean, var) if ctx.fixed else None
    out, *_ = plain(x, (mean_weights, var_weights), (gamma, beta), running, ctx.settings)
    needed = [t for t, n in zip(inputs, ctx.needs_input_grad, strict=False) if n]
    found = iter(torch.autograd.grad(out, needed, grad, create_graph=True, allow_unused=True))
    return *(next(found) if n else None for n in ctx.needs_input_grad[:5]), None, None, None


def _means(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means over positions of x and of its square."""
    dims = tuple(range(2, x.dim()))
    if x.is_contiguous() and x.numel():  # vector_norm is the fastest sum of squares over innermost dimensions
        return x.mean(dims), torch.linalg.vector_norm(x, dim=dims).square() / math.prod(x.shape[2:])
    return x.mean(dims), (x * x).mean(dims)


def _sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over positions of grad and of grad·x, in the accumulator's dtype."""
    dims, kind = tuple(range(2, x.dim())), accumulator(x)
    if not (x.device.type == "cpu" and x.numel() and x.is_contiguous() and grad.is_contiguous()):
        return grad.sum(dims).to(kind), (grad * x).sum(dims).to(kind)
    # the backward of group normalisation with one group per row is a reducer without temporaries
    rows, area = x.shape[0] * x.shape[1], math.prod(x.shape[2:])
    flat, ones = (1, rows, area), x.new_ones(1, rows)
    _, by_square, by_shift = torch.ops.aten.native_group_norm_backward(
        grad.view(flat), x.view(flat), torch.zeros_like(ones), ones, ones[0], 1, rows, area, rows, [False, True, True]
    )
    return by_shift.view(x.shape[:2]).to(kind), by_square.view(x.shape[:2]).to(kind)
