"""tanh and arcsin for the code generator, and tanh for large tensors in eager mode.

Torch's kernels cost about 26 (tanh) and 70 (arcsin) multiplications per entry on CPU, compiled or not. In a
fused kernel, which reads and writes each entry once whatever it computes, short rational and polynomial forms
cost next to nothing. In eager mode each of their terms would be a pass over memory; only tanh by torch's expm1
is worth its passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["arcsin", "generating_code", "tanh", "transformed", "with_derivative"]

# Minimax fits in z² by iterated weighted least squares, evaluated in float32:
# tanh(z)/z = P(z²)/Q(z²) for |z| ≤ 9.02, beyond which float32 knows no difference to 1; error ≤ 3e-7.
_P = (0.9999999790351813, 0.13379709621170446, 0.0034940244802017617, 2.0583308363885356e-05, 1.3318822049175913e-08)
_Q = (1.0, 0.46713024867460273, 0.025871035363529502, 0.0003283076035361214, 7.761919180015601e-07)
_SATURATED = 9.02
_LARGE = 2**14  # entries from which tanh by expm1 is quicker in eager mode
# arcsin(c)/c = 1 + c² R(c²) for |c| ≤ 1/2; error ≤ 3e-7
_R = (0.16666753928463113, 0.07495241747689473, 0.045477101922059726, 0.024147584750161922, 0.04221859622205992)


def generating_code(dtype: torch.dtype) -> bool:
    """Whether what runs is being compiled, not exported, in the dtype that the short forms are for."""
    compiling = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    return dtype is torch.float32 and compiling


def transformed() -> bool:
    """Whether what runs is being differentiated or mapped by torch.func."""
    # private: no public function tells; the stack of interpreters beneath it is never empty to a compiler
    return bool(torch._C._are_functorch_transforms_active())


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, to 3e-7 relative in float32 and to torch's accuracy in other precisions."""
    if not generating_code(x.dtype):
        return _by_expm1(x) if _quicker_by_expm1(x) else torch.tanh(x)
    z = x.clamp(-_SATURATED, _SATURATED)
    square = z * z
    value = (z * _horner(_P, square) / _horner(_Q, square)).clamp(-1, 1)
    return value if transformed() else with_derivative(value, z, 1 - value * value)


def _quicker_by_expm1(x: Tensor) -> bool:
    large = type(x) is Tensor and x.is_cpu and x.dtype is torch.float32 and x.numel() >= _LARGE
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()
    return large and not traced and forward_ad._current_level < 0


def _by_expm1(x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = _TanhByExpm1.apply(x)
        return result
    e = x.clamp(-_SATURATED, _SATURATED).mul_(2).expm1_()  # exact for small x too
    return e.div_(e + 2)


class _TanhByExpm1(torch.autograd.Function):
    """tanh x = e/(e + 2) with e = exp(2x) − 1; the graph keeps the result alone, as for torch's tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = _by_expm1(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        found: Tensor = torch.ops.aten.tanh_backward(grad, result)
        return found


def with_derivative(value: Tensor, x: Tensor, derivative: Tensor) -> Tensor:
    """The value, to be differentiated once by `x`, finite, with a derivative that is given.

    What autograd finds for a quotient of polynomials is several times the work, and a compiler takes no
    `autograd.Function` without a warning of torch's about itself.
    """
    return value.detach() + (x - x.detach()) * derivative.detach()


def arcsin(x: Tensor) -> Tensor:
    """The arcsine of numbers within ±1, to 3e-7 relative in compiled float32 and to torch's accuracy elsewhere."""
    if not generating_code(x.dtype):
        return torch.asin(x)
    # arcsin c = π/2 − 2 arcsin √((1 − c)/2) brings the argument to at most 1/2
    near_one = x.abs() > 0.5
    square = torch.where(near_one, 0.5 - 0.5 * x.abs(), x * x)
    ratio = 1 + square * _horner(_R, square)
    root = torch.where(near_one, square, 1).sqrt()  # no root, and no infinite slope, where there is none to take
    return torch.where(near_one, (math.pi / 2 - 2 * root * ratio).copysign(x), x * ratio)


def _horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    *rest, highest = coefficients
    total = x * highest + rest.pop()
    while rest:
        total = total * x + rest.pop()
    return total
