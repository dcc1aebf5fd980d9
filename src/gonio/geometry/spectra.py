"""Singular values and figures computed from them: norms, ranks, conditioning, distance from orthogonality."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, inf

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.blocks import GramMatrix, Stored, StoredDifference, frobenius_norm, row_blocks, safe_scale
from gonio.geometry.lanczos import lanczos_error, largest_singular_value
from gonio.geometry.norms import (
    Array,
    as_matrices,
    check_finite,
    computed_in,
    full_precision,
    gram,
    safe_norm,
    small_side,
    whole,
    widen,
    widest,
)
from gonio.seeding import normal

# Note [Gram or SVD]
# eigvalsh of the smaller float64 Gram matrix is 2 to 3 times as fast as an SVD, but the error of a singular value s
# is about 1e-15·s_max²/s. If the ratio of eigenvalues is below this limit (s/s_max < 3e-6) the SVD is used.
GRAM_LIMIT = 1e-11

# Of spectrum_estimate:
EXACT_WORK = 5e9  # multiply-adds of a Gram matrix up to which all singular values are computed
EXACT_SIDE = 1024  # and the largest smaller side: eigenvalues, two thirds of the time, grow with its cube
DECOMPOSED = 1 << 22  # entries up to which a matrix is held in float64, so that small singular values are exact too
SMALL = 256  # size of the smaller side up to which its Gram matrix is always computed
STEPS = 32  # of the Lanczos iteration for larger matrices
LARGEST_RANK = 256  # largest energy_rank found without all singular values


def singular_values(matrix: Array) -> Tensor:
    r"""All singular values, largest first; computed in float64.

    Relative error at most 1e-6 for :math:`s > 10^{-4} s_{\max}`, absolute error at most :math:`10^{-9} s_{\max}` below.
    The gradient is a sum of :math:`u v^\top`, finite for repeated singular values, and 0 for a singular value of 0.

    Shape: (n, d) or (groups, n, d) → (min(n, d),) or (groups, min(n, d)), in float32 at least.
    Raises: InvalidArgumentError for non-finite entries or another rank.

    Example:
        >>> gonio.geometry.singular_values(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
        tensor([4., 3.])
    """
    matrix = whole(as_matrices(matrix, "singular_values"))
    check_finite(matrix, "singular_values")
    with full_precision(matrix):
        wide = matrix.to(widest(matrix))
        if 0 in matrix.shape:
            return wide.new_zeros((*matrix.shape[:-2], min(matrix.shape[-2:])), dtype=widen(matrix).dtype)
        scale = wide.detach().abs().amax((-2, -1), keepdim=True)
        scale = scale.masked_fill(scale == 0, 1)  # the square of 1e200 overflows
        wide = small_side(wide / scale)
        eigenvalues = torch.linalg.eigvalsh(wide @ wide.mT).flip(-1)
        if bool((eigenvalues[..., -1] < GRAM_LIMIT * eigenvalues[..., 0]).any()):
            values = torch.linalg.svdvals(wide)
        else:
            zero = eigenvalues <= 0  # only if every eigenvalue is 0: otherwise the limit applies
            values = eigenvalues.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
        return (values * scale.squeeze(-1)).to(widen(matrix).dtype)


@dataclass(frozen=True)
class OrthogonalityDefect:
    """Three norms of the deviation of the Gram matrix from the identity; see :func:`orthogonality_defect`."""

    entrywise: Tensor  # mean squared entry
    frobenius: Tensor
    spectral: Tensor


@dataclass(frozen=True)
class Spectrum:
    """Singular values, computed once, and the quantities that follow from them; made by :func:`spectrum`."""

    values: Tensor  # (…, min(n, d)), largest first

    @property
    def stable_rank(self) -> Tensor:
        """See :func:`stable_rank`."""
        return _relative(self.values).square().sum(-1)

    @property
    def effective_rank(self) -> Tensor:
        """See :func:`effective_rank`."""
        share = _relative(self.values)
        share = share / share.sum(-1, keepdim=True).clamp(min=1)  # 1 at least, but for a zero matrix
        share = share.clamp(min=torch.finfo(share.dtype).tiny)  # counts as 0·ln 0 = 0, with a gradient of 0
        return torch.special.entr(share).sum(-1).exp() * (self.values[..., 0] > 0)

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


def spectrum(matrix: Array) -> Spectrum:
    """All quantities of :class:`Spectrum` at the cost of one decomposition; see :func:`singular_values`.

    Raises: InvalidArgumentError as :func:`singular_values`, and for a matrix without entries.

    Example:
        >>> figures = gonio.geometry.spectrum(2 * torch.eye(4))
        >>> figures.values, figures.condition_number
        (tensor([2., 2., 2., 2.]), tensor(1.))
    """
    matrix = as_matrices(matrix, "spectrum")
    if matrix.numel() == 0:
        raise InvalidArgumentError(
            "spectrum() needs a matrix with entries", f"shape {tuple(matrix.shape)}", "Exclude empty layers."
        )
    return Spectrum(singular_values(matrix))


def _relative(values: Tensor) -> Tensor:
    """Values divided by the largest, so that squares do not overflow; 0 for a zero matrix."""
    top = values[..., :1]
    return values / top.masked_fill(top == 0, 1)


def stable_rank(matrix: Array) -> Tensor:
    r"""Squared Frobenius over squared spectral norm, :math:`\lVert W \rVert_F^2 / s_{\max}^2`.

    Between 1 (all filters parallel) and min(n, d) (orthogonal filters of equal norm); insensitive to small singular
    values. A zero matrix has stable rank 0, an :math:`n \times d` random matrix about
    :math:`nd / (\sqrt n + \sqrt d)^2`. The gradient grows as :math:`1/s_{\max}` and overflows float16 for weights below
    about 1e-4; differentiate these in float32.

    Shape: (n, d) or (groups, n, d) → () or (groups,).

    Example:
        >>> gonio.geometry.stable_rank(torch.eye(5)), gonio.geometry.stable_rank(torch.ones(5, 5))
        (tensor(5.), tensor(1.))

    References: [1] M. Rudelson, R. Vershynin, "Sampling from large matrices: an approach through geometric functional
        analysis", 2007, §1. https://arxiv.org/abs/math/0503442
    """
    return spectrum(matrix).stable_rank


def effective_rank(matrix: Array) -> Tensor:
    r"""Exponential of the entropy of the singular values, :math:`\exp(-\sum p_i \ln p_i)`, :math:`p_i = s_i / \sum s`.

    Between 1 and min(n, d), attained as for :func:`stable_rank`; unlike it, sensitive to small singular
    values. A zero matrix has effective rank 0. The gradient grows as that of :func:`stable_rank`.

    Shape: (n, d) or (groups, n, d) → () or (groups,).

    Example:
        >>> round(gonio.geometry.effective_rank(torch.eye(5)).item(), 5)
        5.0

    References: [1] O. Roy, M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007,
        Definition 1.
    """
    return spectrum(matrix).effective_rank


def condition_number(matrix: Array) -> Tensor:
    r"""Largest over smallest singular value, :math:`s_{\max} / s_{\min} \ge 1`.

    1 for multiples of (semi-)orthogonal matrices; about :math:`n` for a square Gaussian matrix. Infinite if the
    smallest singular value is 0.

    Shape: (n, d) or (groups, n, d) → () or (groups,).

    Example:
        >>> gonio.geometry.condition_number(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        tensor(2.)
    """
    return spectrum(matrix).condition_number


def orthogonality_defect(matrix: Array) -> OrthogonalityDefect:
    r"""Distance of a matrix from semi-orthogonal, :math:`E = G - I`, in three norms.

    :math:`G` is the Gram matrix of the smaller side, :math:`WW^\top` for :math:`n \le d`, of size
    :math:`m = \min(n, d)`. All three are 0 exactly for semi-orthogonal matrices. They disagree on random ones:

    ============= ========================================== ==============================================
    field         definition                                 square Gaussian, variance 1/n
    ============= ========================================== ==============================================
    ``entrywise`` mean of :math:`E_{ij}^2`                   :math:`1/n`, decreases with n
    ``frobenius`` :math:`\lVert E \rVert_F`                  :math:`\sqrt n`, increases with n
    ``spectral``  :math:`\max_i |s_i^2 - 1|`                 3 for every n
    ============= ========================================== ==============================================

    Shape: (n, d) or (groups, n, d) → each field () or (groups,).

    Example:
        >>> defect = gonio.geometry.orthogonality_defect(2 * torch.eye(4))
        >>> defect.entrywise, defect.frobenius, defect.spectral
        (tensor(2.2500), tensor(6.), tensor(3.))
    """
    return spectrum(matrix).orthogonality_defect


# --- weights of any size --------------------------------------------------------------------------


@dataclass(frozen=True)
class SpectrumEstimate:
    """Singular values of some matrices as one block-diagonal matrix, or only the largest."""

    largest: float
    error: float  # `largest` is too small by at most this share, with probability 0.99; 0 with all singular values
    values: Tensor | None  # all singular values of all matrices, smallest first; None if they were not computed

    def stable_rank(self, frobenius: float) -> float:
        """See :func:`stable_rank`; `frobenius` is the norm of all matrices together."""
        return (frobenius / self.largest) ** 2 if self.largest else 0.0

    @property
    def effective_rank(self) -> float | None:
        """See :func:`effective_rank`; None without all singular values."""
        return None if self.values is None else float(Spectrum(self.values.flip(0)).effective_rank)


def shared_gram(matrices: Tensor) -> GramMatrix | None:
    """The Gram matrix that `spectrum_estimate` and `pair_statistics` both use; None if the former uses none."""
    shared = len(matrices) == 1 and matrices.is_cpu and _affordable(matrices)
    return GramMatrix.of(matrices) if shared else None


def _affordable(matrices: Stored) -> bool:
    """Whether small singular values are computed exactly too."""
    return matrices.numel() <= DECOMPOSED and _exact(matrices)


def _exact(matrices: Stored) -> bool:
    """Whether all singular values are computed without being asked for."""
    small = min(matrices.shape[1:])
    return small <= EXACT_SIDE and matrices.numel() * small <= EXACT_WORK


def spectrum_estimate(
    matrices: Stored, *, name: str, gram: GramMatrix | None = None, deep: bool = False
) -> SpectrumEstimate:
    """The spectrum of (groups, n, d) with finite entries, in bounded memory.

    All singular values up to :data:`EXACT_WORK` multiply-adds and a smaller side of :data:`EXACT_SIDE`, or with `deep`;
    else the largest by :func:`largest_singular_value`. Memory is bounded by one block and the Gram matrix of the
    smaller side.

    `name` seeds the iteration; `gram` is the :func:`shared_gram` of these matrices, if it is known.
    """
    small = min(matrices.shape[1:])
    if _affordable(matrices):
        held = matrices[...] if isinstance(matrices, StoredDifference) else matrices
        gram = gram or shared_gram(held)
        if gram is not None:
            values = singular_values_of_each(held, gram)[0]
        else:  # in float32 the largest may overflow
            values = singular_values(held.to(widest(held))).double().flatten().sort().values
    elif deep or small <= SMALL or _exact(matrices):
        values = torch.cat([_values_by_blocks(matrix) for matrix in matrices]).sort().values
    else:
        found = [largest_singular_value(matrix, name=f"{name}/{i}", steps=STEPS) for i, matrix in enumerate(matrices)]
        return SpectrumEstimate(max(found), lanczos_error(min(STEPS, small), matrices.shape[2]), None)
    return SpectrumEstimate(float(values[-1]), 0.0, values)


def singular_values_of_each(matrices: Tensor, gram: GramMatrix) -> Tensor:
    """All singular values of each matrix of (matrices, n, d), smallest first, from their Gram matrices."""
    eigenvalues, scale = torch.linalg.eigvalsh(gram.values), gram.scale[:, None]
    few = (eigenvalues[:, 0] < GRAM_LIMIT * eigenvalues[:, -1]).nonzero().flatten()
    values = eigenvalues.clamp(min=0).sqrt()
    if len(few):
        values[few] = torch.linalg.svdvals(matrices[few].double() / scale[few, None]).flip(-1)
    return values * scale


def _values_by_blocks(matrix: Stored) -> Tensor:
    """From the float64 Gram matrix of the smaller side, summed over blocks; below 1e-8 of the largest only noise."""
    n, d = matrix.shape
    scale = safe_scale(matrix)
    total = torch.zeros(min(n, d), min(n, d), dtype=torch.float64, device=matrix.device)
    for _, block in row_blocks(matrix if n > d else matrix.mT):
        total += gram((block.double() / scale).mT)
    return torch.linalg.eigvalsh(total).clamp(min=0).sqrt() * scale


def energy_rank(matrices: Stored, found: SpectrumEstimate, share: float, *, name: str) -> int | None:
    r"""The smallest number of singular directions of (groups, n, d) that hold this share of the squared norm.

    Without all singular values those of :math:`Q^\top W` are used, with Q the range of W times
    :data:`LARGEST_RANK` random vectors [1]. None of them exceeds its counterpart of W, so the result is never too
    small; it is exact for a weight of lower rank, and None if so many directions hold less. `name` seeds the vectors.

    References: [1] N. Halko, P. Martinsson, J. Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011,
        Algorithm 4.1 and Theorem 1.1.
    """
    if found.values is not None:
        squares = found.values.square()
        total = float(squares.sum())
    else:
        norm, most = hypot(*map(frobenius_norm, matrices)), found.largest * (1 + found.error)
        total = norm * norm
        if len(matrices) * LARGEST_RANK * most * most < share * total:
            return None  # even so many directions as large as the largest hold less
        squares = torch.cat([_range_values(matrix, f"{name}/{i}") for i, matrix in enumerate(matrices)]).square()
    held = squares.sort(descending=True).values.cumsum(0)
    enough = held >= share * total
    return int(enough.int().argmax()) + 1 if bool(enough.any()) else None


def _range_values(matrix: Stored, name: str) -> Tensor:
    draw = normal((matrix.shape[1], LARGEST_RANK), 0, "sketch", name, dtype=torch.float64)
    draw = draw.to(matrix.device, computed_in(matrix.dtype))
    basis = torch.linalg.qr(torch.cat([rows @ draw for _, rows in row_blocks(matrix)])).Q
    inside = torch.zeros_like(draw)  # (Qᵀ W)ᵀ
    for top, rows in row_blocks(matrix):
        inside.addmm_(rows.mT, basis[top : top + len(rows)])
    return singular_values(inside).double()
