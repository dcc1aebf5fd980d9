"""Orthogonal initialisation of matrices and of convolutions, per group, uniform in the Haar measure."""

from __future__ import annotations

from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import computed_in, widest
from gonio.geometry.views import PLAIN, Layout, View, unview, view_shape
from gonio.init.gain import Gain, resolve_gain
from gonio.init.variance import check_fillable, fans, fresh_generator, write_

# Note [Stewart's method]
# Uniform orthonormal columns without a QR decomposition: in the QR of a Gaussian matrix the reflected trailing
# columns are again Gaussian and independent, so reflector j can be built from new numbers x ~ N(0, I_{n−j}). Then
#     Q = H_1 H_2 … H_m · diag(−sign x_jj),
# restricted to m columns, is uniform on the Stiefel manifold (the signs make the diagonal of R positive).
# A block of b reflectors is I − V T Vᵀ with T⁻¹ = triu(VᵀV, 1) + diag(|v|²/2) (compact WY), so that all
# of the work is matrix products: 4/3 n³ operations against 8/3 n³ and a serial panel in QR + unpacking.
# R. Schreiber, C. Van Loan, "A storage-efficient WY representation for products of Householder transformations",
# SIAM J. Sci. Stat. Comput. 10(1), 1989.
BLOCK = 64


