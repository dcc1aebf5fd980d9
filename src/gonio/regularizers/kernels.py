"""Closed forms of values and gradients: what autograd alone would compute with more products, passes or operations.

Each has a plain form beside the docstring of its formula, for all that is not :func:`gonio.execution.ordinary_eager`
and for second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from gonio.execution import ProcessGroup
from gonio.execution import total as sum_over_processes
from gonio.geometry.norms import gram, matrix_vector


class WithGradient(torch.autograd.Function):
    """A value at `x` with its gradient there; `plain` evaluates it in operations that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor, plain: Callable[[Tensor], Any]) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(x, gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.autograd.grad(ctx.plain(x).value, x, grads[0], create_graph=True)[0], None, None, None
        return gradient * grads[0], None, None, None


# --- orthogonality ------------------------------------------------------------------------------------


def defect_and_gradient(w: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """‖A Aᵀ − I‖² for A = W or Wᵀ, whichever has fewer rows, or Σ_{i≠j} ⟨w_i, w_j⟩²; and its gradient.

    The second is computed on the smaller side as well, because ‖W Wᵀ‖² = ‖Wᵀ W‖². The gradient of a single matrix has
    two dimensions: one product is faster than a batch of one.
    """
    w = w[0] if w.shape[0] == 1 else w
    wide = w.shape[-2] <= w.shape[-1]
    defect = gram(w if wide else w.mT)
    if diagonal:
        defect.diagonal(dim1=-2, dim2=-1).sub_(1)
    elif wide:
        defect.diagonal(dim1=-2, dim2=-1).zero_()
    value = _squared_norm(defect)
    if w.dim() == 2:  # one operation instead of two
        gradient = torch.addmm(w, *((defect, w) if wide else (w, defect)), beta=0, alpha=4)
    else:
        defect.mul_(4)
        gradient = defect @ w if wide else w @ defect
    if not diagonal and not wide:
        squares = (w * w).sum(-1, keepdim=True)
        value = (value - _squared_norm(squares)).clamp_min(0)
        gradient.addcmul_(w, squares, value=-4)
    return value, gradient


def worst_entry_and_gradient(a: Tensor, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Σ over matrices of max |A Aᵀ − I|, or of max |A Aᵀ| off the diagonal; the gradient is that of one worst entry."""
    if not a.numel():  # no filters, or filters without entries
        return a.new_zeros(()), torch.zeros_like(a)
    deviation, which = gram(a[0]).unsqueeze(0) if len(a) == 1 else gram(a), torch.arange(len(a), device=a.device)
    entries = deviation.diagonal(dim1=-2, dim2=-1)
    entries.sub_(1) if diagonal else entries.zero_()
    flat = deviation.flatten(1)
    index = flat.abs().argmax(1)
    worst = flat[which, index]
    one, other, sign = index // a.shape[1], index % a.shape[1], worst.sign().unsqueeze(1)
    gradient = torch.zeros_like(a)
    gradient[which, one] += sign * a[which, other]
    gradient[which, other] += sign * a[which, one]
    return worst.abs().sum(), gradient


def _squared_norm(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


# --- SRIP -----------------------------------------------------------------------------------------------


def stretch_and_gradient(a: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ |A Aᵀ v − v| over matrices for constant columns v, the next v, and the gradient u (Aᵀ v)ᵀ + v (Aᵀ u)ᵀ.

    u is the image at length 1, and the next v; an image of length 0 has no direction: u is 0, and v stays.
    The gradient of a single matrix has two dimensions.
    """
    if len(a) == 1:  # with products of matrices and vectors, faster than batches of one
        length, following, gradient = _stretch(a[0], vector.view(-1))
        return length, following.view_as(vector), gradient
    length, following, gradient = torch.vmap(_stretch)(a, vector.squeeze(-1))
    return length.sum(), following.unsqueeze(-1), gradient


def _stretch(a: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    turned = a.T
    inner = matrix_vector(turned, vector)
    image = matrix_vector(a, inner) - vector
    length = torch.linalg.vector_norm(image)
    unit = image / length.clamp_min(torch.finfo(a.dtype).tiny)
    gradient = torch.addr(torch.outer(unit, inner), vector, matrix_vector(turned, unit))
    return length, torch.where(length > 0, unit, vector), gradient


# --- scale shift ----------------------------------------------------------------------------------------


def log_norm(square: Tensor, absolute: Tensor, least: Any, share: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log √max(‖x‖², least), share · ‖x‖₁/‖x‖, and a and b of the gradient a x + b sign(x) of their sum.

    From ‖x‖² and ‖x‖₁; `least` and `share` are numbers, or tensors for a compiler.
    """
    scale = square.clamp_min(least).sqrt_().log_()
    inverse = square.rsqrt().masked_fill_(square <= torch.finfo(square.dtype).tiny, 0)
    on_sign = inverse * share
    direction = absolute * on_sign
    negated = torch.add(direction, square > least, alpha=-1)
    return scale, direction, negated.mul_(inverse).mul_(inverse).neg_(), on_sign


def _add_log_norm_(target: Tensor, x: Tensor, factor: Tensor, least: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    scale, direction, on_weight, on_sign = log_norm((x * x).sum(), x.abs().sum(), least, share)
    target.add_(factor * (on_weight * x + on_sign * x.sign()))
    return scale, direction


@cache
def compiled_log_norm(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Both terms of :func:`log_norm`, compiled; adds factor × the gradient to `target`.

    One graph for vectors of all lengths: one pass reads and one updates.
    """
    return torch.compile(_add_log_norm_, backend=backend, dynamic=True)


# --- self-orthogonality -------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """The settings of a self-orthogonality value."""

    gamma: float
    center: bool
    mean_ratio: float
    reduction: str
    groups: int
    process_group: ProcessGroup | None
    least: float  # root mean square of an output up to which it counts as constant: the smallest number of its dtype

    @property
    def processes(self) -> int:
        return 1 if self.process_group is None else self.process_group.size()


def total(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The differentiable sum over the processes of a group; for None over this process, `x` itself."""
    return x if group is None else sum_over_processes(x, group)


def first_sample(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The first sample of each channel of outputs (k, N, P), (k, 1, 1), the largest over processes.

    Less it, the sum of a channel loses no digits to a large mean, and a constant channel becomes exactly 0.
    """
    first = x[:, :1, :1]
    if group is not None:
        first = first.sum((1, 2), keepdim=True)  # the sum of no samples is 0
        torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MAX, group)
    return first


class SelfOrthogonalityTerms(torch.autograd.Function):
    r"""The value, its two terms and the soft signs t of outputs (N, k, P), with one product in the backward.

    Note [One product in the backward]
        With G = t tᵀ, d = diag(G)^(−1/2), C = d G d off the diagonal and A = ∂R/∂C, the derivative by t is M t with
        M = 2 d (A − diag(b)) d, b_j = Σ_i C_ij A_ij: a k × k matrix, formed in the forward. The signs are an output of
        this function, so that the second derivative is that of the plain form by t.

    Note [Wide layers]
        With fewer samples than filters and unit rows t̂: Σ_ij C_ij = |Σ_i t̂_i|² and Σ_ij C_ij² = |K|², K = t̂ᵀ t̂ of
        size samples × samples: a step of an MLP of width 2048 with batch 64 takes 1.4 instead of 3.1 plain steps.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, pairs: Pairs, plain: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pairs, ctx.plain, ctx.shape = pairs, plain, y.shape
        t, ctx.samples = _soft_signs(y.flatten(2), pairs)
        few = t.shape[-1] < t.shape[-2] and pairs.process_group is None
        mean, spread, ctx.share, saved = _wide(t, pairs) if few else _tall(t, pairs)
        ctx.mark_non_differentiable(mean, spread)
        ctx.save_for_backward(t, *saved)
        return mean + spread, mean, spread, t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        on_value, _, _, on_signs = grads
        t, *saved = ctx.saved_tensors
        pairs: Pairs = ctx.pairs
        if torch.is_grad_enabled() and on_value is not None:
            (back,) = torch.autograd.grad(ctx.plain(t, pairs)[0], t, on_value, create_graph=True)
            back = back * pairs.gamma
        elif on_value is not None:
            # data-parallel training averages gradients over processes, but this value needs their sum
            number = 4 * pairs.gamma * pairs.processes / (pairs.groups if pairs.reduction == "mean" else 1)
            factor = on_value * number if ctx.share is None else on_value * _per_group(ctx.share, t) * number
            if len(saved) > 1:
                back = _wide_gradient(t, *saved) * factor
            elif t.stride(-1) == 1:
                back = (saved[0] * factor) @ t
            else:  # laid out as t; M is symmetric
                back = (t.mT @ (saved[0] * factor)).mT
        else:
            back = torch.zeros_like(t)
        if on_signs is not None:
            back = back + on_signs * pairs.gamma
        back = torch.ops.aten.tanh_backward(back, t)
        if pairs.center:
            back.sub_(_mean(back, ctx.samples, pairs.process_group))
        images, channels, *positions = ctx.shape
        return back.reshape(channels, images, *positions).transpose(0, 1), None, None


def _soft_signs(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
    """tanh(γ (y − ȳ)) of outputs (N, k, P) as ([groups,] k/groups, N·P), and the samples of several processes."""
    images, channels, positions = x.shape
    by_channel = x.transpose(0, 1)
    if x.stride(1) == 1:  # channels last: kept so, because transposing takes longer than the tanh
        t = x.new_empty(images, positions, channels).permute(2, 0, 1)
    else:
        t = x.new_empty(channels, images, positions)
    groups = () if pairs.groups == 1 else (pairs.groups,)
    flat = t.view(*groups, channels // pairs.groups, images * positions)
    samples = None
    if pairs.process_group is not None:
        samples = total(x.new_full((), float(images * positions)), pairs.process_group)
    if pairs.center:
        torch.sub(by_channel, first_sample(by_channel, pairs.process_group), out=t)
        mean = _mean(flat, samples, pairs.process_group)
        torch.add(mean.mul_(-pairs.gamma), flat, alpha=pairs.gamma, out=flat)
    else:
        torch.mul(by_channel, pairs.gamma, out=t)
    return flat.tanh_(), samples


def _mean(x: Tensor, samples: Tensor | None, group: ProcessGroup | None) -> Tensor:
    """The mean over the samples of all processes."""
    if samples is None:
        return x.mean(-1, keepdim=True)
    return total(x.sum(-1, keepdim=True), group) / samples


def _tall(t: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor]]:
    """The terms, the weight of a pair, and the matrix M of Note [One product in the backward] without it, over 4 γ."""
    cosines = total(t @ t.mT, pairs.process_group)
    diagonal = cosines.diagonal(dim1=-2, dim2=-1)
    scale = _scale(diagonal, t.shape[-1], pairs)
    scales = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    cosines.mul_(scales)
    diagonal.zero_()
    once, twice = cosines.sum(-1), (cosines * cosines).sum(-1)
    mean, spread, on_mean, share = _reduced(once.sum(-1), twice.sum(-1), scale, pairs)
    cosines.add_(_per_group(on_mean, cosines))
    torch.addcmul(twice, _per_group(on_mean, once), once, out=diagonal).neg_()
    return mean, spread, share, (cosines.mul_(scales),)


def _wide(t: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:
    """The terms, the weight of a pair, K and Σ_i t̂_i of Note [Wide layers], this with its weight, and signs' scale."""
    scale = _scale((t * t).sum(-1), t.shape[-1], pairs)
    unit = t * scale.unsqueeze(-1)
    across, along = unit.mT @ unit, unit.sum(-2, keepdim=True)
    alive = scale.sign().sum(-1)
    first, second = along.square().sum((-2, -1)) - alive, across.square().sum((-2, -1)) - alive
    mean, spread, on_mean, share = _reduced(first, second.clamp_min(0), scale, pairs)
    return mean, spread, share, (across, along * _per_group(on_mean, along), scale)


def _wide_gradient(t: Tensor, across: Tensor, along: Tensor, scale: Tensor) -> Tensor:
    """The derivative by t, up to the same number as M t in the tall form."""
    scale = scale.unsqueeze(-1)
    unit = t * scale
    back = unit @ across + along
    return (back - (unit * back).sum(-1, keepdim=True) * unit) * scale


def _scale(square: Tensor, samples: int, pairs: Pairs) -> Tensor:
    """1/|t| for each channel, and 0 where all its signs are 0 within rounding."""
    noise = (pairs.gamma * pairs.least) ** 2 * samples * pairs.processes
    return torch.threshold(square, max(noise, torch.finfo(square.dtype).tiny), inf).rsqrt_()


def _reduced(
    first: Tensor, second: Tensor, scale: Tensor, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Both terms, the derivative of the mean term by ΣC, and the weight of a pair (None for 1), from ΣC and ΣC²."""
    share = None
    if pairs.reduction == "mean":
        alive = scale.sign().sum(-1)
        share = (alive * alive).sub_(alive).clamp_min_(1).reciprocal_()
        first, second = first * share, second * share
    on_mean = first * pairs.mean_ratio
    mean, spread = on_mean * first, second
    if pairs.groups > 1:
        mean, spread = (x.sum() if share is None else x.mean() for x in (mean, spread))
    return mean, spread, on_mean, share


def _per_group(x: Tensor, like: Tensor) -> Tensor:
    """A number for each group, to be broadcast with a tensor that has one vector or matrix for each."""
    return x.view(-1, *(1,) * (like.dim() - 1)) if x.dim() else x
