"""Second forms of operations of this package; :func:`gonio.execution.ordinary_eager` chooses them.

Each computes the same as a plain form elsewhere, which compilers, exports, function transforms and forward-mode
differentiation get. Each says what it saves of a whole training step of a ResNet-18 or of the digits network, on one
processor core. Private operations of torch are used in this file only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gonio.execution import apply, total
from gonio.geometry.norms import widen
from gonio.nn.switchable_function import (
    Affine,
    Found,
    Logits,
    Mixed,
    Settings,
    at_least_one,
    joint_statistics,
    mixing_weights,
    moments,
    pivot_of,
    slope_of,
    spread,
    switchable_norm,
    value_at,
)

Number = float | Tensor
LARGE = 2**16  # entries of an input or output, from which the forms of decoupled layers save time and memory


# --- decoupled layers -----------------------------------------------------------------------------


def product_with_squares(x: Tensor, filters: Tensor, conv: Any) -> tuple[Tensor, Tensor]:
    """`conv.product(x, filters)` and `conv.squares(x)`, with one gradient of x.

    Backward adds the share of the squares to that of the product in one pass over x instead of five: 6 % of the
    time and 8 % of the peak memory of a ResNet-18's step.
    """
    product, squares = apply(_ProductWithSquares, x, filters, conv)
    return product, squares


class _ProductWithSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, conv: Any) -> tuple[Tensor, Tensor]:
        ctx.conv = conv
        ctx.save_for_backward(x, filters)
        return conv.product(x, filters), conv.squares(x)

    @staticmethod
    def backward(ctx: Any, by_product: Tensor, by_squares: Tensor) -> tuple[Tensor | None, ...]:
        x, filters = ctx.saved_tensors
        conv, needed = ctx.conv, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # for a caller that will differentiate the gradients
            wanted = [t for t, need in zip((x, filters), needed, strict=True) if need]
            outputs = ((conv.product(x, filters), by_product), (conv.squares(x), by_squares))
            values, grads = zip(*(pair for pair in outputs if pair[0].requires_grad), strict=True)
            found = iter(torch.autograd.grad(values, wanted, grads, create_graph=True))
            return *(next(found) if need else None for need in needed), None
        by_x, by_filters = conv.product_backward(by_product, x, filters, needed)
        if by_x is not None:
            conv.group(by_x).addcmul_(conv.group(x), by_squares.unsqueeze(2), value=2)
        return by_x, by_filters, None


def scale_(
    product: Tensor,
    norm: Tensor,
    numbers: tuple[Number, Number, Number],
    slope: Callable[..., Tensor],
    closed: Callable[..., tuple[Tensor, Tensor]] | None,
    group: Callable[[Tensor], Tensor],
) -> Tensor:
    """The product times `slope(norm, *numbers)`, written over the product; the slope must not be 0 where it is not.

    Saves 23 % of the peak memory of a ResNet-18's step, and more with a learned radius, where the slope is as large
    as the product: for backward it keeps the result, which the next layer keeps anyway, and the norms. Backward
    computes the slope again and divides the product's share out of the result. `closed` gives the slope with its
    elasticity; without it autograd differentiates the slope, which takes three more temporaries of its size.
    """
    result: Tensor = apply(_Scale, product, norm, (slope, closed, group), *numbers)
    return result


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Tensor, norm: Tensor, functions: tuple[Callable[..., Any], ...], *numbers: Number
    ) -> Tensor:
        slope, _, group = ctx.functions = functions
        group(product).mul_(slope(norm, *numbers))
        ctx.mark_dirty(product)
        ctx.constants = [None if isinstance(n, Tensor) else n for n in numbers]
        ctx.save_for_backward(product, norm, *(n if isinstance(n, Tensor) else None for n in numbers))
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, *inputs = ctx.saved_tensors
        slope_of, closed, group = ctx.functions
        again = torch.is_grad_enabled()
        alpha, _, radius = ctx.constants
        if closed is not None and alpha is not None and not again:
            radius = inputs[-1] if radius is None else radius
            found = closed(inputs[0], alpha, radius)
            by_product, *others = _by_elasticity(group(grad), group(out), inputs[0], radius, *found)
            return by_product.to(out.dtype).reshape(out.shape), others[0], None, None, None, others[1]
        needed = [ctx.needs_input_grad[1], *ctx.needs_input_grad[3:]]
        if not again:
            inputs = [t.detach().requires_grad_() if need else t for t, need in zip(inputs, needed, strict=True)]
        with torch.enable_grad():
            norm, *tensors = inputs
            values = [c if t is None else t for t, c in zip(tensors, ctx.constants, strict=True)]
            slope = slope_of(norm, *values)
        grouped = group(grad).to(slope.dtype)
        by_inputs: list[Tensor | None] = [None] * len(inputs)
        if slope.requires_grad:
            # Where the slope is 0 so are the product and the result: no gradient passes.
            by_slope = (grouped * group(out)).sum_to_size(slope.shape) / (slope + torch.finfo(slope.dtype).tiny)
            wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
            with torch.set_grad_enabled(again):
                found = iter(torch.autograd.grad(slope, wanted, by_slope, create_graph=again, materialize_grads=True))
            by_inputs = [next(found) if need else None for need in needed]
        by_product = (grouped * (slope if again else slope.detach())).to(out.dtype).reshape(out.shape)
        return by_product, by_inputs[0], None, *by_inputs[1:]


def tanh_slope(norm: Tensor, alpha: float, radius: Number) -> tuple[Tensor, Tensor]:
    r"""The slope :math:`\alpha \tanh(u)/\lVert x \rVert`, and the elasticity :math:`u(1 - t^2)/t` of its tanh.

    With :math:`u = \lVert x \rVert / \rho` and :math:`t = \tanh u`: the derivative of :math:`\log t` by
    :math:`\log \lVert x \rVert`, and minus that by :math:`\log\rho`. It tends to 1 at 0. With learned radii it saves
    38 % of the peak memory of the digits network's step, for 3 % of its time, and 5 % of the time of a ResNet-18's.
    """
    u = norm / radius
    t, tiny = u.tanh(), torch.finfo(u.dtype).tiny
    elasticity = u.add_(tiny).div_(t + tiny)
    elasticity.addcmul_(elasticity, t.square(), value=-1)
    return t.mul_(alpha).div_(norm), elasticity


def _by_elasticity(
    grad: Tensor, out: Tensor, norm: Tensor, radius: Number, slope: Tensor, elasticity: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients by the product, the norm and the radius, for slopes f(‖x‖/ρ)/‖x‖; all in the grouped layout."""
    grad = grad.to(slope.dtype)
    by_product = slope.mul_(grad) if slope.shape == grad.shape else slope * grad
    share = (grad * out).sum_to_size(elasticity.shape)
    by_norm = -share.sum_to_size(norm.shape)
    share.mul_(elasticity)
    by_norm.add_(share.sum_to_size(norm.shape)).div_(norm)
    return by_product, by_norm, -share.sum_to_size(radius.shape) / radius if isinstance(radius, Tensor) else None


