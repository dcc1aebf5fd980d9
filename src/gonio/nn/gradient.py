"""The gradient of a filter that acts through its direction alone, freed of the filter's length."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gonio.nn.product import Product

__all__ = ["Gradient", "scaled_gradient"]

Gradient = Literal["exact", "weighted"]


class _ScaledGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, factor: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def scaled_gradient(weight: Tensor, product: Product) -> Tensor:
    r"""The weight itself, whose gradient is multiplied by the norm of each filter.

    An operator that uses :math:`\hat w = w/\lVert w \rVert` has the gradient
    :math:`(I - \hat w \hat w^\top)\, \partial L / \partial \hat w \,/\, \lVert w \rVert`: long filters learn
    slowly. Multiplied by :math:`\lVert w \rVert` it is the same for filters of every length.
    """
    norms = product.along_filters(product.filter_norms(weight.detach()), weight)
    result: Tensor = _ScaledGradient.apply(weight, norms.to(weight.dtype))
    return result
