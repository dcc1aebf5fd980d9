"""A value that a compiler computes once, where it would compute it again for each of its uses.

A fused kernel that multiplies a product by the slope of its patch would compute the slope again for every
filter that sees the patch, forty operations each time. Handed through an operation that the compiler cannot
look into, the slope becomes a tensor of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gonio.nn.elementary import transformed

__all__ = ["computed_once", "fusing"]

torch.library.define("gonio::computed_once", "(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl("gonio::computed_once", "default")
def _computed_once(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("gonio::computed_once")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(_: Any, grad: Tensor) -> Tensor:
    return grad


torch.library.register_autograd("gonio::computed_once", _backward)


def fusing(x: Tensor) -> bool:
    """Whether kernels are generated from what happens to `x`, to be run here."""
    generating = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    return generating and not transformed() and type(x) is Tensor


def computed_once(x: Tensor) -> Tensor:
    """The same values, where kernels are fused in a tensor that later ones read."""
    result: Tensor = torch.ops.gonio.computed_once(x) if fusing(x) else x
    return result
