"""The largest singular value by Golub–Kahan bidiagonalisation: a tight lower bound in few products."""

from __future__ import annotations

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import normalize, safe_norm
from gonio.geometry.precision import check_finite, check_matrix, full_precision, whole, widen
from gonio.seeding import generator

__all__ = ["spectral_norm"]

# Note [Golub–Kahan]
# k steps from a start vector u on the smaller side give orthonormal bases U (k + 1 vectors) and V (k) with
# W V = U B, B lower bidiagonal. The top singular value of B is the best lower bound in the two Krylov
# spaces; power iteration keeps one vector of the same spaces, and needs the square of the number of steps
# for the same error. Without re-orthogonalisation (cost k² vectors) copies of the top value appear.


def spectral_norm(matrix: Tensor, *, steps: int = 48, seed: int = 0) -> Tensor:
    r"""Largest singular value of each matrix, from `steps` products with it and its transpose.

    A lower bound, exact when `steps` reaches the number of distinct singular values. On a 4096×4096 Gaussian
    matrix, whose top is hard to separate, the relative error is 7e-4 after 24 steps and 4e-5 after 48; with
    a spectral gap it is rounding. Differentiable once: the gradient is :math:`u v^\top`.

    Args:
        matrix: see Shape.
        steps: products; more tighten the bound.
        seed: of the start vector.

    Shape:
        - ``matrix``: (n, d) or (groups, n, d).
        - output: () or (groups,), in float32 at least.

    Raises:
        InvalidArgumentError: if `steps` is below 1, for non-finite entries, or for another rank.

    Example:
        >>> round(gonio.geometry.spectral_norm(torch.diag(torch.tensor([1.0, 5.0, 2.0]))).item(), 4)
        5.0

    See also:
        :func:`singular_values`, exact and slower.

    References:
        [1] G. Golub, W. Kahan, "Calculating the singular values and pseudo-inverse of a matrix", SIAM J.
        Numer. Anal. 2(2), 1965, §2.
    """
    check_matrix(matrix, "spectral_norm")
    if steps < 1:
        raise InvalidArgumentError("spectral_norm() needs steps >= 1", f"steps={steps}", "Use 24 or 48.")
    check_finite(matrix, "spectral_norm")
    if 0 in matrix.shape:
        return widen(matrix).new_zeros(matrix.shape[:-2])
    if matrix.ndim == 3 and matrix.shape[0] == 1:  # a batched product with one vector is slow on CPU
        return spectral_norm(matrix[0], steps=steps, seed=seed).unsqueeze(0)
    matrix = whole(matrix)
    with full_precision(matrix):
        wide = widen(matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT)
        u, v = _top_pair(wide.detach(), min(steps, wide.shape[-2]), seed)
        return (u.mT @ (wide @ v)).squeeze((-2, -1))


@torch.no_grad()
def _top_pair(matrix: Tensor, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit column vectors u, v with uᵀWv the top singular value of the bidiagonal matrix; W has n ≤ d."""
    least, most = matrix.amin((-2, -1), keepdim=True), matrix.amax((-2, -1), keepdim=True)
    scale = torch.maximum(-least, most)
    scale = scale.masked_fill(scale == 0, 1)  # products near 1, whatever unit the weights are in
    start = torch.randn(matrix.shape[-2], 1, generator=generator(seed, "spectral_norm"), dtype=torch.float64)
    left = [normalize(start.to(matrix), -2).expand(*matrix.shape[:-2], -1, 1)]
    right: list[Tensor] = []
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    for _ in range(steps):
        alpha, v = _next_direction(matrix.mT @ left[-1] / scale, right, alphas)
        alphas.append(alpha)
        right.append(v)
        beta, u = _next_direction(matrix @ v / scale, left, alphas)
        betas.append(beta)
        left.append(u)
    p, q = _top_of_bidiagonal(torch.cat(alphas, -1), torch.cat(betas, -1))
    u, v = torch.cat(left, -1) @ p.to(matrix), torch.cat(right, -1) @ q.to(matrix)
    return normalize(u, -2), normalize(v, -2)


def _top_of_bidiagonal(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Top singular vectors, as columns, of the lower bidiagonal (k + 1) × k matrix."""
    square = torch.nn.functional.pad(torch.diag_embed(alpha), (0, 0, 0, 1))
    below = torch.nn.functional.pad(torch.diag_embed(beta), (0, 0, 1, 0))
    p, _, qh = torch.linalg.svd((square + below).to(torch.float64).cpu())
    return p[..., :1], qh[..., :1, :].mT


def _next_direction(x: Tensor, basis: list[Tensor], alphas: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Norm and unit vector of the part of the column `x` outside the basis; zero if that is rounding.

    A residual of rounding size means that the Krylov space is complete; scaled up to a unit vector it would
    be noise inside the basis.
    """
    scale = torch.stack([*alphas, safe_norm(x, -2)]).amax(0)
    for _ in range(2 if basis else 0):  # "twice is enough": one pass leaves what cancellation left
        known = torch.cat(basis, -1)
        x = x - known @ (known.mT @ x)
    norm = safe_norm(x, -2)
    norm = norm * (norm > 32 * torch.finfo(x.dtype).eps * scale)
    return norm, normalize(x, -2) * (norm > 0).unsqueeze(-1)
