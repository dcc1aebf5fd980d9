"""Independent random weights whose variance keeps the norm or the RMS of the signal."""

from __future__ import annotations

from math import sqrt
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.views import PLAIN, Layout
from gonio.init.draws import (
    Distribution,
    check_fillable,
    fresh_generator,
    standard_draws,
    working_dtype,
    write_,
)
from gonio.init.fans import Fans, fans
from gonio.init.gain import Gain, resolve_gain

__all__ = ["Preserve", "he_", "lecun_", "variance_scaling_", "xavier_"]

Preserve: TypeAlias = Literal["norm", "rms", "both"]


def variance_scaling_(
    weight: Tensor,
    *,
    preserve: Preserve = "rms",
    distribution: Distribution = "normal",
    gain: Gain = 1.0,
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Fill `weight` with independent draws of mean 0 and variance :math:`g^2 / \text{fan}`.

    ========== =============================== ==========================================
    preserve   fan                             keeps
    ========== =============================== ==========================================
    ``norm``   fan_out                         :math:`E\lVert Wx \rVert^2 = \lVert x \rVert^2`
    ``rms``    fan_in                          the variance of each entry
    ``both``   (fan_in + fan_out) / 2          neither, unless they are equal: a compromise
    ========== =============================== ==========================================

    Backward the roles swap: ``norm`` keeps the variance of gradient entries. For an :math:`m \times n`
    matrix with :math:`m \ge n`, ``norm`` also makes :math:`W^\top W` near :math:`I` entry by entry, with an
    error of :math:`1/\sqrt m`; its singular values fill :math:`1 \pm \sqrt{n/m}` whatever the size.

    Args:
        weight: any real floating-point tensor of at least 2 dimensions; a DTensor keeps its sharding.
        preserve: see the table.
        distribution: ``"normal"``, ``"uniform"``, ``"truncated_normal"`` (cut at 2σ, variance restored),
            ``"rademacher"`` (±σ), or a callable ``(shape, generator) -> Tensor`` of mean 0 and variance 1.
        gain: a number, or an activation (name or callable) whose rms gain is taken.
        layout: how the weight is stored and applied; see :func:`gonio.geometry.layout_of`.
        generator: decides the numbers alone, on whatever device the weight is; without one the operating
            system seeds them. The global generator is never read.

    Returns:
        `weight`.

    Raises:
        InvalidArgumentError: for meta, empty or non-floating tensors, fewer than 2 dimensions, an unknown
            `preserve`, or a callable that returns another shape.
        UnknownNameError: for an unknown distribution or activation.

    Example:
        >>> weight = torch.empty(256, 1024)
        >>> _ = gonio.init.variance_scaling_(weight, preserve="norm", generator=gonio.seeding.generator(0))
        >>> bool((weight.norm() / 1024**0.5 - 1).abs() < 0.01)  # E|Wx|² = |W|²/n for random x
        True

    References:
        [1] X. Glorot, Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks",
        AISTATS 2010, Eqs. (10)–(12).
        [2] K. He et al., "Delving deep into rectifiers", 2015, §2.2. https://arxiv.org/abs/1502.01852
    """
    check_fillable(weight, "variance_scaling_")
    std = resolve_gain(gain) / sqrt(_fan(fans(weight.shape, layout), preserve))
    draws = standard_draws(weight.shape, distribution, fresh_generator(generator), working_dtype(weight))
    return write_(weight, draws.mul_(std))


def _fan(fan: Fans, preserve: str) -> float:
    if preserve == "norm":
        return fan.fan_out
    if preserve == "rms":
        return fan.fan_in
    if preserve == "both":
        return (fan.fan_in + fan.fan_out) / 2
    raise InvalidArgumentError(
        "preserve must be one of 'norm', 'rms', 'both'",
        f"{preserve!r}",
        "Choose one; torch's mode='fan_in' is 'rms', 'fan_out' is 'norm'.",
    )


def xavier_(
    weight: Tensor,
    *,
    distribution: Distribution = "uniform",
    gain: Gain = 1.0,
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Variance :math:`2 g^2 / (\text{fan\_in} + \text{fan\_out})`: Glorot and Bengio's compromise.

    ``variance_scaling_(preserve="both")``; see there for the arguments and errors.

    Example:
        >>> weight = gonio.init.xavier_(torch.empty(30, 20), generator=gonio.seeding.generator(0))
        >>> bool(weight.abs().max() <= (6 / 50) ** 0.5)
        True

    References:
        [1] X. Glorot, Y. Bengio, AISTATS 2010, Eq. (16).

    Differs:
        The same numbers as ``torch.nn.init.xavier_uniform_`` and ``xavier_normal_`` for Linear and for
        ungrouped convolutions of stride 1; right fans (:func:`fans`) elsewhere.
    """
    return variance_scaling_(
        weight, preserve="both", distribution=distribution, gain=gain, layout=layout, generator=generator
    )


def he_(
    weight: Tensor,
    *,
    preserve: Preserve = "rms",
    distribution: Distribution = "normal",
    gain: Gain = "relu",
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Variance :math:`2 / \text{fan\_in}` for ReLU: keeps the second moment through the activation.

    ``variance_scaling_(gain="relu")``; see there for the arguments and errors. With ``preserve="norm"`` it
    is the backward form, :math:`2 / \text{fan\_out}`.

    Example:
        >>> weight = gonio.init.he_(torch.empty(64, 512), generator=gonio.seeding.generator(0))
        >>> bool((weight.var() * 512 - 2).abs() < 0.05)
        True

    References:
        [1] K. He et al., "Delving deep into rectifiers", 2015, Eqs. (10), (14).
        https://arxiv.org/abs/1502.01852

    Differs:
        The same numbers as ``torch.nn.init.kaiming_normal_(nonlinearity="relu")`` wherever torch's fan_in
        is right, grouped convolutions included; transposed convolutions and ``preserve="norm"`` with groups
        or stride differ.
    """
    return variance_scaling_(
        weight, preserve=preserve, distribution=distribution, gain=gain, layout=layout, generator=generator
    )


def lecun_(
    weight: Tensor,
    *,
    distribution: Distribution = "normal",
    gain: Gain = 1.0,
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Variance :math:`g^2 / \text{fan\_in}`: each output entry varies as much as the inputs do.

    ``variance_scaling_(preserve="rms")``; see there for the arguments and errors. The initialisation that
    self-normalising (SELU) networks require.

    Example:
        >>> weight = gonio.init.lecun_(torch.empty(64, 512), generator=gonio.seeding.generator(0))
        >>> bool((weight.var() * 512 - 1).abs() < 0.03)
        True

    References:
        [1] Y. LeCun et al., "Efficient BackProp", 1998, §4.6, Eq. (16).

    Differs:
        torch has no such function; its default for Linear and Conv has a third of this variance.
    """
    return variance_scaling_(
        weight, preserve="rms", distribution=distribution, gain=gain, layout=layout, generator=generator
    )
