"""Operator norms of convolutions: exact or estimated on a periodic grid, and bounds for every grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import cos, isfinite, isqrt, pi, prod, sqrt

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.conv_operator import Taps, frequencies, half_grid, polyphase_grid, radians, taps_of
from gonio.geometry.lanczos import Krylov
from gonio.geometry.norms import Array, as_real, full_precision, normalize, safe_norm, whole, widen, widest
from gonio.geometry.spectra import singular_values
from gonio.geometry.views import PLAIN, Layout
from gonio.seeding import normal

# Note [Ruling out frequencies]
# s_max(F) < t exactly if t²I − FFᴴ has a Cholesky factor, which costs a third of the singular values. So norms are
# computed at a few frequencies spread over the grid, and elsewhere only where the factorisation fails at the largest
# norm found so far: about √N of N frequencies. Those within a margin of the largest are compared in float64.
CHUNK_ENTRIES = 1 << 23  # complex entries of the symbol held at once: 128 MiB in double precision
MARGIN = 1e-4  # of a squared norm; fifty times the error of float32 at 512 channels

# Note [Successive elimination]
# conv_spectral_norm_estimate: one Lanczos step at every frequency is two real matrix products with the taps, so the
# symbol is never formed. After each round only the frequencies with the largest values continue, until the top one
# has converged. Large grids are sampled coarsely first: the symbol is a trigonometric polynomial of low degree, which
# cannot hide a peak between points that close; then the gaps around the leading frequencies are filled in.
COARSE = 32  # points per period of the coarse grid
# Fewer steps in the first round lose the top frequency: 6 did in 3 % of 265 Gaussian kernels of 64 to 256
# channels, by up to 6e-3, if 24 frequencies continued; 8 and more did in none.
ROUGH, SHARE = 8, 4  # steps after which one frequency in so many continues
FIRST, SECOND = (12, 24), (24, 4)  # (steps since the start, frequencies kept)
MORE, MOST = 8, 160  # steps between looks at the residual, and in all
# Residual, as a share of the squared value, at which the top value has converged. Its square, over the gap to the
# next value, is the error; half of it bounds the distance to some singular value.
RESIDUAL = 2e-5
STEP_ENTRIES = 1 << 22  # of the vectors at the frequencies treated at once
SMALL = 1 << 26  # frequencies times channels cubed, up to which conv_spectral_norm takes less time


def conv_spectral_norm(weight: Array, size: Sequence[int], *, layout: Layout = PLAIN) -> Tensor:
    r"""Exact operator norm of a convolution with circular padding on a grid.

    .. math::
        \lVert K \rVert = \max_{\omega \in \text{grid}} s_{\max}(F(\omega)), \; F(\omega) = \sum_t W_t e^{-i \omega t}

    Computed in float64; the maximum over groups; exact for strided, transposed and dilated convolutions too. With zero
    padding the norm on the same grid is at most the supremum over all :math:`\omega`, which a periodic grid approaches
    from below and :func:`conv_spectral_norm_bound` bounds.

    Args:
        weight: of a convolution or transposed convolution.
        size: the grid of the larger side: the input of a convolution, the output of a transposed one. One number per
            kernel dimension, divisible by the stride.
        layout: how the weight is stored and applied; see :func:`layout_of`.

    Returns: A scalar in float32 at least, with the gradient of the top singular value at the top frequency.
    Raises: InvalidArgumentError if `size` does not fit kernel and stride, for reflected or replicated padding, and if
        the weight is not that of a convolution or not finite.

    Example:
        >>> gonio.geometry.conv_spectral_norm(torch.ones(1, 1, 3, 3), (8, 8))  # not the 3 of its flattened norm
        tensor(9.)

    References: [1] H. Sedghi, V. Gupta, P. Long, "The singular values of convolutional layers", 2018, Theorem 6.
        https://arxiv.org/abs/1805.10408
    """
    weight = as_real(weight)
    taps, scale = _double_taps(weight, layout)
    small = taps.smaller_side()
    omega = frequencies(polyphase_grid(size, layout, weight, taps.reach), taps.matrices)
    with full_precision(weight):
        with torch.no_grad():
            detached = Taps(small.matrices.detach(), small.positions)
            group, index = _leader(detached, omega)
        return (_value_at(small, group, omega[index : index + 1]) * scale).to(widen(weight).dtype)


def _double_taps(weight: Tensor, layout: Layout) -> tuple[Taps, float]:
    """The taps of the weight divided by its largest entry, in float64; and this entry."""
    weight = whole(weight)
    scale = _largest_entry(weight)
    return taps_of(weight.to(widest(weight)) / scale, layout), scale


def _largest_entry(weight: Tensor) -> float:
    """Largest absolute entry, 1 if all are 0; raises for an empty or non-finite weight."""
    if weight.numel() == 0:
        raise InvalidArgumentError(
            "the norm of a convolution needs a weight with entries", f"shape {tuple(weight.shape)}", "Leave it out."
        )
    top = float(weight.detach().abs().amax())
    if not isfinite(top):
        raise InvalidArgumentError(
            "the norm of a convolution needs finite entries",
            "NaN or infinity",
            "Find the training step that produced them.",
        )
    return top or 1.0


def _symbols(taps: Taps, omega: Tensor) -> Iterator[Tensor]:
    """F(ω) at the frequencies, in parts that fit into memory, (groups, frequencies, out, in)."""
    groups, _, out, in_ = taps.matrices.shape
    return (taps.symbol(part) for part in omega.split(max(1, CHUNK_ENTRIES // max(1, groups * out * in_))))


def _squares(symbol: Tensor, level: float) -> Tensor:
    """s_max(F)², (groups, frequencies); blocks whose value is certainly below `level` may be left 0."""
    grams = (symbol @ symbol.mH).flatten(0, 1)
    found = grams.new_zeros(len(grams), dtype=grams.real.dtype)
    spread = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    spread[:: max(1, isqrt(len(found)))] = True
    found[spread] = torch.linalg.eigvalsh(grams[spread])[:, -1]
    rest = (~spread).nonzero().squeeze(-1)
    slack = grams[rest].neg_()
    slack.diagonal(dim1=-2, dim2=-1).add_(max(level, float(found.amax())) * (1 - MARGIN))
    above = rest[torch.linalg.cholesky_ex(slack).info > 0]
    found[above] = torch.linalg.eigvalsh(grams[above])[:, -1]
    return found.view(symbol.shape[:2])


def _leader(taps: Taps, omega: Tensor) -> tuple[int, int]:
    """Group and frequency of the largest norm; see Note [Ruling out frequencies]."""
    level, squares = 0.0, []
    for symbol in _symbols(Taps(taps.matrices.float(), taps.positions), omega.float()):
        squares.append(_squares(symbol, level))
        level = max(level, float(squares[-1].amax()))
    close = torch.cat(squares, -1) >= level * (1 - MARGIN)
    best, group, index = -1.0, 0, 0
    for g in close.any(-1).nonzero().squeeze(-1).tolist():
        members = close[g].nonzero().squeeze(-1)
        tops = torch.cat([torch.linalg.eigvalsh(f @ f.mH)[0, :, -1] for f in _symbols(taps.group(g), omega[members])])
        if float(tops.amax()) > best:
            best, group, index = float(tops.amax()), g, int(members[tops.argmax()])
    return group, index


def _value_at(taps: Taps, group: int, omega: Tensor) -> Tensor:
    """s_max(F(ω)) of one group at one frequency, differentiable as Re(uᴴ F v)."""
    symbol = taps.group(group).symbol(omega)[0, 0]
    with torch.no_grad():
        u = torch.linalg.eigh(symbol @ symbol.mH)[1][:, -1]
        v = symbol.mH @ u
        v = v / torch.linalg.vector_norm(v).clamp(min=torch.finfo(v.dtype).tiny)
    return (u.conj() @ (symbol @ v)).real


def conv_spectral_norm_bound(
    weight: Array, *, size: Sequence[int] | None = None, iterations: int = 6, layout: Layout = PLAIN
) -> Tensor:
    r"""Upper bound of the operator norm by Gram iteration in the frequency domain.

    Per frequency, :math:`G_0 = F F^H`, :math:`G_{i+1} = G_i G_i^H` and

    .. math:: s_{\max}(F) \le \lVert G_i \rVert_F^{\,2^{-(i+1)}},

    which exceeds the norm by at most a factor of :math:`\operatorname{rank}^{2^{-(i+2)}}`: 1.7 % for 64 channels and 6
    `iterations`. With `size` it bounds the circular operator on that grid. Without, it bounds the supremum over all
    frequencies, hence zero and circular padding on *every* grid: the symbol is sampled on a grid of :math:`N` points
    per dimension and the bound multiplied by :math:`\prod_j \cos(\pi r_j / N_j)^{-1/2}` for kernels of degree
    :math:`r_j` [2]. Other arguments are those of :func:`conv_spectral_norm`.

    Returns: A scalar in float32 at least, rounded up; differentiable, without eigenvectors.
    Raises: InvalidArgumentError as :func:`conv_spectral_norm`, and for `iterations` below 0.

    Example:
        >>> bool(9 <= gonio.geometry.conv_spectral_norm_bound(torch.ones(1, 1, 3, 3)) < 9.1)
        True

    References:
        [1] B. Delattre et al., "Efficient bound of Lipschitz constant for convolutional layers by Gram iteration",
        2023, Theorem 1. https://arxiv.org/abs/2305.16173
        [2] H. Ehlich, K. Zeller, "Schwankung von Polynomen zwischen Gitterpunkten", Math. Z. 86, 1964: a trigonometric
        polynomial of degree r is at most 1/cos(πr/N) times its maximum on N points.

    Differs: The factor for frequencies between grid points is that of [2], which is smaller than that of [1].
    """
    if iterations < 0:
        raise InvalidArgumentError("conv_spectral_norm_bound() needs iterations >= 0", f"{iterations}", "Use about 6.")
    weight = as_real(weight)
    taps, scale = _double_taps(weight, layout)
    taps = taps.smaller_side()
    if size is None:  # enough points that the factor is below 1.01 per dimension; 1 where the symbol is constant
        grid: tuple[int, ...] = tuple(1 if r == 0 else max(16, 24 * r) for r in taps.reach)
        raised = prod(cos(pi * r / n) for r, n in zip(taps.reach, grid, strict=True)) ** -0.5
    else:
        grid, raised = polyphase_grid(size, layout, weight, taps.reach), 1.0
    omega = frequencies(grid, taps.matrices)
    with full_precision(weight):
        bounds = [_gram_bound(symbol, iterations).amax() for symbol in _symbols(taps, omega)]
        return _rounded_up(torch.stack(bounds).amax() * raised * scale, widen(weight).dtype)


def _gram_bound(symbol: Tensor, iterations: int) -> Tensor:
    """‖G_i‖_F^(2^−(i+1)) per block; the scale is a separate factor so that squaring does not over- or underflow."""
    gram, power = symbol @ symbol.mH, 0.5
    log_scale = gram.real.new_zeros(gram.shape[:-2])
    for _ in range(iterations):
        size = _frobenius(gram)
        log_scale = log_scale + power * size.log()
        gram = gram / size[..., None, None]
        gram, power = gram @ gram.mH, power / 2
    return torch.exp(log_scale + power * _frobenius(gram).log())


def _frobenius(gram: Tensor) -> Tensor:
    """Frobenius norm, never below the smallest normal number (a zero kernel)."""
    square = (gram.real.square() + gram.imag.square()).sum((-2, -1))
    return square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


def _rounded_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` raised by the rounding of its computation and of the conversion to `dtype`."""
    return (value * (1 + 1e-12 + 2 * torch.finfo(dtype).eps)).to(dtype)


