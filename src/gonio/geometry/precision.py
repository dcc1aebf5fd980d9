"""How geometry computes: float32 at least, outside autocast, and only on stacks of matrices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError

__all__ = ["check_finite", "check_matrix", "full_precision", "whole", "widen", "widest"]


def widen(x: Tensor) -> Tensor:
    """`x` in float32 if it was narrower (float16, bfloat16, float8), else `x` itself.

    Squares of float16 numbers above 256 overflow and bfloat16 cosines carry an error of 4e-3, so no
    sum of squares is ever taken in half precision.

    Raises:
        InvalidArgumentError: if `x` is not a real floating-point tensor.
    """
    if not x.is_floating_point():
        raise InvalidArgumentError(
            "geometry works on real floating-point tensors",
            f"dtype {x.dtype}",
            "Convert it first, for example with .float(); a quantised weight must be dequantised.",
        )
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def whole(x: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank, differentiably; any other tensor as it is.

    For functions that mix the weight with tensors of their own, which DTensor does not allow.
    """
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def widest(x: Tensor) -> torch.dtype:
    """float64 where the device has it, else float32 (Apple's MPS)."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not turn the matrix products of `x` into half precision."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def check_finite(matrix: Tensor, function: str) -> None:
    """Raise where a decomposition would fail or return noise."""
    if bool(torch.isfinite(matrix.detach().sum())):  # what is not finite makes the sum so: one pass, no memory
        return
    bad = int((~torch.isfinite(matrix)).sum())
    if bad:
        raise InvalidArgumentError(
            f"{function}() needs finite entries",
            f"{bad} of {matrix.numel()} NaN or infinite",
            "Find out which step produced them; a spectrum cannot be had from such a weight.",
        )


def check_matrix(matrix: Tensor, function: str) -> None:
    """Raise unless `matrix` is one matrix (n, d) or a stack of matrices (groups, n, d)."""
    if matrix.ndim not in (2, 3):
        raise InvalidArgumentError(
            f"{function}() takes a matrix (n, d), one filter per row, or a stack (groups, n, d)",
            f"shape {tuple(matrix.shape)}",
            "Turn a layer's weight into matrices with gonio.geometry.matrix_view(weight, layout).",
        )
