"""Tolerances by dtype, each with its reason; no test names a tolerance of its own for rounding.

`close(dtype)` is for results that go through a handful of reductions over at most a few thousand
terms; `exact(dtype)` for results that are equal in exact arithmetic and pass through O(1) operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TOLERANCES", "Tolerance", "close", "exact"]


@dataclass(frozen=True)
class Tolerance:
    """Arguments for `torch.testing.assert_close`."""

    rtol: float
    atol: float
    reason: str

    def as_dict(self) -> dict[str, float]:
        return {"rtol": self.rtol, "atol": self.atol}


TOLERANCES: dict[str, dict[torch.dtype, Tolerance]] = {
    "exact": {
        torch.float64: Tolerance(1e-12, 1e-12, "DESIGN §6: fold and equalities in fp64; about 4500 ulp"),
        torch.float32: Tolerance(1e-5, 1e-6, "DESIGN §6: fold in fp32; about 80 ulp"),
        torch.bfloat16: Tolerance(1.6e-2, 1e-3, "two ulp: bfloat16 keeps 8 bits, ulp 2^-7"),
        torch.float16: Tolerance(2e-3, 1e-4, "two ulp: float16 keeps 11 bits, ulp 2^-10"),
    },
    "close": {
        torch.float64: Tolerance(1e-9, 1e-10, "sums over thousands of terms and one square root"),
        torch.float32: Tolerance(2e-4, 2e-5, "sums over thousands of terms: sqrt(n)·ulp with margin 30"),
        torch.bfloat16: Tolerance(5e-2, 2e-2, "inputs rounded to 8 bits: the reference sees other inputs"),
        torch.float16: Tolerance(1e-2, 2e-3, "inputs rounded to 11 bits: the reference sees other inputs"),
    },
}


def close(dtype: torch.dtype) -> dict[str, float]:
    """`rtol` and `atol` for results of long reductions."""
    return TOLERANCES["close"][dtype].as_dict()


def exact(dtype: torch.dtype) -> dict[str, float]:
    """`rtol` and `atol` for identities that hold in exact arithmetic."""
    return TOLERANCES["exact"][dtype].as_dict()
