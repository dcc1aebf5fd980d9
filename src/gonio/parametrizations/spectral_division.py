"""A weight divided by the norm that given singular vectors show, and its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    if is_eager(raw, u, v):
        weight: Tensor = _Divided.apply(raw, u, v, length, view, norm)[0]
        return weight
    return _plainly_divided(raw, u, v, length, view, norm)


def _plainly_divided(
    raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float
) -> Tensor:
    return raw * _factor(gains(view.matrices(raw), u, v, length)[0].amax(), norm)


def _factor(gain: Tensor, norm: float) -> Tensor:
    zero = _is_zero(gain)
    return torch.where(zero, 1.0, norm / gain.masked_fill(zero, 1))


def _is_zero(gain: Tensor) -> Tensor:
    return gain < torch.finfo(gain.dtype).tiny ** 0.5


class _Divided(torch.autograd.Function):
    r"""With :math:`c = n/\sigma`: value :math:`cW`, gradient :math:`c(G - \langle G,W\rangle\, uv^\top/\sigma)`.

    The weight is read twice forward, for Wv and for the product, and no temporary of its size is made.
    """

    @staticmethod
    def forward(
        raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gain, left, right = gains(view.matrices(raw), u, v, length)
        return raw * _factor(gain.amax(), norm), gain, left, right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        raw, _, _, _, ctx.view, ctx.norm = inputs
        ctx.mark_non_differentiable(*output[1:])
        # Not the buffers: a tick, or DDP's broadcast of buffers, may come between forward and backward.
        ctx.save_for_backward(raw, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        raw, gain, left, right = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            shown = (left * (right @ ctx.view.matrices(raw).mT)).sum((1, 2))
            again = raw * _factor(shown.amax(), ctx.norm)
            return torch.autograd.grad(again, raw, grad, create_graph=True)[0], *[None] * 5
        top, factor = gain.amax(), _factor(gain.amax(), ctx.norm)
        inner = (grad * raw).sum() if grad.stride() != raw.stride() else grad.flatten().dot(raw.flatten())
        share = -(inner / top).masked_fill(_is_zero(top), 0)
        if len(gain) > 1:  # only the group with the largest gain feels the norm
            left = left * torch.nn.functional.one_hot(gain.argmax(), len(gain))[:, None, None]
        of_raw = _with_product(ctx.view.matrices(grad), left, right, factor, factor * share)
        return ctx.view.weight_of(of_raw), *[None] * 5


def _with_product(matrices: Tensor, left: Tensor, right: Tensor, scale: Tensor, share: Tensor) -> Tensor:
    """scale · matrices + share · leftᵀ right."""
    if left.shape[:2] == (1, 1) and matrices.device.type == "cpu":  # one pass; reading a number is free there
        one = torch.addr(matrices[0], left[0, 0], right[0, 0], beta=scale.item(), alpha=share.item())
        return one.unsqueeze(0)
    return (matrices * scale).baddbmm_(left.mT * share, right)
