"""Operator norms of convolutions: exact on periodic grids, and certified for every grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import cos, pi, prod, sqrt

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.precision import full_precision, whole, widen, widest
from gonio.geometry.spectra import singular_values
from gonio.geometry.symbol import Taps, frequencies, taps_of
from gonio.geometry.views import PLAIN, Layout

__all__ = ["conv_spectral_norm", "conv_spectral_norm_bound", "conv_spectral_norm_certificate"]

CHUNK_ENTRIES = 1 << 23  # complex128 entries of the symbol held at once: 128 MiB


def conv_spectral_norm(weight: Tensor, size: Sequence[int], *, layout: Layout = PLAIN) -> Tensor:
    r"""Exact operator norm of a convolution with circular padding on a grid.

    .. math::
        \lVert K \rVert = \max_{\omega \in \text{grid}} s_{\max}(F(\omega)), \; F(\omega) = \sum_t W_t e^{-i \omega t}

    computed in float64 from the blocks of the half of the frequencies that determines the rest. Groups
    are independent blocks, hence their maximum. A stride is folded into channels, so strided and transposed
    convolutions are exact too; dilation moves taps apart. The layer's own amount of padding plays no part:
    circular padding is a shift of the periodic output.

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
    taps = _double_taps(weight, layout)
    omega = frequencies(grid_of(size, layout, weight), taps.matrices)
    small = taps.smaller_side()
    with torch.no_grad(), full_precision(weight):
        search = Taps(small.matrices.detach(), small.positions)
        tops = torch.cat([_top_squares(search.symbol(part)) for part in chunks(search, omega)], -1)
        group, index = divmod(int(tops.flatten().argmax()), len(omega))
    with full_precision(weight):
        return _value_at(small, group, omega[index : index + 1]).to(widen(weight).dtype)


def _double_taps(weight: Tensor, layout: Layout) -> Taps:
    weight = whole(weight)
    check_finite(weight)
    return taps_of(weight.to(widest(weight)), layout)


def check_finite(weight: Tensor) -> None:
    """Raise for NaN and infinity, which have no norm."""
    if not bool(torch.isfinite(weight).all()):
        raise InvalidArgumentError(
            "the norm of a convolution needs finite entries", "NaN or infinity", "Find out which step made them."
        )


def grid_of(size: Sequence[int], layout: Layout, weight: Tensor) -> tuple[int, ...]:
    """The polyphase grid: `size` divided by the stride."""
    stride = layout.stride or (1,) * (weight.ndim - 2)
    if len(size) != len(stride) or any(n < 1 or n % s for n, s in zip(size, stride, strict=False)):
        raise InvalidArgumentError(
            f"the grid needs one size per kernel dimension, each a multiple of the stride {tuple(stride)}",
            f"{tuple(size)} for a weight of shape {tuple(weight.shape)}",
            "Choose for example the layer's input size, rounded up to a multiple.",
        )
    return tuple(n // s for n, s in zip(size, stride, strict=True))


def chunks(taps: Taps, omega: Tensor) -> Iterator[Tensor]:
    """Parts of the frequencies whose symbols fit into memory together."""
    groups, _, out, in_ = taps.matrices.shape
    return iter(omega.split(max(1, CHUNK_ENTRIES // max(1, groups * out * in_))))


def _top_squares(symbol: Tensor) -> Tensor:
    """Largest squared singular value of each (small-side) block."""
    return torch.linalg.eigvalsh(symbol @ symbol.mH)[..., -1]


def _value_at(taps: Taps, group: int, omega: Tensor) -> Tensor:
    """s_max(F(ω)) of one group at one frequency, differentiable as Re(uᴴ F v)."""
    symbol = Taps(taps.matrices[group : group + 1], taps.positions).symbol(omega)[0, 0]
    with torch.no_grad():
        u, _, vh = torch.linalg.svd(symbol, full_matrices=False)
    return (u[:, 0].conj() @ (symbol @ vh[0].conj())).real


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
    taps = _double_taps(weight, layout).smaller_side()
    every = _safe_grid(taps.reach)
    grid = every if size is None else grid_of(size, layout, weight)
    raised = 1.0 if size is not None else prod(cos(pi * r / n) for r, n in zip(taps.reach, grid, strict=True)) ** -0.5
    omega = frequencies(grid, taps.matrices)
    with full_precision(weight):
        bounds = [_gram_bound(taps.symbol(part), iterations).amax() for part in chunks(taps, omega)]
        return _rounded_up(torch.stack(bounds).amax() * raised, widen(weight).dtype)


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
    taps = _double_taps(weight, layout)
    matrices = taps.matrices
    with full_precision(weight):
        kernel = _dense_kernel(taps)
        tops = [singular_values(m)[..., 0].amax() for m in _flattenings(kernel)]
        bound = torch.stack(tops).amin() * sqrt(matrices.shape[1])
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
