"""The arcsine with a bounded derivative."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gonio.nn.elementary import arcsin, transformed, with_derivative

__all__ = ["bounded_asin"]

# 1 − cos² is floored here in the derivative. A cosine computed from products carries a rounding error of a few
# eps, so below this value 1 − cos² is noise; the derivative is then at most 1e3 in float32.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def bounded_asin(cosine: Tensor) -> Tensor:
    r"""The arcsine of a cosine, safe at and slightly beyond ±1.

    The value is :math:`\arcsin(\operatorname{clamp}(c, -1, 1))`, exact. The derivative is
    :math:`1/\sqrt{\max(1 - c^2, \delta)}`, hence finite at ±1, where torch's own is infinite, and
    not cut to zero there, where a clamp would cut it. :math:`\delta` is the rounding error of a cosine
    in the tensor's dtype.

    Example:
        >>> from gonio.nn.arcsine import bounded_asin
        >>> c = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> bounded_asin(c).sum().backward()
        >>> c.grad.isfinite().all().item()
        True
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if torch.jit.is_tracing() or torch.compiler.is_exporting() or (compiling and transformed()):
        return _extended(cosine)
    if compiling:
        return with_derivative(arcsin(cosine.clamp(-1, 1)), cosine.clamp(-2, 2), _derivative(cosine))
    result: Tensor = _BoundedAsin.apply(cosine)
    return result


def _extended(cosine: Tensor) -> Tensor:
    """In plain operations, for programs that are exported, and compiled function transforms."""
    floor = FLOOR[cosine.dtype]
    edge = math.sqrt(1 - floor)
    beyond = (cosine - edge).clamp_min(0) + (cosine + edge).clamp_max(0)
    # straight lines beyond the edge for the derivative, then the exact value
    extended = arcsin(cosine.clamp(-edge, edge)) + beyond / math.sqrt(floor)
    return extended + (arcsin(cosine.clamp(-1, 1)) - extended).detach()


class _BoundedAsin(torch.autograd.Function):
    """One evaluation of the arcsine, which is slow on CPU, where plain operations need two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(cosine: Tensor) -> Tensor:
        return arcsin(cosine.clamp(-1, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return grad * _derivative(cosine)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return tangent * _derivative(cosine)


def _derivative(cosine: Tensor) -> Tensor:
    return (1 - cosine * cosine).clamp_min(FLOOR[cosine.dtype]).rsqrt()
