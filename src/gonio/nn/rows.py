r"""Kernels of torch's norms as what they are made of: sums over *rows*, and the scaling of them.

A row is one channel of one sample, over all positions. For contiguous tensors on CPU the kernels of group
normalisation and of batch normalisation in evaluation, told that each row is a group or a channel, do in one
pass without temporaries what products, reductions and broadcasts do in several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["Rows", "has_rows"]

LONG = 4096  # entries that are summed one after the other by each lane of a vector register: 2e-7 of their sum is lost


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