# --- angles ---------------------------------------------------------------------------------------


def bounded_asin(cosine: Tensor, floor: float) -> Tensor:
    """As `gonio.nn.angular.bounded_asin`, with one evaluation of the arcsine instead of two.

    Saves 12 % of a ResNet-18's step with the angular part Linear.
    """
    result: Tensor = apply(_BoundedAsin, cosine, floor)
    return result


class _BoundedAsin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cosine: Tensor, floor: float) -> Tensor:
        ctx.floor = floor
        ctx.save_for_backward(cosine)
        return cosine.clamp(-1, 1).asin_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cosine,) = ctx.saved_tensors
        return grad * (1 - cosine * cosine).clamp_min(ctx.floor).rsqrt(), None


# --- switchable normalisation ---------------------------------------------------------------------

LONG = 4096  # entries that are summed one after the other by each lane of a vector register: 2e-7 of their sum is lost
NEAR = 4.0  # mixed standard deviations: with means up to here, E[x²] − E[x]² loses about a decimal digit
Normalised = tuple[Tensor, Tensor, Tensor | None, "_Mixture", Tensor | int]  # output; weights, pivot, mixture, count


@dataclass(frozen=True)
class _Mixture(Mixed):
    """The mixture with its statistics: (2, N, C) of instances, (2, N, 1) of layers, (2, 1, C) of batches.

    Both are computed at once: between passes over large tensors nothing is left in the cores' caches, and
    each operation on a small one costs as much as a thousand entries of a large one.
    """

    instance: Tensor
    layer: Tensor
    batch: Tensor


def switchable_norm_by_rows(
    x: Tensor, logits: Logits, affine: Affine, running: Tensor | None, settings: Settings
) -> Found:
    """As `switchable_norm`; saves 14 % of a ResNet-18's step. The input alone is kept for backward."""
    out, batch, count = apply(_SwitchableNorm, x, *logits, *affine, running, settings)
    return out, None if batch is None else batch.squeeze(1).unbind(), count


class _SwitchableNorm(torch.autograd.Function):
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
    ) -> tuple[Tensor, Tensor | None, Tensor | int]:
        logits, affine = (mean_logits, var_logits), (gamma, beta)
        out, weights, pivot, mixed, count = _normalised(widen(x), logits, affine, running, settings)
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
        mixed = _Mixture(mean, rstd, instance, layer, batch)
        values, grad, slope, area = widen(x), widen(grad), slope_of(mixed, gamma), math.prod(x.shape[2:])
        rows, centred = Rows.of(values), values if pivot is None else values - spread(pivot, values)
        sums = (rows.sums if has_rows(grad, centred) else _sums)(grad, centred).to(rstd.dtype)
        by_shift, by_scale = sums
        about = mean if pivot is None else mean - pivot.to(mean.dtype)
        by_scale.addcmul_(about, by_shift, value=-1).mul_(rstd)  # Σ grad·(x − mean)·rstd
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


