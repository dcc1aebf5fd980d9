"""The arcsine with a bounded derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["bounded_asin"]

# 1 − cos² is floored here in the derivative. A cosine computed from products carries a rounding error of a few
# eps, so below this value 1 − cos² is noise; the derivative is then at most 1e3 in float32.
_FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class _BoundedAsin(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(cosine: Tensor) -> Tensor:
        return cosine.clamp(-1, 1).asin_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * _derivative(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * _derivative(*ctx.saved_tensors)


def _derivative(cosine: Tensor) -> Tensor:
    return (1 - cosine * cosine).clamp_min(_FLOOR[cosine.dtype]).rsqrt()


def bounded_asin(cosine: Tensor) -> Tensor:
    r"""The arcsine of a cosine, safe at and slightly beyond ±1.

    The value is :math:`\arcsin(\operatorname{clamp}(c, -1, 1))`, exact. The derivative is
    :math:`1/\sqrt{\max(1 - c^2, \delta)}`, hence finite at ±1, where torch's own is infinite, and
    not cut to zero there, where a clamp would. :math:`\delta` is the rounding error of a cosine in
    the tensor's dtype.

    Example:
        >>> c = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> bounded_asin(c).sum().backward()
        >>> c.grad.isfinite().all().item()
        True
    """
    result: Tensor = _BoundedAsin.apply(cosine)
    return result
