"""Orthonormal filters, as the nearest ones to what is trained."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.precision import widen
from gonio.parametrizations.filters import from_matrices, matrices_of
from gonio.parametrizations.parametrization import Parametrization
from gonio.parametrizations.polar import nearest_orthogonal, polar

__all__ = ["Orthogonal"]


class Orthogonal(Parametrization):
    r"""Orthonormal filters: the polar factor :math:`Q = (V V^\top)^{-1/2} V` of each group's matrix, times s.

    Q is the nearest matrix to V with orthonormal rows (or, where filters outnumber their entries, columns).
    The filters of one group are orthonormal; those of different groups act on different inputs. A depthwise
    layer has one filter per group, of unit norm. Attaching projects the trained tensor, so training starts
    from the orthogonal matrix that is nearest to the weight.

    Why this map and not the exponential or the Cayley transform of a skew matrix: it needs no base point, so
    the trained tensor alone determines the weight and a plain checkpoint is a valid start; it is the
    projection for conversion and the map for training in one; no orthogonal matrix is out of reach (Cayley
    leaves out those with eigenvalue −1); and for one row it is :class:`Sphere`. Its derivative divides by sums
    of two singular values of V, or by one where rows leave their span. Plain gradient steps only raise the
    singular values from 1, as they raise norms under weight normalisation, so it stays well conditioned;
    weight decay lowers them. Directions in which V is zero (a zero weight) stay zero.

    Args:
        scale: s > 0, every singular value of the weight.

    Invariances:
        :math:`V \to A V` for a symmetric positive A that commutes with :math:`V V^\top`; in particular
        rescaling of V.

    Raises:
        InvalidArgumentError: if `scale` is not positive and finite.

    Cost:
        per read, two products of the size of a Gram matrix and one eigendecomposition of the smaller side.

    Folding:
        exact: ``detach(layer, "weight", keep="weight")``.

    Example:
        >>> layer = nn.Conv2d(4, 6, 3, groups=2)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Orthogonal())
        >>> filters = layer.weight.view(2, 3, 18)
        >>> torch.allclose(filters @ filters.mT, torch.eye(3).expand(2, 3, 3), atol=1e-6)
        True

    References:
        [1] N. J. Higham, "Functions of Matrices", SIAM 2008, chapter 8: the polar decomposition, Theorem 8.4
        (nearest) and section 8.3 (derivative). [2] P.-O. Löwdin, J. Chem. Phys. 18, 1950.
        Differs: torch's ``parametrizations.orthogonal`` makes each 2-D kernel of a convolution orthogonal,
        which says nothing about its filters.
    """

    options: ClassVar[tuple[str, ...]] = ("scale",)

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        if not 0 < scale < float("inf"):
            raise InvalidArgumentError("Orthogonal needs a finite scale > 0", f"{scale}", "Often it is 1.")
        self.scale = float(scale)

    def weight_of(self, raw: Tensor) -> Tensor:
        layout = self.bound_layout
        return from_matrices(polar(matrices_of(raw, layout)) * self.scale, raw.shape, layout)

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """The nearest orthogonal tensor; a rank-deficient weight is completed by some orthonormal rows."""
        layout = self.bound_layout
        nearest = nearest_orthogonal(matrices_of(widen(weight), layout))
        return from_matrices(nearest, weight.shape, layout).to(weight.dtype)

    def holds(self, weight: Tensor) -> bool:
        """Whether the rows (or columns) of each group are orthonormal up to the scale and rounding."""
        matrices = matrices_of(weight.detach().double(), self.bound_layout) / self.scale
        small = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
        defect = small @ small.mT - torch.eye(small.shape[-2], dtype=small.dtype, device=small.device)
        return bool(defect.abs().max() <= 10 * small.shape[-1] ** 0.5 * torch.finfo(weight.dtype).eps)
