"""Operator norms of convolutions: exact on periodic grids, and certified for every grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import cos, isfinite, isqrt, pi, prod, sqrt

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.precision import full_precision, whole, widen, widest
from gonio.geometry.spectra import singular_values
from gonio.geometry.symbol import Taps, frequencies, taps_of
from gonio.geometry.views import PLAIN, Layout

__all__ = ["conv_spectral_norm", "conv_spectral_norm_bound", "conv_spectral_norm_certificate"]

CHUNK_ENTRIES = 1 << 23  # complex entries of the symbol held at once: 128 MiB in double precision
MARGIN = 1e-4  # of a squared norm: what float32 may not decide, fifty times its error at 512 channels

# Note [Ruling out]
# s_max(F) < t exactly if t²I − FFᴴ has a Cholesky factor, which costs a third of the singular values. So norms
# are computed at a few frequencies spread over the grid, and elsewhere only where the factorisation fails
# at the largest norm found so far: about √N of N frequencies. All of that is done in float32, with a
# margin; what it cannot tell from the largest is computed in float64.


def conv_spectral_norm(weight: Tensor, size: Sequence[int], *, layout: Layout = PLAIN) -> Tensor:
    r"""Exact operator norm of a convolution with circular padding on a grid.

    .. math::
        \lVert K \rVert = \max_{\omega \in \text{grid}} s_{\max}(F(\omega)), \; F(\omega) = \sum_t W_t e^{-i \omega t}

    the largest norm of the blocks of the half of the frequencies that determines the rest, in float64; other
    frequencies are ruled out one by one in float32. Groups are independent blocks, hence their maximum. A
    stride is folded into channels, so strided and transposed convolutions are exact too; dilation moves
    taps apart. The layer's own amount of padding plays no part: circular padding is a shift of the
    periodic output.

    With zero padding the norm on the same grid is at most the supremum over all :math:`\omega`, which a
    periodic grid approaches from below; :func:`conv_spectral_norm_bound` bounds that.

    Args:
        weight: of a convolution or transposed convolution.
        size: the grid of the fine side: the input of a convolution, the output of a transposed one. One
            number per kernel dimension, divisible by the stride.
        layout: how the weight is stored and applied; see :func:`layout_of`.

    Returns:
        A scalar in float32 at least. The gradient is that of the top singular value at the top frequency.

    Raises:
        InvalidArgumentError: if `size` does not fit kernel and stride, the padding mode repeats pixels, or the
            weight is not a convolution's or not finite.

    Example:
        >>> ones = torch.ones(1, 1, 3, 3)  # a box filter: 9 at frequency 0, not the 3 of its flattened norm
        >>> gonio.geometry.conv_spectral_norm(ones, (8, 8))
        tensor(9.)

    References:
        [1] H. Sedghi, V. Gupta, P. Long, "The singular values of convolutional layers", 2018, Theorem 6.
        https://arxiv.org/abs/1805.10408
    """
    taps, scale = _double_taps(weight, layout)
    small = taps.smaller_side()
    omega = frequencies(grid_of(size, layout, weight, taps.reach), taps.matrices)
    with full_precision(weight):
        with torch.no_grad():
            detached = Taps(small.matrices.detach(), small.positions)
            group, index = _leader(detached, omega)
        return (_value_at(small, group, omega[index : index + 1]) * scale).to(widen(weight).dtype)


def _double_taps(weight: Tensor, layout: Layout) -> tuple[Taps, float]:
    """The taps of the weight divided by its largest entry, in float64, and that entry."""
    weight = whole(weight)
    scale = largest_entry(weight)
    return taps_of(weight.to(widest(weight)) / scale, layout), scale


def largest_entry(weight: Tensor) -> float:
    """Largest absolute entry, 1 if all are 0; raises for what has no norm."""
    if weight.numel() == 0:
        raise InvalidArgumentError(
            "the norm of a convolution needs a weight with entries", f"shape {tuple(weight.shape)}", "Leave it out."
        )
    top = float(weight.detach().abs().amax())
    if not isfinite(top):
        raise InvalidArgumentError(
            "the norm of a convolution needs finite entries", "NaN or infinity", "Find out which step made them."
        )
    return top or 1.0


def grid_of(size: Sequence[int], layout: Layout, weight: Tensor, reach: Sequence[int]) -> tuple[int, ...]:
    """The polyphase grid: `size` divided by the stride, and 1 where the symbol does not vary."""
    stride = layout.stride or (1,) * (weight.ndim - 2)
    if len(size) != len(stride) or any(n < 1 or n % s for n, s in zip(size, stride, strict=False)):
        raise InvalidArgumentError(
            f"the grid needs one size per kernel dimension, each a multiple of the stride {tuple(stride)}",
            f"{tuple(size)} for a weight of shape {tuple(weight.shape)}",
            "Choose for example the layer's input size, rounded up to a multiple.",
        )
    return tuple(n // s if r else 1 for n, s, r in zip(size, stride, reach, strict=True))


def chunks(taps: Taps, omega: Tensor) -> Iterator[Tensor]:
    """Parts of the frequencies whose symbols fit into memory together."""
    groups, _, out, in_ = taps.matrices.shape
    return iter(omega.split(max(1, CHUNK_ENTRIES // max(1, groups * out * in_))))


def _leader(taps: Taps, omega: Tensor) -> tuple[int, int]:
    """Group and frequency of the largest norm; see Note [Ruling out]."""
    single = Taps(taps.matrices.float(), taps.positions)
    level, squares = 0.0, []
    for part in chunks(single, omega.float()):
        grams = _grams(single, part)
        found = torch.zeros(grams.shape[:2], device=grams.device)
        level = _fill_squares_(found, grams, level)
        squares.append(found)
    close = torch.cat(squares, -1) >= level * (1 - MARGIN)
    best, group, index = -1.0, 0, 0
    for g in close.any(-1).nonzero().squeeze(-1).tolist():
        members = close[g].nonzero().squeeze(-1)
        tops = torch.cat([_tops(_grams(taps.group(g), part))[0] for part in chunks(taps.group(g), omega[members])])
        if float(tops.amax()) > best:
            best, group, index = float(tops.amax()), g, int(members[tops.argmax()])
    return group, index


def _grams(taps: Taps, omega: Tensor) -> Tensor:
    symbol = taps.symbol(omega)
    return symbol @ symbol.mH


def _tops(grams: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(grams)[..., -1]


def _fill_squares_(found: Tensor, grams: Tensor, level: float) -> float:
    """Write the squared norms of those (groups, frequencies) blocks that may exceed `level`; the new level."""
    found, grams = found.view(-1), grams.flatten(0, 1)
    spread = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    spread[:: max(1, isqrt(len(found)))] = True
    found[spread] = _tops(grams[spread])
    level = max(level, float(found.amax()))
    rest = (~spread).nonzero().squeeze(-1)
    slack = grams[rest].neg_()
    slack.diagonal(dim1=-2, dim2=-1).add_(level * (1 - MARGIN))
    above = rest[torch.linalg.cholesky_ex(slack).info > 0]
    found[above] = _tops(grams[above])
    return max(level, float(found.amax()))


def _value_at(taps: Taps, group: int, omega: Tensor) -> Tensor:
    """s_max(F(ω)) of one group at one frequency, differentiable as Re(uᴴ F v)."""
    symbol = taps.group(group).symbol(omega)[0, 0]
    with torch.no_grad():
        u = torch.linalg.eigh(symbol @ symbol.mH)[1][:, -1]
        v = symbol.mH @ u
        v = v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny)
    return (u.conj() @ (symbol @ v)).real


def conv_spectral_norm_bound(
    weight: Tensor, *, size: Sequence[int] | None = None, iterations: int = 6, layout: Layout = PLAIN
) -> Tensor:
    r"""Upper bound of the operator norm by Gram iteration in the frequency domain.

    Per frequency, :math:`G_0 = F F^H`, :math:`G_{i+1} = G_i G_i^H` and

    .. math:: s_{\max}(F) \le \lVert G_i \rVert_F^{\,2^{-(i+1)}},

    which falls monotonically to the norm; it is at most :math:`\operatorname{rank}^{2^{-(i+2)}}` times
    too large. With `size` it bounds the circular operator on that grid. Without, it bounds the
    supremum over all frequencies, hence zero and circular padding on *every* grid: the symbol is sampled on a
    grid of :math:`N` points per dimension and the bound raised by
    :math:`\prod_j \cos(\pi r_j / N_j)^{-1/2}` for kernels of reach :math:`r_j` [2].

    Args:
        weight: of a convolution or transposed convolution.
        size: the grid of the fine side (see :func:`conv_spectral_norm`), or None for every grid.
        iterations: squarings; 6 leave at most 3 % for 64 channels.
        layout: how the weight is stored and applied.

    Returns:
        A scalar in float32 at least, rounded up; differentiable, without eigenvectors.

    Raises:
        InvalidArgumentError: as :func:`conv_spectral_norm`, and for `iterations` below 0.

    Example:
        >>> ones = torch.ones(1, 1, 3, 3)
        >>> bool(9 <= gonio.geometry.conv_spectral_norm_bound(ones) < 9.1)
        True

    References:
        [1] B. Delattre et al., "Efficient bound of Lipschitz constant for convolutional layers by Gram
        iteration", 2023, Theorem 1. https://arxiv.org/abs/2305.16173
        [2] H. Ehlich, K. Zeller, "Schwankung von Polynomen zwischen Gitterpunkten", Math. Z. 86, 1964:
        a trigonometric polynomial of degree r is at most 1/cos(πr/N) times its maximum on N points.

    Differs:
        The factor for frequencies between grid points is that of [2], which is smaller than that of [1].
    """
    if iterations < 0:
        raise InvalidArgumentError("Gram iteration needs iterations >= 0", f"{iterations}", "Use about 6.")
    taps, scale = _double_taps(weight, layout)
    taps = taps.smaller_side()
    grid = _safe_grid(taps.reach) if size is None else grid_of(size, layout, weight, taps.reach)
    raised = 1.0 if size is not None else prod(cos(pi * r / n) for r, n in zip(taps.reach, grid, strict=True)) ** -0.5
    omega = frequencies(grid, taps.matrices)
    with full_precision(weight):
        bounds = [_gram_bound(taps.symbol(part), iterations).amax() for part in chunks(taps, omega)]
        return _rounded_up(torch.stack(bounds).amax() * raised * scale, widen(weight).dtype)


def _safe_grid(reach: Sequence[int]) -> tuple[int, ...]:
    """Enough points that what lies between them adds under 1 % per dimension; 1 where nothing varies."""
    return tuple(1 if r == 0 else max(16, 24 * r) for r in reach)


def _gram_bound(symbol: Tensor, iterations: int) -> Tensor:
    """‖G_i‖_F^(2^−(i+1)) per block, with the scale kept apart so that squaring neither over- nor underflows."""
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
    return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def _rounded_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Allow for rounding in what led to `value`, and for rounding to `dtype`."""
    return (value * (1 + 1e-12 + 2 * torch.finfo(dtype).eps)).to(dtype)


