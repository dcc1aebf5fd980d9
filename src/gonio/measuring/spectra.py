"""Spectra of a weight's matrices: exact where that is cheap, and the largest value with its error above."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import torch
from torch import Tensor

from gonio.geometry import normalize, singular_values
from gonio.geometry.matrix_vector import matrix_vector
from gonio.geometry.precision import widest
from gonio.geometry.spectra import GRAM_LIMIT
from gonio.measuring.blocks import row_blocks
from gonio.measuring.gram import Gram, scale_of
from gonio.seeding import generator

__all__ = ["CERTAINTY", "Spectra", "gram_for", "lanczos_error", "largest_singular_value", "rank_holding", "spectra_of"]

EXACT_WORK = 5e9  # multiply-adds of a Gram matrix up to which all singular values are computed
DECOMPOSED = 1 << 22  # entries up to which a matrix is held in float64, for small singular values too
BLOCKED = 128  # size of the smaller side from which half of the Gram matrix is left out
SMALL = 256  # size of the smaller side up to which its Gram matrix is always taken
LARGEST_RANK = 256  # that is looked for in a weight too large for all singular values
STEPS = 32  # of the Lanczos iteration above
CERTAINTY = 0.99  # with which its error is stated


@dataclass(frozen=True)
class Spectra:
    """Singular values of some matrices as one block-diagonal matrix, or the largest alone.

    Attributes:
        largest: of all; where `values` is None it is at most too small, by the share `error` of it at
            most, with the probability :data:`CERTAINTY`.
        values: all singular values, of every matrix, in no order; None where they were not computed.
    """

    largest: float
    error: float
    values: Tensor | None


def gram_for(matrices: Tensor) -> Gram | None:
    """The Gram matrix from which :func:`spectra_of` reads these matrices' values, if it reads them from one."""
    groups, n, d = matrices.shape
    if groups > 1 or min(n, d) < BLOCKED or not _affordable(matrices) or matrices.device.type != "cpu":
        return None
    return Gram.of(matrices[0])


def _affordable(matrices: Tensor) -> bool:
    """Whether the small singular values are computed too."""
    return matrices.numel() <= DECOMPOSED and matrices.numel() * min(matrices.shape[1:]) <= EXACT_WORK


def spectra_of(matrices: Tensor, *, name: str, gram: Gram | None = None) -> Spectra:
    """The spectra of (groups, n, d), entries finite, in bounded memory.

    Args:
        name: seeds the iteration's start.
        gram: :func:`gram_for` these matrices, where it is known already.
    """
    small = min(matrices.shape[1:])
    if _affordable(matrices):
        values = _decomposed(matrices, gram or gram_for(matrices))
        return Spectra(float(values.max()), 0.0, values)
    if small <= SMALL or matrices.numel() * small <= EXACT_WORK:
        values = torch.cat([_by_gram(matrix) for matrix in matrices])
        return Spectra(float(values.max()), 0.0, values)
    found = [largest_singular_value(matrix, name=f"{name}/{i}") for i, matrix in enumerate(matrices)]
    return Spectra(max(found), lanczos_error(min(STEPS, small), matrices.shape[2]), None)


def _decomposed(matrices: Tensor, gram: Gram | None) -> Tensor:
    """From the float64 Gram matrix, or by an SVD where there is none or it would lose the small values."""
    if gram is None:
        return singular_values(matrices.to(widest(matrices))).double().flatten()  # in float32 the largest may overflow
    eigenvalues = torch.linalg.eigvalsh(gram.lower)
    if bool(eigenvalues[0] < GRAM_LIMIT * eigenvalues[-1]):
        return torch.linalg.svdvals(matrices[0].double() / gram.scale) * gram.scale
    return eigenvalues.sqrt() * gram.scale


def _by_gram(matrix: Tensor) -> Tensor:
    """From the float64 Gram matrix of the smaller side, block by block; below 1e-8 of the largest they are noise."""
    n, d = matrix.shape
    rows, scale = n > d, scale_of(matrix)
    gram = torch.zeros(min(n, d), min(n, d), dtype=torch.float64, device=matrix.device)
    source = row_blocks(matrix) if rows else row_blocks(matrix.mT)
    for _, block in source:
        part = block.double() / scale
        gram += part.mT @ part
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt() * scale