def conv_spectral_norm_certificate(weight: Array, *, layout: Layout = PLAIN) -> Tensor:
    r"""Cheapest upper bound for every grid: :math:`\sqrt{k_h k_w}` times the norm of a flattened kernel.

    :math:`F(\omega) = M (I \otimes e(\omega))` with :math:`M` the out × (in · taps) matrix and :math:`\lVert e(\omega)
    \rVert^2` the number of taps. Each kernel dimension may be flattened to the side of the rows or of the columns, and
    the smallest of these bounds is returned. Constant kernels attain it.

    Holds for zero and circular padding, any dilation, groups (maximum) and strides (then only
    :math:`\lceil k/s \rceil` taps per dimension count). Arguments as for :func:`conv_spectral_norm`.

    Returns: A scalar in float32 at least, rounded up; differentiable almost everywhere.

    Example:
        >>> round(gonio.geometry.conv_spectral_norm_certificate(torch.ones(1, 1, 3, 3)).item(), 4)
        9.0

    References: [1] S. Singla, S. Feizi, "Fantastic four: differentiable bounds on singular values of convolution
        layers", 2019, Theorem 2. https://arxiv.org/abs/1911.10258
    """
    weight = as_real(weight)
    taps, scale = _double_taps(weight, layout)
    shape = [len(places.unique()) for places in taps.positions.unbind(1)]  # taps form a full box, in order
    dims = range(3, 3 + len(shape))
    with full_precision(weight):
        kernel = taps.matrices.movedim(1, -1).unflatten(-1, shape)  # (groups, out, in, *kernel), without dilation
        tops = []
        for rows in chain.from_iterable(combinations(dims, count) for count in range(len(dims) + 1)):
            columns = [d for d in dims if d not in rows]
            flat = kernel.permute(0, 1, *rows, 2, *columns).flatten(1, 1 + len(rows)).flatten(2)
            tops.append(singular_values(flat)[..., 0].amax())
        bound = torch.stack(tops).amin() * sqrt(taps.matrices.shape[1]) * scale
        return _rounded_up(bound, widen(weight).dtype)


