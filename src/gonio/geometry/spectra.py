"""Singular values and what they say: norms, ranks, conditioning, distance from orthogonality."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import safe_norm
from gonio.geometry.precision import check_finite, check_matrix, full_precision, whole, widen, widest

__all__ = [
    "OrthogonalityDefect",
    "Spectrum",
    "condition_number",
    "effective_rank",
    "orthogonality_defect",
    "singular_values",
    "spectrum",
    "stable_rank",
]

# Note [Gram or SVD]
# eigvalsh of the smaller float64 Gram matrix is 2 to 3 times as fast as an SVD, but squares the
# condition number: a singular value s is off by about 1e-15·s_max²/s. Below this ratio of eigenvalues
# (s/s_max < 3e-6) the matrix is handed to the SVD, so every s > 1e-4·s_max is right to 1e-6 relative
# and every smaller one to 1e-9·s_max absolute.
GRAM_LIMIT = 1e-11


def singular_values(matrix: Tensor) -> Tensor:
    r"""All singular values, largest first; computed in float64.

    Relative error at most 1e-6 for :math:`s > 10^{-4} s_{\max}`, absolute error at most
    :math:`10^{-9} s_{\max}` below, before rounding to the result's dtype. Differentiable: the gradient is
    a sum of :math:`u v^\top`, finite for repeated singular values, and 0 for a singular value of 0.

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: (min(n, d),) or (groups, min(n, d)), in float32 at least.

    Invariances:
        Permuting, flipping and rotating rows or columns.

    Raises:
        InvalidArgumentError: for non-finite entries, which have no spectrum, or another rank.

    Example:
        >>> gonio.geometry.singular_values(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
        tensor([4., 3.])
    """
    check_matrix(matrix, "singular_values")
    matrix = whole(matrix)
    check_finite(matrix, "singular_values")
    with full_precision(matrix):
        wide = matrix.to(widest(matrix))
        if 0 in matrix.shape:
            return wide.new_zeros((*matrix.shape[:-2], min(matrix.shape[-2:])), dtype=widen(matrix).dtype)
        scale = wide.detach().abs().amax((-2, -1), keepdim=True)
        scale = scale.masked_fill(scale == 0, 1)  # the square of 1e200 is no float64
        return (_singular_values(wide / scale) * scale.squeeze(-1)).to(widen(matrix).dtype)


def _singular_values(matrix: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(_small_gram(matrix)).flip(-1)
    if bool((eigenvalues[..., -1] < GRAM_LIMIT * eigenvalues[..., 0]).any()):
        return torch.linalg.svdvals(matrix)
    zero = eigenvalues <= 0  # only where every eigenvalue is 0, or the Gram limit would have applied
    return eigenvalues.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _small_gram(matrix: Tensor) -> Tensor:
    n, d = matrix.shape[-2:]
    return matrix @ matrix.mT if n <= d else matrix.mT @ matrix


@dataclass(frozen=True)
class OrthogonalityDefect:
    """Three sizes of the Gram matrix's deviation from the identity; see :func:`orthogonality_defect`."""

    entrywise: Tensor  # mean squared entry
    frobenius: Tensor
    spectral: Tensor


@dataclass(frozen=True)
class Spectrum:
    """Singular values, computed once, and the figures that follow from them.

    Example:
        >>> gonio.geometry.spectrum(torch.diag(torch.tensor([2.0, 1.0]))).stable_rank
        tensor(1.2500)
    """

    values: Tensor  # (…, min(n, d)), largest first

    @property
    def _relative(self) -> Tensor:
        """Values over the largest, whose square may overflow; 0 for a zero matrix."""
        top = self.values[..., :1]
        return self.values / top.masked_fill(top == 0, 1)

    @property
    def stable_rank(self) -> Tensor:
        """See :func:`stable_rank`."""
        return self._relative.square().sum(-1)

    @property
    def effective_rank(self) -> Tensor:
        """See :func:`effective_rank`."""
        total = self._relative.sum(-1, keepdim=True)
        share = self._relative / total.masked_fill(total == 0, 1)
        share = share.masked_fill(share == 0, 1)  # 0·ln 0 = 0 = 1·ln 1, with a finite gradient
        return torch.special.entr(share).sum(-1).exp() * (total.squeeze(-1) > 0)

    @property
    def condition_number(self) -> Tensor:
        """See :func:`condition_number`."""
        least = self.values[..., -1]
        return torch.where(least > 0, self.values[..., 0] / least.masked_fill(least == 0, 1), inf)

    @property
    def orthogonality_defect(self) -> OrthogonalityDefect:
        """See :func:`orthogonality_defect`."""
        deviation = self.values.square() - 1
        frobenius = safe_norm(deviation, -1)
        return OrthogonalityDefect(
            entrywise=frobenius.square() / deviation.shape[-1] ** 2,
            frobenius=frobenius,
            spectral=deviation.abs().amax(-1),
        )


def spectrum(matrix: Tensor) -> Spectrum:
    """All figures of :class:`Spectrum` at the cost of one decomposition; see :func:`singular_values`.

    Raises:
        InvalidArgumentError: as :func:`singular_values`, and for a matrix without entries.

    Example:
        >>> figures = gonio.geometry.spectrum(2 * torch.eye(4))
        >>> figures.values, figures.condition_number
        (tensor([2., 2., 2., 2.]), tensor(1.))
    """
    if matrix.numel() == 0:
        raise InvalidArgumentError(
            "spectrum() needs a matrix with entries", f"shape {tuple(matrix.shape)}", "Leave empty layers out."
        )
    return Spectrum(singular_values(matrix))


def stable_rank(matrix: Tensor) -> Tensor:
    r"""Squared Frobenius over squared spectral norm, :math:`\lVert W \rVert_F^2 / s_{\max}^2`.

    Between 1 (all filters parallel) and min(n, d) (orthogonal of equal norms); never above the rank, and
    insensitive to small singular values. A zero matrix has stable rank 0. For an :math:`n \times d` random
    matrix it is near :math:`nd / (\sqrt n + \sqrt d)^2`. Its gradient grows as :math:`1/s_{\max}`: beyond
    float16 for weights below about 1e-4, which are to be differentiated in float32.

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: () or (groups,).

    Example:
        >>> gonio.geometry.stable_rank(torch.eye(5))
        tensor(5.)
        >>> gonio.geometry.stable_rank(torch.ones(5, 5))
        tensor(1.)

    References:
        [1] M. Rudelson, R. Vershynin, "Sampling from large matrices: an approach through geometric
        functional analysis", 2007, §1. https://arxiv.org/abs/math/0503442
    """
    return spectrum(matrix).stable_rank


def effective_rank(matrix: Tensor) -> Tensor:
    r"""Exponential of the entropy of the singular values, :math:`\exp(-\sum p_i \ln p_i)`, :math:`p_i = s_i / \sum s`.

    Between 1 and min(n, d), both attained as by :func:`stable_rank`; unlike it, small singular values
    count. A zero matrix has effective rank 0. Its gradient grows as that of :func:`stable_rank`.

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: () or (groups,).

    Example:
        >>> round(gonio.geometry.effective_rank(torch.eye(5)).item(), 5)
        5.0

    References:
        [1] O. Roy, M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007,
        Definition 1.
    """
    return spectrum(matrix).effective_rank


def condition_number(matrix: Tensor) -> Tensor:
    r"""Largest over smallest singular value, :math:`s_{\max} / s_{\min} \ge 1`.

    1 for (semi-)orthogonal matrices times a number; about :math:`n` for a square Gaussian matrix, however
    near to orthogonal its entries look. Infinite where the smaller singular value is 0.

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: () or (groups,).

    Example:
        >>> gonio.geometry.condition_number(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        tensor(2.)
    """
    return spectrum(matrix).condition_number


def orthogonality_defect(matrix: Tensor) -> OrthogonalityDefect:
    r"""How far a matrix is from semi-orthogonal: :math:`E = G - I`, in three norms that disagree.

    :math:`G` is the Gram matrix of the smaller side, :math:`WW^\top` for :math:`n \le d`, of size
    :math:`m = \min(n, d)`. All three are 0 exactly for semi-orthogonal matrices.

    ============= ========================================== ==============================================
    field         is                                         square Gaussian, variance 1/n
    ============= ========================================== ==============================================
    ``entrywise`` mean of :math:`E_{ij}^2`                   :math:`1/n`: nearer to orthogonal as n grows
    ``frobenius`` :math:`\lVert E \rVert_F`                  :math:`\sqrt n`: farther
    ``spectral``  :math:`\max_i |s_i^2 - 1|`                 3, whatever n: never orthogonal
    ============= ========================================== ==============================================

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - each field: () or (groups,).

    Example:
        >>> defect = gonio.geometry.orthogonality_defect(2 * torch.eye(4))
        >>> defect.entrywise, defect.frobenius, defect.spectral
        (tensor(2.2500), tensor(6.), tensor(3.))
    """
    return spectrum(matrix).orthogonality_defect
