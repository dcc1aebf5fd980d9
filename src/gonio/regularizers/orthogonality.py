"""Soft orthogonality: the Gram matrix of the filters against the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gonio.geometry.norms import normalize
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import ClosedFormRegularizer, require
from gonio.regularizers.closed_form import Closed, Formula
from gonio.regularizers.gram import add_product_, product, small_side, symmetric_product
from gonio.regularizers.sharding import identity_like

__all__ = ["Filters", "FromIdentity", "OffDiagonal", "Orthogonality", "check_filters", "welch_floor"]

Filters = Literal["raw", "unit"]


@dataclass(frozen=True, kw_only=True)
class Orthogonality(ClosedFormRegularizer):
    r"""Squared Frobenius distance of the filters' Gram matrix from orthogonality.

    With one filter per row of :math:`W` (per group),

    .. math::
        \lVert W W^\top - I \rVert_F^2 \quad\text{or, off the diagonal only,}\quad
        \sum_{i \ne j} \langle w_i, w_j \rangle^2 .

    The first also draws the norms to 1 and is taken on the smaller side of :math:`W`, where it can reach 0:
    :math:`\lVert W^\top W - I \rVert^2` differs by the constant number of surplus rows and has the same
    gradient :math:`4 (W W^\top - I) W`. The second leaves the norms alone only while filters are orthogonal:
    shrinking them lowers it too. With unit filters it is :math:`\sum_{i \ne j} \cos^2 \theta_{ij}` and acts on
    angles alone.

    Args:
        strength: 1e-4 is BigGAN's β for the off-diagonal form.
        diagonal: whether norms are drawn to 1.
        filters: `"raw"`, or `"unit"` to normalise every filter first (then `diagonal` says nothing more).

    Invariances:
        Rotations of the input space, permutations and flips of filters; with unit filters also their scale.

    Raises:
        InvalidArgumentError: for an unknown value of `filters`.

    Example:
        >>> gonio.regularizers.Orthogonality(1.0)(torch.eye(3))
        tensor(0.)
        >>> gonio.regularizers.Orthogonality(1.0)(2 * torch.eye(3))
        tensor(27.)
        >>> gonio.regularizers.Orthogonality(1.0, diagonal=False)(2 * torch.eye(3))
        tensor(0.)

    See also:
        :meth:`excess`, the value above the Welch bound, for more filters than dimensions.

    References:
        [1] A. Brock, J. Donahue, K. Simonyan, "Large scale GAN training for high fidelity natural image
        synthesis", ICLR 2019, Eq. (3) (off the diagonal). https://arxiv.org/abs/1809.11096
        [2] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.1. https://arxiv.org/abs/1810.09102

    Differs:
        BigGAN's public code adds :math:`2 (W W^\top \odot (1 - I)) W` to the gradient, half of the
        derivative of its formula; its strength 1e-4 is 0.5e-4 here. Groups are separate matrices.
    """

    diagonal: bool = True
    filters: Filters = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_filters(self.filters, "Orthogonality")

    def _closed(self, weight: Tensor, layout: Layout) -> Closed:
        matrix = matrix_view(weight, layout)
        if self.filters == "unit":
            return Closed(OffDiagonal(), normalize(matrix))
        return Closed(FromIdentity() if self.diagonal else OffDiagonal(), matrix)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        if self.diagonal and self.filters == "raw":
            return weight.new_zeros(())
        matrix = matrix_view(weight, layout)
        return welch_floor(normalize(matrix) if self.filters == "unit" else matrix).sum()


def check_filters(filters: str, name: str) -> None:
    """Raise unless `filters` is one of the two words that it may be."""
    require(
        filters in ("raw", "unit"),
        f"{name}(filters=…) takes 'raw' or 'unit'",
        repr(filters),
        "'unit' normalises every filter first.",
    )


def welch_floor(matrix: Tensor) -> Tensor:
    r"""Least :math:`\sum_{i \ne j} \langle w_i, w_j \rangle^2` that filters of the given norms can have.

    .. math::
        \max\Bigl(0, \tfrac1d \bigl(\textstyle\sum_i \lVert w_i \rVert^2\bigr)^2
        - \sum_i \lVert w_i \rVert^4\Bigr)

    because :math:`\operatorname{tr}(G)^2 \le d \lVert G \rVert_F^2` for a Gram matrix of rank at most d;
    with unit norms it is the Welch bound :math:`n^2/d - n`.
    """
    square = (matrix * matrix).sum(-1)
    return (square.sum(-1).square() / matrix.shape[-1] - square.square().sum(-1)).clamp_min(0)


class FromIdentity(Formula):
    """‖A Aᵀ − I‖² for A = W or Wᵀ, whichever has fewer rows; gradient 4 (A Aᵀ − I) A."""

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        a = small_side(x)
        gram = a @ a.mT
        return ((gram - identity_like(gram)).square().sum(),)

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        residual = symmetric_product(small_side(x))
        residual.diagonal(dim1=-2, dim2=-1).sub_(1)
        return (_squared_norm(residual),), (residual,)

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        (residual,) = saved
        return product(*_in_order(residual * (4 * factor), x))

    def add_gradient_(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: float) -> None:
        add_product_(target, *_in_order(saved[0], x), alpha=4 * factor)


class OffDiagonal(Formula):
    """Σ_{i≠j} ⟨w_i, w_j⟩²; gradient 4 (G W − diag(G) W) with the Gram matrix of either side."""

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        gram = x @ x.mT
        return ((gram * (1 - identity_like(gram))).square().sum(),)

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        if x.shape[-2] <= x.shape[-1]:
            gram = symmetric_product(x)
            gram.diagonal(dim1=-2, dim2=-1).zero_()
            return (_squared_norm(gram),), (gram,)
        # ‖W Wᵀ‖² = ‖Wᵀ W‖², less the filters' own terms
        gram, square = symmetric_product(x.mT), (x * x).sum(-1, keepdim=True)
        return ((_squared_norm(gram) - _squared_norm(square)).clamp_min(0),), (gram, square)

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        gram, *square = saved
        gradient = product(*_in_order(gram * (4 * factor), x))
        return gradient.addcmul_(x, square[0] * (-4 * factor)) if square else gradient

    def add_gradient_(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: float) -> None:
        gram, *square = saved
        add_product_(target, *_in_order(gram, x), alpha=4 * factor)
        if square:
            target.addcmul_(x, square[0], value=-4 * factor)


def _in_order(gram: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The Gram matrix of the smaller side on the side where it belongs."""
    return (gram, x) if x.shape[-2] <= x.shape[-1] else (x, gram)


def _squared_norm(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)
