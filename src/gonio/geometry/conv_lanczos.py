"""The norm of a convolution from below, by Golub–Kahan steps at all frequencies together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gonio.geometry.conv_norm import grid_of, largest_entry
from gonio.geometry.norms import normalize, safe_norm
from gonio.geometry.precision import full_precision, whole, widen, widest
from gonio.geometry.symbol import Taps, taps_of
from gonio.geometry.views import PLAIN, Layout
from gonio.seeding import generator

__all__ = ["conv_spectral_norm_estimate"]

# Note [Racing]
# One Golub–Kahan step at every frequency is two real matrix products with the taps, so a few steps
# everywhere are cheap and the symbol is never formed. Each round takes more steps at the frequencies that
# lead; the norm at the last few is computed exactly. Large grids are first walked coarsely: the symbol is a
# trigonometric polynomial of low degree, which cannot hide a peak between points that close; then the
# gaps around the leaders are filled in.
COARSE = 32  # points per period of the first walk
# Fewer steps in the first round lose the top frequency: 6 did in 3 % of 265 Gaussian kernels of 64 to 256
# channels, by up to 6e-3; 8 and more did in none.
FIRST, FINAL = (12, 24), (24, 4)  # (steps, frequencies kept)
CHUNK_ENTRIES = 1 << 22


def conv_spectral_norm_estimate(
    weight: Tensor, size: Sequence[int], *, layout: Layout = PLAIN, seed: int = 0
) -> Tensor:
    r"""Operator norm of a convolution with circular padding on a grid, as a tight lower bound.

    The same quantity as :func:`conv_spectral_norm`, in a third of its time for 256 channels and more: no
    decomposition per frequency, but Golub–Kahan steps at all frequencies at once, and more of them where the
    norm is large. The value is exact at the frequency that it settles on, which in hundreds of Gaussian
    kernels was always the top one. Where a guarantee is needed take :func:`conv_spectral_norm`, or
    :func:`conv_spectral_norm_bound` for every grid.

    Args:
        weight: of a convolution or transposed convolution.
        size: the grid of the fine side, as for :func:`conv_spectral_norm`.
        layout: how the weight is stored and applied.
        seed: of the start vectors.

    Returns:
        A scalar in float32 at least, without gradient.

    Raises:
        InvalidArgumentError: as :func:`conv_spectral_norm`.

    Example:
        >>> round(gonio.geometry.conv_spectral_norm_estimate(torch.ones(1, 1, 3, 3), (8, 8)).item(), 4)
        9.0
    """
    weight = whole(weight.detach())
    scale = largest_entry(weight)
    with torch.no_grad(), full_precision(weight):
        taps = taps_of(widen(weight) / scale, layout).smaller_side()
        taps = Taps(taps.matrices.contiguous(), taps.positions)  # read twice per step
        grid = torch.tensor(grid_of(size, layout, weight, taps.reach))
        gaps = (grid // COARSE).clamp_min(1)
        points = _half_plane(grid, gaps)
        if bool((gaps > 1).any()):
            points = _with_neighbours(_best(taps, points, grid, FIRST, seed), gaps, grid)
        for round_ in (FIRST, FINAL):
            points = _best(taps, points, grid, round_, seed)
        double = Taps(taps.matrices.to(widest(weight)), taps.positions)
        symbol = double.symbol(_omega(points, grid).to(double.matrices))
        top = torch.linalg.eigvalsh(symbol @ symbol.mH)[..., -1].amax().clamp_min(0).sqrt() * scale
        return top.to(widen(weight).dtype)


def _omega(points: Tensor, grid: Tensor) -> Tensor:
    return points.double() * (2 * torch.pi / grid.double())


def _half_plane(grid: Tensor, gaps: Tensor) -> Tensor:
    """Integer frequencies (count, dims) that determine the rest, every `gaps`-th per dimension."""
    ends = grid.clone()
    ends[-1] = ends[-1] // 2 + 1
    axes = (torch.arange(0, int(end), int(gap)) for end, gap in zip(ends, gaps, strict=True))
    return torch.cartesian_prod(*axes).reshape(-1, len(grid))


def _with_neighbours(points: Tensor, gaps: Tensor, grid: Tensor) -> Tensor:
    """The points and everything nearer to them than the next coarse point."""
    offsets = torch.cartesian_prod(*(torch.arange(1 - int(g), int(g)) for g in gaps)).reshape(-1, len(gaps))
    return torch.unique((points[:, None] + offsets).flatten(0, 1) % grid, dim=0)


def _best(taps: Taps, points: Tensor, grid: Tensor, round_: tuple[int, int], seed: int) -> Tensor:
    steps, kept = round_
    if len(points) <= kept:
        return points
    return points[_norms(taps, points, grid, steps, seed).topk(kept).indices.cpu()]


def _norms(taps: Taps, points: Tensor, grid: Tensor, steps: int, seed: int) -> Tensor:
    """Largest Ritz value over the groups, at each frequency."""
    omega = _omega(points, grid).to(taps.matrices)
    groups, count, out, _ = taps.matrices.shape
    parts = omega.split(max(1, CHUNK_ENTRIES // (groups * count * out)))
    return torch.cat([_ritz(taps, part, min(steps, out), seed).amax(0) for part in parts])


def _ritz(taps: Taps, omega: Tensor, steps: int, seed: int) -> Tensor:
    """Top singular value of the bidiagonal matrix after `steps`, (groups, frequencies).

    The recurrence starts on the smaller side, so that it is exact once `steps` reaches that side's size.
    Complex vectors are kept as pairs of reals in the last dimension: (groups, channels, frequencies, 2).
    """
    phase = taps.phases(omega)
    groups, _, out, _ = taps.matrices.shape
    start = torch.randn(groups, out, 1, 2, generator=generator(seed, "conv"), dtype=torch.float64)
    u = normalize(start.to(taps.matrices).expand(-1, -1, len(omega), -1), (1, 3))
    v: Tensor | float = 0.0
    beta = torch.zeros_like(u[:, 0, :, 0])
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    for _ in range(steps):
        alpha, v = _next_direction(_adjoint(taps, phase, u) - beta[:, None, :, None] * v, alphas)
        alphas.append(alpha)
        beta, u = _next_direction(_forward(taps, phase, v) - alpha[:, None, :, None] * u, alphas)
        betas.append(beta)
    return _top_of_bidiagonal(alphas, betas)


def _next_direction(x: Tensor, alphas: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Norm and unit vectors of `x`, zero where the Krylov space is complete and `x` only rounding."""
    norm = safe_norm(x, (1, 3))
    if alphas:
        norm = norm * (norm > 32 * torch.finfo(x.dtype).eps * alphas[0])
    return norm, normalize(x, (1, 3)) * (norm > 0)[:, None, :, None]


