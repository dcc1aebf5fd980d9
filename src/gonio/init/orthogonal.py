"""Orthogonal initialisation, per group, of matrices and of convolutions."""

from __future__ import annotations

from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout, View, matrix_view, unview
from gonio.init.draws import check_fillable, fresh_generator, working_dtype, write_
from gonio.init.fans import fans
from gonio.init.gain import Gain, resolve_gain
from gonio.init.haar import haar_columns

__all__ = ["delta_orthogonal_", "orthogonal_"]


def orthogonal_(
    weight: Tensor,
    *,
    gain: Gain = 1.0,
    preserve: Literal["norm", "rms"] | None = None,
    view: View = "filters",
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Fill each matrix of `weight` with `gain` times a uniformly random (Haar) semi-orthogonal one.

    Of an :math:`n \times d` matrix the rows are orthonormal if :math:`n \le d`, else the columns: all
    singular values equal `gain`. Every group of a grouped convolution and every block of a stacked weight is
    its own matrix, so the filters of a depthwise convolution have norm `gain` each.

    Args:
        weight: any real floating-point tensor of at least 2 dimensions; half precision is computed in
            float32 and rounded once; a DTensor keeps its sharding.
        gain: a number, or an activation (name or callable) whose rms gain is taken.
        preserve: ``None`` sets the singular values to `gain`. ``"norm"`` or ``"rms"`` rescale the matrix so
            that random input keeps its norm, or each entry its variance (times `gain`), through the layer
            with its stride. The three agree for square matrices of stride 1.
        view: which matrices; see :func:`gonio.geometry.matrix_view`.
        layout: how the weight is stored; see :func:`gonio.geometry.layout_of`.
        generator: decides the numbers alone; without one the operating system seeds them.

    Returns:
        `weight`.

    Raises:
        InvalidArgumentError: for meta, empty or non-floating tensors, or fewer than 2 dimensions.
        UnknownNameError: for an unknown activation name.

    Example:
        >>> weight = gonio.init.orthogonal_(torch.empty(3, 8), gain=2.0, generator=gonio.seeding.generator(0))
        >>> torch.allclose(weight @ weight.T, 4 * torch.eye(3), atol=1e-5)
        True

    References:
        [1] A. Saxe, J. McClelland, S. Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep
        linear neural networks", 2013. https://arxiv.org/abs/1312.6120
        [2] G. W. Stewart, "The efficient generation of random orthogonal matrices with an application to
        condition estimators", SIAM J. Numer. Anal. 17(3), 1980, §3.

    Differs:
        ``torch.nn.init.orthogonal_`` treats a grouped convolution as one matrix, which gives depthwise 3×3
        filters a norm far below 1, reads transposed convolutions by their input channels, refuses half
        precision on CPU, and does nothing on the meta device.
    """
    check_fillable(weight, "orthogonal_")
    matrices, rows, cols = _view_shape(weight, layout, view)
    scale = resolve_gain(gain) * _scale(weight, layout, max(rows, cols), preserve)
    small, large = sorted((rows, cols))
    tall = rows >= cols
    q = haar_columns(matrices, large, small, fresh_generator(generator), working_dtype(weight), by_rows=tall)
    return write_(weight, unview((q if tall else q.mT).mul_(scale), weight.shape, layout, view=view))


def _view_shape(weight: Tensor, layout: Layout, view: View) -> torch.Size:
    return matrix_view(torch.empty(weight.shape, device="meta"), layout, view=view).shape


def _scale(weight: Tensor, layout: Layout, larger: int, preserve: str | None) -> float:
    """Factor on a semi-orthogonal matrix, whose mean squared entry is 1/larger."""
    if preserve is None:
        return 1.0
    if preserve not in ("norm", "rms"):
        raise InvalidArgumentError(
            "orthogonal_() has preserve=None, 'norm' or 'rms'", f"{preserve!r}", "Choose one of them."
        )
    fan = fans(weight.shape, layout)
    return sqrt(larger / (fan.fan_out if preserve == "norm" else fan.fan_in))


def delta_orthogonal_(
    weight: Tensor,
    *,
    gain: Gain = 1.0,
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Make the convolution itself, not its filters, an isometry times `gain`.

    The centre tap is a random matrix with orthonormal columns per group and all other taps are zero, so
    :math:`\lVert Kx \rVert = g \lVert x \rVert` for every input, at stride 1 with "same" padding. It mixes
    channels and no pixels; a stride drops pixels and with them their part of the norm.

    Args:
        weight: a convolution's weight of odd or even kernel; even kernels use the tap before the middle.
        gain: a number, or an activation (name or callable) whose rms gain is taken.
        layout: how the weight is stored; see :func:`gonio.geometry.layout_of`.
        generator: decides the numbers alone; without one the operating system seeds them.

    Raises:
        InvalidArgumentError: for fewer output than input channels per group (then no isometry exists), for a
            weight without kernel dimensions, and for meta, empty or non-floating tensors.

    Example:
        >>> conv = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        >>> _ = gonio.init.delta_orthogonal_(conv.weight, generator=gonio.seeding.generator(0))
        >>> x = torch.ones(1, 3, 4, 4)
        >>> torch.allclose(conv(x).norm(), x.norm())
        True

    References:
        [1] L. Xiao et al., "Dynamical isometry and a mean field theory of CNNs: how to train 10,000-layer
        vanilla convolutional neural networks", 2018, Algorithm 1 and §2.4. https://arxiv.org/abs/1806.05393
    """
    check_fillable(weight, "delta_orthogonal_")
    _, rows, cols = _view_shape(weight, layout, "taps")
    _check_isometry(weight, rows, cols)
    kernel = weight.shape[2:]
    q = haar_columns(layout.matrices, rows, cols, fresh_generator(generator), working_dtype(weight))
    taps = q.new_zeros(layout.matrices, prod(kernel), rows, cols)
    taps[:, _centre(kernel)] = q * resolve_gain(gain)
    return write_(weight, unview(taps.flatten(0, 1), weight.shape, layout, view="taps"))


def _check_isometry(weight: Tensor, rows: int, cols: int) -> None:
    if weight.ndim < 3:
        raise InvalidArgumentError(
            "delta_orthogonal_() needs a convolution's weight",
            f"shape {tuple(weight.shape)}",
            "Use orthogonal_().",
        )
    if rows < cols:
        raise InvalidArgumentError(
            "delta_orthogonal_() keeps every input's norm, which needs no fewer outputs than inputs",
            f"{rows} outputs for {cols} inputs per group",
            "Use orthogonal_(), or widen the layer.",
        )


def _centre(kernel: torch.Size) -> int:
    index = 0
    for size in kernel:
        index = index * size + (size - 1) // 2
    return index