def orthogonal_(
    weight: Tensor,
    *,
    gain: Gain = 1.0,
    preserve: Literal["norm", "rms"] | None = None,
    view: View = "filters",
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Fill each matrix of `weight` with `gain` times a uniformly random (Haar) semi-orthogonal matrix.

    The rows of an :math:`n \times d` matrix are orthonormal if :math:`n \le d`, else its columns; all singular values
    equal `gain`. Every group of a grouped convolution and every block of a stacked weight is a matrix of its own, so
    each filter of a depthwise convolution has norm `gain`.

    Args:
        preserve: ``None`` sets the singular values to `gain`. ``"norm"`` or ``"rms"`` rescale the matrix so that the
            layer with its stride preserves the norm of random input, or the variance of each entry (times `gain`). The
            three agree for square matrices of stride 1.
        view: see :func:`gonio.geometry.matrix_view`.
        weight, gain, layout, generator: as those of :func:`variance_scaling_`.

    Raises:
        InvalidArgumentError: for meta, empty or non-floating tensors, or fewer than 2 dimensions.
        UnknownNameError: for an unknown activation name.

    Example:
        >>> weight = gonio.init.orthogonal_(torch.empty(3, 8), gain=2.0, generator=gonio.seeding.generator(0))
        >>> torch.allclose(weight @ weight.T, 4 * torch.eye(3), atol=1e-5)
        True

    References: [1] A. Saxe, J. McClelland, S. Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep
        linear neural networks", 2013. https://arxiv.org/abs/1312.6120. [2] G. W. Stewart, "The efficient generation of
        random orthogonal matrices with an application to condition estimators", SIAM J. Numer. Anal. 17(3), 1980, §3.
    Differs: ``torch.nn.init.orthogonal_`` treats a grouped convolution as one matrix, so depthwise 3×3 filters get a
        norm far below 1; takes the input channels of transposed convolutions for filters; raises for half precision on
        CPU.
    """
    check_fillable(weight, "orthogonal_")
    matrices, rows, cols = view_shape(weight.shape, layout, view=view)
    if preserve not in (None, "norm", "rms"):
        raise InvalidArgumentError(
            "orthogonal_() takes preserve=None, 'norm' or 'rms'", f"{preserve!r}", "Choose one of them."
        )
    small, large = sorted((rows, cols))
    scale, tall = resolve_gain(gain), rows >= cols
    if preserve is not None:  # the mean squared entry of a semi-orthogonal matrix is 1/large
        fan = fans(weight.shape, layout)
        scale *= sqrt(large / (fan.fan_out if preserve == "norm" else fan.fan_in))
    q = haar_columns(matrices, large, small, fresh_generator(generator), computed_in(weight.dtype), by_rows=tall)
    return write_(weight, unview((q if tall else q.mT).mul_(scale), weight.shape, layout, view=view))


def delta_orthogonal_(
    weight: Tensor, *, gain: Gain = 1.0, layout: Layout = PLAIN, generator: torch.Generator | None = None
) -> Tensor:
    r"""Make the convolution as a map on feature maps an isometry times `gain`.

    The centre tap of each group is a random matrix with orthonormal columns and all other taps are zero, so
    :math:`\lVert Kx \rVert = g \lVert x \rVert` for every input, at stride 1 with "same" padding. Even kernels use the
    tap before the middle. Arguments are those of :func:`orthogonal_`.

    Raises: InvalidArgumentError for fewer output than input channels per group (no isometry exists), for a weight
        without kernel dimensions, and for meta, empty or non-floating tensors.

    Example:
        >>> conv = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        >>> _ = gonio.init.delta_orthogonal_(conv.weight, generator=gonio.seeding.generator(0))
        >>> x = torch.ones(1, 3, 4, 4)
        >>> torch.allclose(conv(x).norm(), x.norm())
        True

    References: [1] L. Xiao et al., "Dynamical isometry and a mean field theory of CNNs: how to train 10,000-layer
        vanilla convolutional neural networks", 2018, Algorithm 1 and §2.4. https://arxiv.org/abs/1806.05393
    """
    check_fillable(weight, "delta_orthogonal_")
    _, rows, cols = view_shape(weight.shape, layout, view="taps")
    if weight.ndim < 3:
        raise InvalidArgumentError(
            "delta_orthogonal_() needs a convolution's weight", f"shape {tuple(weight.shape)}", "Use orthogonal_()."
        )
    if rows < cols:
        raise InvalidArgumentError(
            "delta_orthogonal_() preserves the norm of every input, which needs at least as many outputs as inputs",
            f"{rows} outputs for {cols} inputs per group",
            "Use orthogonal_(), or widen the layer.",
        )
    kernel, centre = weight.shape[2:], 0
    for size in kernel:
        centre = centre * size + (size - 1) // 2
    q = haar_columns(layout.matrices, rows, cols, fresh_generator(generator), computed_in(weight.dtype))
    taps = q.new_zeros(layout.matrices, prod(kernel), rows, cols)
    taps[:, centre] = q * resolve_gain(gain)
    return write_(weight, unview(taps.flatten(0, 1), weight.shape, layout, view="taps"))


# --- uniform orthonormal columns ------------------------------------------------------------------


def haar_columns(
    batch: int, n: int, m: int, generator: torch.Generator, dtype: torch.dtype, *, by_rows: bool = True
) -> Tensor:
    """A (batch, n, m) stack of independent, uniform matrices with QᵀQ = I, m ≤ n, stored by rows or by columns."""
    shape = (batch, n, m) if by_rows else (batch, m, n)
    q = torch.zeros(shape, dtype=dtype, device=generator.device)
    q = q if by_rows else q.mT
    for start in reversed(range(0, m, BLOCK)):  # the last block first: it touches the smallest corner
        width = min(BLOCK, m - start)
        v, signs = _reflectors(batch, n - start, width, generator, dtype)
        q[:, start : start + width, start : start + width] = torch.diag_embed(signs)
        corner = q[:, start:, start:]
        if batch == 1:  # products of single matrices read and write parts of q in place
            _apply_block_(corner[0], v[0])
        else:
            _apply_block_(corner, v)
    return q


def _reflectors(
    batch: int, n: int, width: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Householder vectors (batch, n, width), lower trapezoidal, each contiguous, and the signs −sign x_jj."""
    x = torch.randn(batch, width, n, generator=generator, dtype=dtype, device=generator.device).triu_().mT
    pivot = x.diagonal(dim1=-2, dim2=-1)
    # Norms in float64: float32 ones raise |QᵀQ − I| from 4e-7 to 8e-6 at n = 4096.
    norm = torch.linalg.vector_norm(x, dim=-2, dtype=widest(x)).to(dtype)
    sign = torch.where(pivot < 0, -1.0, 1.0).to(dtype)
    pivot += sign * norm
    return x, -sign


def _apply_block_(corner: Tensor, v: Tensor) -> None:
    """corner ← (I − V T Vᵀ) corner."""
    gram = v.mT @ v
    half = torch.linalg.vector_norm(v, dim=-2, dtype=widest(v)).square().div(2).to(v.dtype)
    t_inverse = gram.triu(1) + torch.diag_embed(half)
    update = torch.linalg.solve_triangular(t_inverse, v.mT @ corner, upper=True)
    if corner.ndim == 2:
        corner.addmm_(v, update, alpha=-1)
    else:
        corner.baddbmm_(v, update, alpha=-1)