def _top_of_bidiagonal(alphas: list[Tensor], betas: list[Tensor]) -> Tensor:
    """Largest singular value of the lower bidiagonal (k+1) × k matrix, from its tridiagonal Gram matrix."""
    alpha, beta = (torch.stack(x, -1).to(widest(x[0])) for x in (alphas, betas))
    gram = torch.diag_embed(alpha.square() + beta.square())
    if alpha.shape[-1] > 1:
        side = torch.diag_embed(alpha[..., 1:] * beta[..., :-1], 1)
        gram = gram + side + side.mT
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()


def _forward(taps: Taps, phase: Tensor, v: Tensor) -> Tensor:
    """F(ω) v at every frequency: one real product with all taps, then the phases."""
    count, out = taps.matrices.shape[1:3]
    moved = (taps.matrices.flatten(1, 2) @ v.flatten(2)).unflatten(1, (count, out)).unflatten(-1, (-1, 2))
    return torch.view_as_real((torch.view_as_complex(moved) * phase[:, None]).sum(1))


def _adjoint(taps: Taps, phase: Tensor, u: Tensor) -> Tensor:
    """F(ω)ᴴ u at every frequency."""
    turned = torch.view_as_complex(u.contiguous())[:, None] * phase.conj()[:, None]
    pairs = torch.view_as_real(turned).flatten(1, 2).flatten(2)
    return (taps.matrices.flatten(1, 2).mT @ pairs).unflatten(-1, (-1, 2))
