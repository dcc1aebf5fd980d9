"""Standardised random draws, and how they are written into a weight of any kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import erf, exp, pi, sqrt
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gonio.errors import InvalidArgumentError, UnknownNameError

__all__ = ["Distribution", "check_fillable", "fresh_generator", "standard_draws", "write_"]

DistributionName = Literal["normal", "uniform", "truncated_normal", "rademacher"]
Draw: TypeAlias = Callable[[torch.Size, torch.Generator], Tensor]
Distribution: TypeAlias = DistributionName | Draw

CUT = 2.0  # truncated_normal is cut at two standard deviations of the normal, as in TensorFlow and JAX
# standard deviation left after the cut: 1 − 2·c·φ(c)/(2Φ(c) − 1), 0.8796 at c = 2
CUT_STD = sqrt(1 - 2 * CUT * exp(-CUT * CUT / 2) / sqrt(2 * pi) / erf(CUT / sqrt(2)))


def fresh_generator(generator: torch.Generator | None) -> torch.Generator:
    """`generator`, or one seeded by the operating system, as ``numpy.random.default_rng()`` does."""
    if generator is not None:
        return generator
    fresh = torch.Generator()
    fresh.seed()
    return fresh


def working_dtype(weight: Tensor) -> torch.dtype:
    """float64 for float64 weights, else float32: half-precision weights are rounded once, at the end."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def standard_draws(
    shape: torch.Size, distribution: Distribution, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Independent draws of mean 0 and variance 1, on the generator's device."""
    if callable(distribution):
        return _custom(shape, distribution, generator).to(dtype)
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


def _custom(shape: torch.Size, distribution: Draw, generator: torch.Generator) -> Tensor:
    drawn = distribution(shape, generator)
    if not isinstance(drawn, Tensor) or drawn.shape != shape:
        raise InvalidArgumentError(
            f"a distribution callable takes (shape, generator) and returns a tensor of shape {tuple(shape)}",
            f"{tuple(drawn.shape)}" if isinstance(drawn, Tensor) else f"{type(drawn).__name__}",
            "Return draws of mean 0 and variance 1, for example torch.randn(shape, generator=generator).",
        )
    return drawn


def check_fillable(weight: Tensor, function: str) -> None:
    """Raise where an initialiser would silently do nothing."""
    if is_lazy(weight):
        raise InvalidArgumentError(
            f"{function}() writes values into a weight",
            "the weight of a lazy layer, which has no shape yet",
            "Run one batch through the model first.",
        )
    if weight.is_meta:
        raise InvalidArgumentError(
            f"{function}() writes values into a weight",
            f"a weight of shape {tuple(weight.shape)} on the meta device, which holds none",
            "Materialise the model first with model.to_empty(device=…), then initialise.",
        )
    if weight.numel() == 0:
        raise InvalidArgumentError(
            f"{function}() writes values into a weight",
            f"shape {tuple(weight.shape)}, which has no entries",
            "Exclude empty layers.",
        )
    if not weight.is_floating_point():
        raise InvalidArgumentError(
            f"{function}() fills real floating-point weights", f"dtype {weight.dtype}", "Dequantise it first."
        )


def write_(weight: Tensor, values: Tensor) -> Tensor:
    """Copy `values` of the full shape into `weight`, across devices, dtypes and DTensor shards.

    A sharded weight gets the shards of one full tensor, that of the first rank: the result never depends
    on how many processes share it.
    """
    tensor = sys.modules.get("torch.distributed.tensor")  # without that import there is no DTensor
    with torch.no_grad():
        if tensor is not None and isinstance(weight, tensor.DTensor):
            values = values.to(device=weight.device, dtype=weight.dtype)
            values = tensor.distribute_tensor(values, weight.device_mesh, weight.placements)
        weight.copy_(values)
    return weight
