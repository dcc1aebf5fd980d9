"""Random weights with independent entries whose variance preserves the norm or the RMS of the signal.

Also the fans that determine this variance, and how every initialiser draws numbers and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, exp, pi, prod, sqrt
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.execution import sharded_like
from gonio.geometry.norms import computed_in
from gonio.geometry.views import PLAIN, Layout, check_shape
from gonio.init.gain import Gain, resolve_gain

Preserve: TypeAlias = Literal["norm", "rms", "both"]
DistributionName = Literal["normal", "uniform", "truncated_normal", "rademacher"]
Draw: TypeAlias = Callable[[torch.Size, torch.Generator], Tensor]
Distribution: TypeAlias = DistributionName | Draw

CUT = 2.0  # truncated_normal is cut at two standard deviations of the normal, as in TensorFlow and JAX
# standard deviation after the cut: 1 − 2·c·φ(c)/(2Φ(c) − 1), 0.8796 at c = 2
CUT_STD = sqrt(1 - 2 * CUT * exp(-CUT * CUT / 2) / sqrt(2 * pi) / erf(CUT / sqrt(2)))


@dataclass(frozen=True)
class Fans:
    """Mean number of connections of one output (`fan_in`) and of one input (`fan_out`)."""

    fan_in: float
    fan_out: float


def fans(shape: Sequence[int], layout: Layout = PLAIN) -> Fans:
    r"""Connections per output and per input of the linear map that a weight defines.

    For a convolution with `g` groups, kernel volume :math:`K` and stride volume :math:`S`:

    ========== ================= ==================
    kind       fan_in            fan_out
    ========== ================= ==================
    conv       in/g · K          out/g · K / S
    transposed in/g · K / S      out/g · K
    ========== ================= ==================

    With weights of variance :math:`\sigma^2` and inputs of equal variance, the output's variance is :math:`\sigma^2
    \cdot` fan_in times that of the input, and :math:`E\lVert y \rVert^2 = \sigma^2 \cdot` fan_out :math:`\cdot\,
    E\lVert x \rVert^2` (away from zero-padded borders). Fans may be fractions; stacked blocks count as separate
    matrices.

    Raises: InvalidArgumentError for fewer than two dimensions, or a layout that does not fit the shape.

    Example:
        >>> gonio.init.fans((4, 1, 3, 3), gonio.geometry.Layout(groups=4))  # depthwise
        Fans(fan_in=9.0, fan_out=9.0)

    Differs: ``torch.nn.init`` takes fan_out as out · K for grouped convolutions (36 instead of 9 above), swaps the two
        for transposed convolutions, and ignores the stride and stacked blocks.
    """
    check_shape(shape, layout)
    if layout.stride and len(layout.stride) != len(shape) - 2:
        raise InvalidArgumentError(
            f"fans() needs one stride per kernel dimension; a weight of shape {tuple(shape)} has {len(shape) - 2}",
            f"stride={layout.stride}",
            "Take the layout from the layer with gonio.geometry.layout_of(module).",
        )
    kernel, stride = prod(shape[2:]), prod(layout.stride)
    if layout.transposed:
        return Fans(shape[0] / layout.matrices * kernel / stride, float(shape[1] * kernel))
    return Fans(float(shape[1] * kernel), shape[0] / layout.matrices * kernel / stride)


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
    preserve   fan                             preserves
    ========== =============================== ==========================================
    ``norm``   fan_out                         :math:`E\lVert Wx \rVert^2 = \lVert x \rVert^2`
    ``rms``    fan_in                          the variance of each entry
    ``both``   (fan_in + fan_out) / 2          both if the fans are equal, else neither
    ========== =============================== ==========================================

    In the backward pass the roles swap. For an :math:`m \times n` matrix with :math:`m \ge n`, ``norm`` also makes
    :math:`W^\top W` close to :math:`I` entry by entry, with an error of :math:`1/\sqrt m`; its singular values fill
    :math:`1 \pm \sqrt{n/m}` for every size.

    Args:
        weight: any real floating-point tensor of at least 2 dimensions; a DTensor keeps its sharding.
        distribution: ``"normal"``, ``"uniform"``, ``"truncated_normal"`` (cut at 2σ, variance restored),
            ``"rademacher"`` (±σ), or a callable ``(shape, generator) -> Tensor`` of mean 0 and variance 1.
        gain: a number, or an activation (name or callable), whose :func:`gain` of the kind `trains` is used: 1 for
            tanh, √2 for ReLU.
        layout: how the weight is stored and applied; see :func:`gonio.geometry.layout_of`.
        generator: determines the numbers on any device; by default a new one, seeded by the operating system.

    Raises:
        InvalidArgumentError: for meta, empty or non-floating tensors, fewer than 2 dimensions, an unknown `preserve`,
            or a callable that returns another shape.
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
    fan = fans(weight.shape, layout)
    found = {"norm": fan.fan_out, "rms": fan.fan_in, "both": (fan.fan_in + fan.fan_out) / 2}
    if preserve not in found:
        raise InvalidArgumentError(
            "preserve must be one of 'norm', 'rms', 'both'",
            f"{preserve!r}",
            "Choose one; torch's mode='fan_in' is 'rms', 'fan_out' is 'norm'.",
        )
    std = resolve_gain(gain) / sqrt(found[preserve])
    draws = _standard_draws(weight.shape, distribution, fresh_generator(generator), computed_in(weight.dtype))
    return write_(weight, draws.mul_(std))


def xavier_(
    weight: Tensor,
    *,
    distribution: Distribution = "uniform",
    gain: Gain = 1.0,
    layout: Layout = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Variance :math:`2 g^2 / (\text{fan\_in} + \text{fan\_out})`, the compromise of Glorot and Bengio.

    ``variance_scaling_(preserve="both")``.

    Example:
        >>> weight = gonio.init.xavier_(torch.empty(30, 20), generator=gonio.seeding.generator(0))
        >>> bool(weight.abs().max() <= (6 / 50) ** 0.5)
        True

    References: [1] As [1] of :func:`variance_scaling_`, Eq. (16).
    Differs: The same numbers as ``torch.nn.init.xavier_uniform_`` and ``xavier_normal_`` for Linear and for ungrouped
        convolutions of stride 1; other layers have the fans of :func:`fans`.
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
    r"""Variance :math:`2 / \text{fan\_in}` for ReLU: preserves the second moment through the activation.

    ``variance_scaling_(gain="relu")``; with ``preserve="norm"`` it is the backward form, :math:`2 / \text{fan\_out}`.

    Example:
        >>> weight = gonio.init.he_(torch.empty(64, 512), generator=gonio.seeding.generator(0))
        >>> bool((weight.var() * 512 - 2).abs() < 0.05)
        True

    References: [1] As [2] of :func:`variance_scaling_`, Eqs. (10), (14).
    Differs: The same numbers as ``torch.nn.init.kaiming_normal_(nonlinearity="relu")`` except for transposed
        convolutions, and for ``preserve="norm"`` with groups or stride, where torch's fans are wrong.
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
    r"""Variance :math:`g^2 / \text{fan\_in}`: each output entry has the variance of the inputs.

    ``variance_scaling_(preserve="rms")``, which self-normalising (SELU) networks require.

    Example:
        >>> weight = gonio.init.lecun_(torch.empty(64, 512), generator=gonio.seeding.generator(0))
        >>> bool((weight.var() * 512 - 1).abs() < 0.03)
        True

    References: [1] Y. LeCun et al., "Efficient BackProp", 1998, §4.6, Eq. (16).
    Differs: torch has no such function; its default for Linear and Conv has a third of this variance.
    """
    return variance_scaling_(
        weight, preserve="rms", distribution=distribution, gain=gain, layout=layout, generator=generator
    )


# --- drawing and writing --------------------------------------------------------------------------


def fresh_generator(generator: torch.Generator | None) -> torch.Generator:
    """`generator`, or one seeded by the operating system, as ``numpy.random.default_rng()`` does."""
    if generator is not None:
        return generator
    fresh = torch.Generator()
    fresh.seed()
    return fresh


def _standard_draws(
    shape: torch.Size, distribution: Distribution, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Independent draws of mean 0 and variance 1, on the generator's device."""
    if callable(distribution):
        drawn = distribution(shape, generator)
        if not isinstance(drawn, Tensor) or drawn.shape != shape:
            raise InvalidArgumentError(
                f"a distribution callable takes (shape, generator) and returns a tensor of shape {tuple(shape)}",
                f"{tuple(drawn.shape)}" if isinstance(drawn, Tensor) else f"{type(drawn).__name__}",
                "Return draws of mean 0 and variance 1, for example torch.randn(shape, generator=generator).",
            )
        return drawn.to(dtype)
    if distribution not in get_args(DistributionName):
        raise UnknownNameError("distribution", str(distribution), get_args(DistributionName))
    device = generator.device
    if distribution == "normal":
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)
    uniform = torch.rand(shape, generator=generator, dtype=dtype, device=device)
    if distribution == "uniform":
        return uniform.sub_(0.5).mul_(sqrt(12))
    if distribution == "rademacher":
        return torch.where(uniform < 0.5, -1.0, 1.0).to(dtype)
    # Inverse distribution function: erfinv of a uniform number in ±erf(c/√2).
    reach = erf(CUT / sqrt(2))
    cut = uniform.mul_(2).sub_(1).mul_(reach).erfinv_().mul_(sqrt(2))
    return cut.clamp_(-CUT, CUT).div_(CUT_STD)


def check_fillable(weight: Tensor, function: str) -> None:
    """Raise if an initialiser cannot write into `weight`."""
    needs = f"{function}() writes values into a real floating-point weight"
    if is_lazy(weight):
        found, do = "the weight of a lazy layer, which has no shape yet", "Run one batch through the model first."
    elif weight.is_meta:
        found = f"a weight of shape {tuple(weight.shape)} on the meta device, which has no values"
        do = "Materialise the model first with model.to_empty(device=…), then initialise."
    elif weight.numel() == 0:
        found, do = f"shape {tuple(weight.shape)}, which has no entries", "Exclude empty layers."
    elif not weight.is_floating_point():
        found, do = f"dtype {weight.dtype}", "Dequantise it first."
    else:
        return
    raise InvalidArgumentError(needs, found, do)


def write_(weight: Tensor, values: Tensor) -> Tensor:
    """Copy `values` of the full shape into `weight`, across devices, dtypes and DTensor shards."""
    with torch.no_grad():
        weight.copy_(sharded_like(values, weight))
    return weight
