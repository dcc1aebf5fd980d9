"""Double soft orthogonality: rows and columns against the identity."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import ClosedFormRegularizer
from gonio.regularizers.closed_form import Closed
from gonio.regularizers.orthogonality import FromIdentity

__all__ = ["DoubleOrthogonality"]


@dataclass(frozen=True, kw_only=True)
class DoubleOrthogonality(ClosedFormRegularizer):
    r"""Squared Frobenius distance from orthogonality of rows and of columns together.

    .. math:: \lVert W^\top W - I \rVert_F^2 + \lVert W W^\top - I \rVert_F^2

    The two summands differ by the constant :math:`|n - d|` and have one gradient, so this is twice
    :class:`Orthogonality` plus that constant, which is all that a matrix that is not square cannot remove. It
    is computed from the smaller side alone.

    Invariances:
        Rotations on either side, permutations and flips of filters. Not the filters' scale.

    Example:
        >>> gonio.regularizers.DoubleOrthogonality(1.0)(torch.eye(3)[:2])
        tensor(1.)

    References:
        [1] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.2. https://arxiv.org/abs/1810.09102
    """

    def _closed(self, weight: Tensor, layout: Layout) -> Closed:
        matrix = matrix_view(weight, layout)
        return Closed(FromIdentity(), matrix, scale=2.0, offset=_surplus(matrix))

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        return weight.new_tensor(_surplus(matrix_view(weight, layout)))


def _surplus(matrix: Tensor) -> float:
    count, rows, cols = matrix.shape
    return float(count * abs(rows - cols))
