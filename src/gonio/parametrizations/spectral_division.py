"""A weight divided by the norm that given singular vectors show, and its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gonio.geometry.matrix_vector import matrix_vector
from gonio.geometry.norms import normalize, safe_norm
from gonio.parametrizations.eager import is_eager
from gonio.parametrizations.spectral_views import SpectralView

__all__ = ["divided", "gains"]

# Note [Stale vectors]
# The norm shown by u and v is uᵀWv, as torch's spectral norm has it: after a power iteration it equals
# ‖Wv‖. Vectors that belong to another weight may show a number near 0 or below it, by which nothing should
# be divided. Where u is more than 60° away from Wv, the norm shown is ‖Wv‖, which is positive and a lower
# bound as well.
_STALE = 0.5


def gains(matrices: Tensor, u: Tensor, v: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The norm shown for each group, and the left and right vectors whose product is its gradient.

    The vectors are constants, and need not be of unit length (averaged or half-precision buffers are not).
    """
    right = normalize(v.detach().to(matrices.dtype), (1, 2))
    if length is not None:
        right = right * length.detach().to(matrices.dtype)[:, None, None]
    left = normalize(u.detach().to(matrices.dtype), (1, 2))
    image = right @ matrices.mT  # (groups, parts, rows)
    stale = (left * image).sum((1, 2)) < _STALE * safe_norm(image, (1, 2))
    left = torch.where(stale[:, None, None], normalize(image, (1, 2)), left).detach()
    return (left * image).sum((1, 2)), left, right


def divided(raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float) -> Tensor:
    """`raw` times `norm` over the largest of the groups' gains; a zero weight as it is."""
    if not is_eager(raw, u, v):
        return _plainly_divided(raw, u, v, length, view, norm)
    alone = raw.is_cpu and len(u) == 1 and u.dtype is v.dtype is raw.dtype
    weight: Tensor = (_DividedAlone if alone else _Divided).apply(raw, u, v, length, view, norm)
    return weight


def _plainly_divided(
    raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float
) -> Tensor:
    return raw * _factor(gains(view.matrices(raw), u, v, length)[0].amax(0), norm)


def _factor(gain: Tensor, norm: float) -> Tensor:
    zero = _is_zero(gain)
    return torch.where(zero, 1.0, norm / gain.masked_fill(zero, 1))


def _is_zero(gain: Tensor) -> Tensor:
    return gain < torch.finfo(gain.dtype).tiny ** 0.5


class _Divided(torch.autograd.Function):
    r"""With :math:`c = n/\sigma`: value :math:`cW`, gradient :math:`c(G - \langle G,W\rangle\, uv^\top/\sigma)`."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float
    ) -> Tensor:
        ctx.view, ctx.norm = view, norm
        gain, left, right = gains(view.matrices(raw), u, v, length)
        # Not the buffers: a tick, or DDP's broadcast of buffers, may come between forward and backward.
        ctx.save_for_backward(raw, gain, left, right)
        return raw * _factor(gain.amax(0), norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raw, gain, left, right = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(raw, left, right, ctx.view, ctx.norm, grad), *[None] * 5
        top, factor = gain.amax(0), _factor(gain.amax(0), ctx.norm)
        share = -((grad * raw).sum() / top).masked_fill(_is_zero(top), 0)
        if len(gain) > 1:  # only the group with the largest gain feels the norm
            left = left * torch.nn.functional.one_hot(gain.argmax(), len(gain))[:, None, None]
        of_raw = (ctx.view.matrices(grad) * factor).baddbmm_(left.mT * (factor * share), right)
        return ctx.view.weight_of(of_raw), *[None] * 5


class _DividedAlone(torch.autograd.Function):
    """The same for one group on CPU, where reading a number is free and passes over the weight are not.

    Forward reads the weight twice and writes once; backward reads weight and gradient, and writes once.
    """

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float
    ) -> Tensor:
        left, right = u[0], v[0]
        image = _image(view.matrices(raw)[0], right)
        scale = (1.0 if length is None else length.item()) / (_norm(right) or 1.0)
        reached, size = _norm(image) * scale, _norm(left)
        gain = torch.dot(left.reshape(-1), image.reshape(-1)).item() * scale / size if size else 0.0
        if gain < _STALE * reached:
            gain, left, size = reached, image, reached / scale
        ctx.gain = gain if gain >= torch.finfo(raw.dtype).tiny ** 0.5 else 0.0
        ctx.factor = norm / gain if ctx.gain else 1.0
        ctx.view, ctx.norm, ctx.per_left, ctx.per_right = view, norm, 1 / (size or 1.0), scale
        ctx.save_for_backward(raw, left.clone(), right.clone())
        return raw * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raw, left, right = ctx.saved_tensors
        if torch.is_grad_enabled():
            unit = (left * ctx.per_left).unsqueeze(0), (right * ctx.per_right).unsqueeze(0)
            return _again(raw, *unit, ctx.view, ctx.norm, grad), *[None] * 5
        if not ctx.gain:
            return grad, *[None] * 5
        matrix = ctx.view.matrices(grad)[0]
        inner = torch.dot(matrix.reshape(-1), ctx.view.matrices(raw).reshape(-1)).item()
        share = -inner / ctx.gain * ctx.factor * ctx.per_left * ctx.per_right
        if len(left) == 1:
            of_raw = torch.addr(matrix, left[0], right[0], beta=ctx.factor, alpha=share)
        else:
            of_raw = torch.addmm(matrix, left.mT, right, beta=ctx.factor, alpha=share)
        return ctx.view.weight_of(of_raw.unsqueeze(0)), *[None] * 5


def _image(matrix: Tensor, right: Tensor) -> Tensor:
    """The vectors W v of each part, as rows."""
    return matrix_vector(matrix, right[0]).unsqueeze(0) if len(right) == 1 else right @ matrix.mT


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x).item())


def _again(raw: Tensor, left: Tensor, right: Tensor, view: SpectralView, norm: float, grad: Tensor) -> Tensor:
    """The gradient in operations that can be differentiated again."""
    shown = (left * (right @ view.matrices(raw).mT)).sum((1, 2))
    return torch.autograd.grad(raw * _factor(shown.amax(0), norm), raw, grad, create_graph=True)[0]
