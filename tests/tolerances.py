"""Tolerances by dtype, each with its reason; no test names a tolerance of its own for rounding.

`close(dtype)` is for results that go through a handful of reductions over at most a few thousand
terms; `exact(dtype)` for results that are equal in exact arithmetic and pass through O(1) operations.
"""

from __future__ import annotations

import torch

# dtype: (relative, absolute)
_EXACT = {
    torch.float64: (1e-12, 1e-12),  # DESIGN §6: fold and equalities in fp64; about 4500 ulp
    torch.float32: (1e-5, 1e-6),  # DESIGN §6: fold in fp32; about 80 ulp
    torch.bfloat16: (1.6e-2, 1e-3),  # two ulp: bfloat16 keeps 8 bits, ulp 2^-7
    torch.float16: (2e-3, 1e-4),  # two ulp: float16 keeps 11 bits, ulp 2^-10
}
_CLOSE = {
    torch.float64: (1e-9, 1e-10),  # sums over thousands of terms and one square root
    torch.float32: (2e-4, 2e-5),  # sums over thousands of terms: sqrt(n)·ulp with margin 30
    torch.bfloat16: (5e-2, 2e-2),  # inputs rounded to 8 bits: the reference sees other inputs
    torch.float16: (1e-2, 2e-3),  # inputs rounded to 11 bits: the reference sees other inputs
}


def close(dtype: torch.dtype) -> dict[str, float]:
    """`rtol` and `atol` for results of long reductions."""
    return dict(zip(("rtol", "atol"), _CLOSE[dtype], strict=True))


def exact(dtype: torch.dtype) -> dict[str, float]:
    """`rtol` and `atol` for identities that hold in exact arithmetic."""
    return dict(zip(("rtol", "atol"), _EXACT[dtype], strict=True))
