"""The vectors of a weight whose norms are held: whole matrices, filters (rows) or columns, in the layer's own layout.

Norms but the spectral one are reductions over stored dimensions, without a matrix view, and factors broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gonio.execution import is_sharded, replicated_like
from gonio.geometry import Layout, matrix_view
from gonio.geometry.lanczos import spectral_norm
from gonio.geometry.norms import computed_in, whole

Norm = Literal["matrix", "spectral", "filters", "columns"]
NORMS = get_args(Norm)


@dataclass(frozen=True)
class Vectors:
    """How the entries of a weight of this layout and number of dimensions form vectors.

    Norms and factors have one number per vector, in a shape that broadcasts against the weight with its first
    dimension split into matrices: (matrices, …). They are in float32 at least, and whole also for a sharded weight.
    """

    layout: Layout
    ndim: int
    norm: Norm

    @property
    def reduced(self) -> tuple[int, ...]:
        """The dimensions over which a vector extends, of the weight as (matrices, dim 0, dim 1, *kernel)."""
        kernel = tuple(range(3, self.ndim + 1))
        if self.norm in ("matrix", "spectral"):
            return (1, 2, *kernel)
        filters_first = not self.layout.transposed
        if self.norm == "filters":
            return (2, *kernel) if filters_first else (1, *kernel)
        return (1,) if filters_first else (2,)

    def length(self, weight: Tensor) -> int:
        """The number of entries of a vector."""
        sizes = (self.layout.matrices, weight.shape[0] // self.layout.matrices, *weight.shape[1:])
        return prod(sizes[dim] for dim in self.reduced)

    def splits_shards(self) -> bool:
        """Whether a weight sharded over dim 0 has vectors that are parts of dim 0: each shard cuts them elsewhere."""
        return self.layout.matrices > 1 and 1 in self.reduced and self.norm not in ("matrix", "spectral")

    def norms(self, weight: Tensor) -> Tensor:
        """The norm of each vector."""
        dtype = computed_in(weight.dtype)
        if self.norm == "matrix":
            total = self.rows(weight).double().unflatten(0, (self.layout.matrices, -1)).norm(dim=1).to(dtype)
            return total.view(-1, *[1] * self.ndim)
        if self.norm == "spectral":
            return self._spectral_norms(whole(weight).to(dtype)).view(-1, *[1] * self.ndim)
        if self.layout.matrices > 1 and 1 in self.reduced:
            split = weight.unflatten(0, (self.layout.matrices, -1))
            return torch.linalg.vector_norm(split, dim=self.reduced, keepdim=True, dtype=dtype)
        dims = tuple(dim - 1 for dim in self.reduced)
        rows = whole(torch.linalg.vector_norm(weight, dim=dims, keepdim=True, dtype=dtype))
        return rows.unflatten(0, (self.layout.matrices, -1))

    def _spectral_norms(self, weight: Tensor) -> Tensor:
        """Of each matrix; NaN for all if an entry is not finite."""
        if not bool(weight.isfinite().all()):
            return weight.new_full((self.layout.matrices,), torch.nan)
        return spectral_norm(matrix_view(weight, self.layout))

    def rows(self, weight: Tensor) -> Tensor:
        """The norms of all slices along dim 0: one long sum in float32 is off by 1e-4 of a million entries."""
        dims = tuple(range(1, self.ndim))
        return whole(torch.linalg.vector_norm(weight, dim=dims, dtype=computed_in(weight.dtype)))

    def scaled(self, weight: Tensor, factors: Tensor) -> Tensor:
        """The weight with each vector times its factor, in the factors' dtype."""
        return weight * self._fitted(weight, factors)

    def scale_(self, weight: Tensor, factors: Tensor) -> None:
        """Multiply each vector of a weight by its factor, computed in the factors' dtype."""
        factors = self._fitted(weight, factors)
        if weight.dtype == factors.dtype and not is_sharded(weight):
            weight.mul_(factors)
        else:  # one rounding of the product
            write_(weight, weight.to(factors.dtype) * factors)

    def _fitted(self, weight: Tensor, factors: Tensor) -> Tensor:
        """Factors in a shape that broadcasts against the weight as it is stored, replicated for a sharded one."""
        rows = weight.shape[0] // self.layout.matrices
        along = 1 if self.layout.matrices == 1 else rows  # without a copy per row for a single matrix
        fitted = factors.expand(-1, max(along, factors.shape[1]), *factors.shape[2:]).flatten(0, 1)
        return replicated_like(fitted, weight)


# Note [Many weights at once]
# A weight has few norms, but each operation on them costs a call and, on an accelerator, a kernel: nine for one
# projection, of which one reads the weight, one writes it, and one adds the norms of its rows. The other six are made
# for all weights together, on their norms in one tensor. What reads and writes weights stays apart, weight by weight:
# in float32 torch's own batched norm is off by 6e-4 of 16 million entries, and its batched product by factors that
# broadcast is a loop.


def norms_of(vectors: Sequence[Vectors], weights: Iterable[Tensor]) -> list[Tensor]:
    """The norms of many weights, as :meth:`Vectors.norms` up to one rounding of a sum.

    They are on one device, and their norms have one dtype. Each is read once, so an iterator need not hold all of them.
    """
    found = [v.rows(w) if v.norm == "matrix" else v.norms(w) for v, w in zip(vectors, weights, strict=True)]
    summed = [index for index, each in enumerate(vectors) if each.norm == "matrix"]
    if summed:
        counts = [vectors[index].layout.matrices for index in summed]
        sizes = [len(found[index]) // count for index, count in zip(summed, counts, strict=True) for _ in range(count)]
        parts = torch.cat([found[index] for index in summed]).double().split(sizes)
        totals = torch.stack([part.norm() for part in parts]).to(found[summed[0]].dtype).split(counts)
        for index, total in zip(summed, totals, strict=True):
            found[index] = total.view(-1, *[1] * vectors[index].ndim)
    return found


def factors_of(radii: Sequence[Tensor], norms: Sequence[Tensor], rate: float = 1.0) -> list[Tensor]:
    """Factors rate · radius/norm of many weights; 0 for a vector of norm 0, which has no direction."""
    joined, wanted = (torch.cat([each.flatten() for each in every]) for every in (norms, radii))
    wanted = wanted if rate == 1 else rate * wanted
    factors = torch.where(joined > 0, wanted / joined, 0).split([each.numel() for each in norms])
    return [factor.view_as(norm) for factor, norm in zip(factors, norms, strict=True)]


def write_(weight: Any, values: Any) -> None:
    """Copy values into a weight; into its shards, because torch refuses that for fewer rows than processes."""
    if is_sharded(weight):
        weight, values = weight.to_local(), values.redistribute(placements=weight.placements).to_local()
    weight.copy_(values)