def conv_spectral_norm_estimate(weight: Array, size: Sequence[int], *, layout: Layout = PLAIN, seed: int = 0) -> Tensor:
    r"""Operator norm of a convolution with circular padding on a grid, as a tight lower bound.

    The quantity of :func:`conv_spectral_norm`, several times faster from 128 channels on: Lanczos steps at all
    frequencies at once, more of them where the norm is large. The result is within 1e-5 of a singular value, typically
    within 1e-9 of the largest; in hundreds of Gaussian kernels the frequency was always the top one. Small kernels and
    grids are computed by :func:`conv_spectral_norm`. For a guarantee use that, or :func:`conv_spectral_norm_bound`.

    Arguments and errors are those of :func:`conv_spectral_norm`; `seed` is that of the start vectors.

    Returns: A scalar in float32 at least, without gradient.

    Example:
        >>> round(gonio.geometry.conv_spectral_norm_estimate(torch.ones(1, 1, 3, 3), (8, 8)).item(), 4)
        9.0
    """
    weight = whole(as_real(weight).detach())
    scale = _largest_entry(weight)
    with torch.no_grad(), full_precision(weight):
        taps = taps_of(widen(weight) / scale, layout).smaller_side()
        taps = Taps(taps.matrices.contiguous(), taps.positions)  # read twice per step
        grid = polyphase_grid(size, layout, weight, taps.reach)
        if (prod(grid) // 2 + 1) * taps.matrices.shape[0] * taps.matrices.shape[2] ** 3 <= SMALL:
            return conv_spectral_norm(weight, size, layout=layout)
        gaps = [max(1, n // COARSE) for n in grid]
        walk = _leaders(taps, half_grid(grid, gaps), grid, seed)
        if max(gaps) > 1:
            walk = _leaders(taps, _with_neighbours(walk.points, gaps, grid), grid, seed)
        walk = walk.forward(SECOND[0]).best(SECOND[1])
        value, residual = walk.top()
        while walk.krylov.steps < MOST and residual > RESIDUAL:
            walk = walk.forward(walk.krylov.steps + MORE)
            value, residual = walk.top()
        return (value * scale).to(widen(weight).dtype)


def _with_neighbours(points: Tensor, gaps: Sequence[int], grid: Sequence[int]) -> Tensor:
    """The points and all points nearer to them than the next coarse point."""
    offsets = torch.cartesian_prod(*(torch.arange(1 - gap, gap, device="cpu") for gap in gaps)).reshape(-1, len(gaps))
    return torch.unique((points[:, None] + offsets).flatten(0, 1) % torch.tensor(grid, device="cpu"), dim=0)


def _leaders(taps: Taps, points: Tensor, grid: Sequence[int], seed: int) -> _Walk:
    """The frequencies with the largest values after the first round, in parts that fit into memory."""
    groups, count, out, _ = taps.matrices.shape
    parts = points.split(max(1, STEP_ENTRIES // (groups * count * out)))
    starts = (_start(taps, part, grid, seed).forward(ROUGH) for part in parts)
    walks = [start.best(max(FIRST[1], len(start.points) // SHARE)) for start in starts]
    points, phase = torch.cat([w.points for w in walks]), torch.cat([w.phase for w in walks], 1)
    walk = _Walk(taps, points, phase, Krylov.combined([w.krylov for w in walks], lambda x: torch.cat(x, 2)))
    return walk.forward(FIRST[0]).best(FIRST[1])


@dataclass(frozen=True)
class _Walk:
    """The recurrence of F(ω)ᴴF(ω) at some frequencies, started from F(ω)ᴴ times a vector on the smaller side.

    Complex vectors are stored as pairs of reals in the last dimension: (groups, channels, frequencies, 2).
    """

    taps: Taps
    points: Tensor  # (frequencies, dims), integers
    phase: Tensor  # (taps, frequencies)
    krylov: Krylov

    def forward(self, steps: int) -> _Walk:
        """The recurrence after `steps` steps in all, at most one per dimension of the smaller side."""

        def times(v: Tensor) -> Tensor:
            return _adjoint(self.taps, self.phase, _forward(self.taps, self.phase, v))

        return replace(self, krylov=self.krylov.forward(times, min(steps, self.taps.matrices.shape[2])))

    def best(self, count: int) -> _Walk:
        """The recurrence at the `count` frequencies with the largest values over all groups."""
        if len(self.points) <= count:
            return self
        index = torch.linalg.eigvalsh(self.krylov.tridiagonal())[..., -1].amax(0).topk(count).indices
        krylov = Krylov.combined([self.krylov], lambda x: x[0][:, :, index])
        return replace(self, points=self.points[index.cpu()], phase=self.phase[:, index], krylov=krylov)

    def top(self) -> tuple[Tensor, float]:
        """‖F v‖ for the top unit vector v, in float64, which never exceeds the norm of F; and the residual of v.

        The residual is a share of the squared value; 0 if there are no more dimensions.
        """
        squares, vectors = torch.linalg.eigh(self.krylov.tridiagonal())
        group, index = divmod(int(squares[..., -1].argmax()), squares.shape[1])
        square, vector = squares[group, index, -1], vectors[group, index, :, -1]
        last = self.krylov.beside[-1][group, 0, index, 0].to(vector) * vector[-1].abs()
        complete = self.krylov.steps == self.taps.matrices.shape[2] or not float(square) > 0
        x = torch.stack([v[group, :, index] for v in self.krylov.basis[:-1]], -1).to(vector) @ vector  # (channels, 2)
        double = Taps(self.taps.group(group).matrices.to(vector), self.taps.positions)
        phase = self.phase[:, index : index + 1]
        phase = torch.polar(torch.ones_like(phase.real, dtype=vector.dtype), phase.angle().to(vector))
        value = safe_norm(_forward(double, phase, normalize(x, (0, 1))[None, :, None]), (0, 1, 2, 3))
        return value, 0.0 if complete else float(last / square)


def _start(taps: Taps, points: Tensor, grid: Sequence[int], seed: int) -> _Walk:
    groups, _, out, _ = taps.matrices.shape
    draw = normal((groups, out, 1, 2), seed, "conv", dtype=torch.float64)
    phase = taps.phases(radians(points, grid, taps.matrices))
    u = normalize(draw.to(taps.matrices).expand(-1, -1, len(points), -1), (1, 3))
    krylov = Krylov(basis=(normalize(_adjoint(taps, phase, u), (1, 3)),), dims=(1, 3), passes=0)
    return _Walk(taps, points, phase, krylov)


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