def largest_singular_value(matrix: Tensor, *, name: str, steps: int = STEPS) -> float:
    r"""A lower bound of :math:`\lVert W \rVert` by Lanczos steps on :math:`W^\top W`, from a random start.

    Each step reads the matrix once, block by block: for a block C of rows, :math:`C^\top (C v)` is added up.
    The basis is kept and every new vector is made orthogonal to it twice.

    References:
        [1] G. Golub, C. Van Loan, "Matrix computations", 4th ed., 2013, §10.1 and §10.4.
    """
    scale, basis, diagonal, beside = scale_of(matrix), [], [], []
    start = torch.randn(matrix.shape[1], generator=generator(0, "largest", name), dtype=torch.float64)
    v = normalize(start).to(matrix.device, torch.promote_types(matrix.dtype, torch.float32))
    for _ in range(min(steps, *matrix.shape)):
        basis.append(v)
        image = _gram_times(matrix, v, scale)
        diagonal.append(float(image @ v))
        known = torch.stack(basis)
        for _ in range(2):  # one pass leaves what cancellation left
            image -= known.mT @ (known @ image)
        size = float(torch.linalg.vector_norm(image))
        if size <= 1e-6 * max(diagonal):  # the Krylov space is complete
            break
        beside.append(size)
        v = image / size
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    return sqrt(max(0.0, float(torch.linalg.eigvalsh(tridiagonal)[-1]))) * scale


def _gram_times(matrix: Tensor, v: Tensor, scale: float) -> Tensor:
    total = torch.zeros_like(v)
    for _, block in row_blocks(matrix):
        if scale != 1:
            block.div_(scale)
        total += matrix_vector(block.mT, matrix_vector(block, v))
    return total


def lanczos_error(steps: int, length: int, *, certainty: float = CERTAINTY) -> float:
    r"""How much larger than the found one the largest singular value may be, as a share of the found one.

    With a start that is uniform on the sphere of :math:`\mathbb{R}^d`, k steps find the largest eigenvalue
    :math:`\lambda` of :math:`W^\top W` up to :math:`\varepsilon \lambda` with a probability of at least
    :math:`1 - 1.648 \sqrt d\, e^{-\sqrt\varepsilon (2k - 1)}`, whatever the matrix is. Usually the error is a
    hundred times smaller.

    Example:
        >>> from gonio.measuring.spectra import lanczos_error
        >>> round(lanczos_error(32, 4096), 4), round(lanczos_error(64, 4096), 4)
        (0.011, 0.0027)

    References:
        [1] J. Kuczyński, H. Woźniakowski, "Estimating the largest eigenvalue by the power and Lanczos
        algorithms with a random start", SIAM J. Matrix Anal. Appl. 13(4), 1992, Theorem 4.2.
    """
    missed = (max(0.0, log(1.648 * sqrt(length) / (1 - certainty))) / (2 * steps - 1)) ** 2
    return (1 - missed) ** -0.5 - 1 if missed < 1 else float("inf")


def rank_holding(matrices: Tensor, found: Spectra, share: float, *, name: str) -> int | None:
    r"""The fewest singular directions of (groups, n, d) that hold this share of the squared norm.

    Where not all singular values are known, from those of :math:`Q^\top W`, with Q the range of W times
    :data:`LARGEST_RANK` random vectors: none of them exceeds its counterpart of W, so the answer is never too small;
    it is exact for a weight of lower rank, and None where so many directions hold less.

    References:
        [1] N. Halko, P. Martinsson, J. Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011,
        Algorithm 4.1 and Theorem 1.1.
    """
    if found.values is not None:
        values, total = found.values.square(), float(found.values.square().sum())
    else:
        values = torch.cat([_sketched(matrix, f"{name}/{i}") for i, matrix in enumerate(matrices)]).square()
        total = float(torch.linalg.vector_norm(matrices, dtype=torch.float64)) ** 2
    held = values.sort(descending=True).values.cumsum(0)
    enough = held >= share * total
    return int(enough.int().argmax()) + 1 if bool(enough.any()) else None


def _sketched(matrix: Tensor, name: str) -> Tensor:
    draw = torch.randn(matrix.shape[1], LARGEST_RANK, generator=generator(0, "sketch", name), dtype=torch.float64)
    basis = torch.linalg.qr(matrix @ draw.to(matrix.device, matrix.dtype)).Q
    return singular_values(basis.mT @ matrix).double()