def _normalised(x: Tensor, logits: Logits, affine: Affine, running: Tensor | None, settings: Settings) -> Normalised:
    """See Note [Centred statistics]. To look at the means costs little on CPU. Batches that are joined are centred
    unseen, because all processes must come to the same number of joint sums."""
    if has_rows(x) and not settings.join:
        rows, weights = Rows.of(x), mixing_weights(logits, settings.defined, x.dtype)
        mixed = _mixed_about_zero(rows.sums(x, x).div_(math.prod(x.shape[2:])), weights, running, settings)
        if (mixed.instance[0] * mixed.rstd).abs_().max().item() <= NEAR:
            slope = slope_of(mixed, affine[0])
            line = torch.stack([value_at(None, mixed, slope, affine[1]), slope])
            return rows.scale(x, line), weights, None, mixed, 0 if running is not None else len(x)
    pivot = pivot_of(x)
    out = x - spread(pivot, x)
    pair = moments(*_means(out), pivot)
    layer, batch, weights, count = joint_statistics(pair, logits, running, settings)
    mixed = _mix(torch.stack(pair), torch.stack(layer), torch.stack(batch), weights, settings.eps)
    slope = slope_of(mixed, affine[0])
    return _scale_(out, slope, value_at(pivot, mixed, slope, affine[1])), weights, pivot, mixed, count


def _mixed_about_zero(instance: Tensor, weights: Tensor, running: Tensor | None, settings: Settings) -> _Mixture:
    """From E[x] and E[x²] of every sample and channel, which are overwritten."""
    layer = instance.mean(2, keepdim=True)
    batch = instance.mean(1, keepdim=True) if running is None else running.to(instance.dtype)
    for mean, square in (instance, layer) if running is not None else (instance, layer, batch):
        square.addcmul_(mean, mean, value=-1)
    return _mix(instance, layer, batch, weights, settings.eps)


def _mix(instance: Tensor, layer: Tensor, batch: Tensor, weights: Tensor, eps: float) -> _Mixture:
    of_instance, of_layer, *of_batch = weights
    shared = of_layer * layer
    shared = torch.addcmul(shared, of_batch[0], batch) if of_batch else shared
    mean, var = torch.addcmul(shared, of_instance, instance)
    return _Mixture(mean, (var + eps).rsqrt(), instance, layer, batch)


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


def _through_mixture(ctx: Any, mixed: _Mixture, weights: Tensor, by_mixed: Tensor) -> tuple[Tensor, Tensor]:
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
        of_batch = total(of_batch, ctx.settings.process_group) if ctx.settings.join else of_batch
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
    out, *_ = switchable_norm(x, logits, affine, running, settings)
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


def has_rows(*tensors: Tensor) -> bool:
    """Whether the kernels apply."""
    return all(t.is_cpu and t.is_contiguous() and t.numel() for t in tensors)


@dataclass(frozen=True)
class Rows:
    """The constants that the kernels ask for, one of each per row of a tensor (N, C, *positions)."""

    zeros: Tensor
    ones: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Self:
        shape = (x.shape[0] * x.shape[1],)
        return cls(x.new_zeros(shape), x.new_ones(shape))

    def sums(self, grad: Tensor, x: Tensor) -> Tensor:
        """Σ grad and Σ grad·x of each row, (2, N, C), in the dtype of x."""
        area = math.prod(x.shape[2:])
        pieces = _pieces(area)
        zeros, ones = (t.repeat(pieces) if pieces > 1 else t for t in (self.zeros, self.ones))
        rows = len(ones)
        _, products, sums = torch.ops.aten.native_group_norm_backward(
            grad, x, zeros, ones, ones, 1, rows, area // pieces, rows, [False, True, True]
        )
        both = torch.stack([sums, products])
        return both.view(2, *x.shape[:2], pieces).sum(-1) if pieces > 1 else both.view(2, *x.shape[:2])

    def scale(self, x: Tensor, line: Tensor) -> Tensor:
        """shift + scale·x with one number of each per row, line = (shift, scale) of shape (2, N, C)."""
        shift, scale = line.to(x.dtype).view(2, -1).unbind()
        rows = x.view(1, len(scale), -1)
        out, _, _ = torch.native_batch_norm(rows, scale, shift, self.zeros, self.ones, False, 0.0, 0.0)
        return torch.ops.aten._unsafe_view(out, x.shape)  # no view: who gets it may change it in place


def _pieces(area: int) -> int:
    """Equal pieces of a row, a power of two of them, that are not long."""
    pieces = 1
    while area > LONG * pieces and area % (2 * pieces) == 0:
        pieces *= 2
    return pieces