def conv_spectral_norm_certificate(weight: Tensor, *, layout: Layout = PLAIN) -> Tensor:
    r"""Cheapest upper bound for every grid: :math:`\sqrt{k_h k_w}` times the norm of a flattened kernel.

    :math:`F(\omega) = M (I \otimes e(\omega))` with :math:`M` the out × (in · taps) matrix and
    :math:`\lVert e(\omega) \rVert^2` the number of taps. Each kernel dimension may be flattened to the side
    of the rows or of the columns, and the least of all these bounds is returned. It is attained by constant
    kernels, and needs no grid and no Fourier transform.

    Holds for zero and circular padding, any dilation, groups (maximum) and strides (then only
    :math:`\lceil k/s \rceil` taps per dimension count).

    Args:
        weight: of a convolution or transposed convolution.
        layout: how the weight is stored and applied.

    Returns:
        A scalar in float32 at least, rounded up; differentiable almost everywhere.

    Example:
        >>> bound = gonio.geometry.conv_spectral_norm_certificate(torch.ones(1, 1, 3, 3))
        >>> round(bound.item(), 4)
        9.0

    References:
        [1] S. Singla, S. Feizi, "Fantastic four: differentiable bounds on singular values of convolution
        layers", 2019, Theorem 2. https://arxiv.org/abs/1911.10258
    """
    taps, scale = _double_taps(weight, layout)
    with full_precision(weight):
        kernel = _dense_kernel(taps)
        tops = [singular_values(m)[..., 0].amax() for m in _flattenings(kernel)]
        bound = torch.stack(tops).amin() * sqrt(taps.matrices.shape[1]) * scale
        return _rounded_up(bound, widen(weight).dtype)


def _dense_kernel(taps: Taps) -> Tensor:
    """(groups, out, in, *kernel) of the distinct tap positions; dilation dropped, which no bound feels."""
    axes = [taps.positions[:, j].unique(return_inverse=True) for j in range(taps.positions.shape[1])]
    shape = [len(values) for values, _ in axes]
    flat = axes[0][1]
    for j in range(1, len(axes)):
        flat = flat * shape[j] + axes[j][1]
    order = flat.argsort()  # taps form a full box, so this is a permutation
    return taps.matrices[:, order].movedim(1, -1).unflatten(-1, shape)


def _flattenings(kernel: Tensor) -> Iterator[Tensor]:
    """Each way to send kernel dimensions to the rows (with out) or to the columns (with in)."""
    dims = range(3, kernel.ndim)
    for count in range(len(dims) + 1):
        for rows in combinations(dims, count):
            columns = [d for d in dims if d not in rows]
            arranged = kernel.permute(0, 1, *rows, 2, *columns)
            yield arranged.flatten(1, 1 + len(rows)).flatten(2)
