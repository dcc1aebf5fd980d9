"""What a spectral norm is the norm of: the matrix of filters, or the map on feature maps.

Both views keep unit singular vectors and improve them by power iteration. `u` and `v` are stacks of real
vectors, (groups, parts, rows) and (groups, parts, columns), against the stored matrices of a weight, such
that the norm of a group is the sum over parts of uᵀ W v: one part for a real matrix, the real and the
imaginary part at one frequency for a convolution. There a vector of one number per input channel is spread
over the taps and would have a length above 1; `v` is of length 1, and `length` remembers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Self

import torch
from torch import Tensor

from gonio.geometry.lanczos import spectral_norm
from gonio.geometry.matrix_vector import matrix_vector
from gonio.geometry.norms import normalize, safe_norm
from gonio.geometry.views import Layout
from gonio.parametrizations.filters import from_matrices, matrices_of
from gonio.seeding import generator

__all__ = ["EXACT", "ITERATIONS", "FilterView", "SpectralView", "random_vectors", "unit_or"]

EXACT = 2**28  # multiplications up to which the first vectors come from a singular value decomposition
_PLAIN = (1e-24, 1e24)  # squares of norms that float32 holds
ITERATIONS = 60  # of power iteration for the first vectors of larger convolutions


@dataclass(frozen=True)
class SpectralView(ABC):
    """How weights of one shape and layout become operators, and how top singular vectors are found."""

    layout: Layout
    shape: torch.Size
    margin: float  # the factor by which the operator's norm may exceed what converged vectors show

    @classmethod
    @abstractmethod
    def of(cls, layout: Layout, shape: torch.Size) -> Self:
        """The view of weights of this shape."""

    @abstractmethod
    def measured(self, weight: Tensor) -> float:
        """The norm itself, found anew: tight from below, and for any weight of the shape."""

    @abstractmethod
    def matrices(self, weight: Tensor) -> Tensor:
        """The stored matrices, (groups, rows, columns); those of several weights can be concatenated."""

    @abstractmethod
    def weight_of(self, matrices: Tensor) -> Tensor:
        """The inverse of :meth:`matrices`."""

    @abstractmethod
    def start(self, matrices: Tensor) -> dict[str, Tensor]:
        """The first state: top singular vectors, exact for small weights."""

    @abstractmethod
    def step(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after one more power iteration."""

    def step_alone_(self, matrices: Tensor, state: dict[str, Tensor], iterations: int) -> bool:
        """:meth:`step` in place for the matrices of a single weight, where there is a quicker way; else False."""
        return False


class FilterView(SpectralView):
    """The matrices with one filter per row; the norm is the largest singular value of any of them."""

    @classmethod
    def of(cls, layout: Layout, shape: torch.Size) -> Self:
        return cls(layout, shape, 1.0)

    def measured(self, weight: Tensor) -> float:
        return float(spectral_norm(self.matrices(weight)).amax())

    def matrices(self, weight: Tensor) -> Tensor:
        return matrices_of(weight, self.layout)

    def weight_of(self, matrices: Tensor) -> Tensor:
        return from_matrices(matrices, self.shape, self.layout)

    def start(self, matrices: Tensor) -> dict[str, Tensor]:
        groups, rows, columns = matrices.shape
        u, v = matrices.new_empty(groups, 1, rows), matrices.new_empty(groups, 1, columns)
        if matrices.is_meta:
            return {"u": u, "v": v}
        if matrices.numel() * min(rows, columns) <= EXACT:
            left, _, right = torch.linalg.svd(matrices, full_matrices=False)
            return {"u": left[..., 0].unsqueeze(1).contiguous(), "v": right[:, :1].contiguous()}
        return _top_pair(matrices)

    def step(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        v = unit_or(state["u"] @ matrices, state["v"], (1, 2))
        return {"u": unit_or(v @ matrices.mT, state["u"], (1, 2)), "v": v}

    def step_alone_(self, matrices: Tensor, state: dict[str, Tensor], iterations: int) -> bool:
        u, v = state["u"], state["v"]
        if not matrices.is_cpu or len(matrices) > 1 or not u.dtype is v.dtype is matrices.dtype:
            return False
        matrix, left, right = matrices[0], u.view(-1), v.view(-1)
        for _ in range(iterations):
            _turn_(right, matrix_vector(matrix.T, left))
            _turn_(left, matrix_vector(matrix, right))
        return True


def _turn_(unit: Tensor, image: Tensor) -> None:
    """The direction of `image` written to `unit`, which stays where the image is zero."""
    square = torch.dot(image, image).item()  # to read a number is free on CPU
    if _PLAIN[0] < square < _PLAIN[1]:
        torch.div(image, sqrt(square), out=unit)
    else:
        unit.copy_(unit_or(image, unit, (0,)))


def _top_pair(matrices: Tensor) -> dict[str, Tensor]:
    """Top singular vectors of large matrices: the gradient of a norm is the product of the two."""
    with torch.enable_grad():
        matrices = matrices.detach().requires_grad_()
        (product,) = torch.autograd.grad(spectral_norm(matrices).sum(), matrices)  # u vᵀ
    largest = safe_norm(product, -1).argmax(-1)
    v = normalize(product[torch.arange(len(product), device=largest.device), largest], -1)
    return {"u": normalize((product @ v.unsqueeze(-1)).mT, -1), "v": v.unsqueeze(1)}


def unit_or(vectors: Tensor, fallback: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Unit vectors; where a vector is zero, the one that was there: iteration from 0 would stay at 0."""
    if vectors.is_cpu and len(vectors) == 1 and dims == (1, 2):  # one number, and to read it is free here
        size = torch.linalg.vector_norm(vectors).item()
        if _PLAIN[0] < size * size < _PLAIN[1]:
            return vectors / size
    norm = safe_norm(vectors, dims, keepdim=True)
    return torch.where(norm > 0, vectors / norm.masked_fill(norm == 0, 1), fallback)


def random_vectors(shape: Sequence[int], like: Tensor) -> Tensor:
    """Unit vectors along the last dimension that depend on the shape alone."""
    # CPU numbers on every device, so that a model starts equal wherever it lives.
    drawn = torch.randn(*shape, generator=generator(0, "spectral norm", *shape), dtype=torch.float64)
    return (drawn / safe_norm(drawn, -1, keepdim=True)).to(like)
