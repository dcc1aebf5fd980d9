"""Magnitude functions that never exceed `alpha`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gonio.nn.elementary import tanh
from gonio.nn.magnitude.base import Coefficients, Magnitude, larger, over, times

__all__ = ["Ball", "Sphere", "Tanh"]


@dataclass(frozen=True)
class Sphere(Magnitude):
    r"""A constant, :math:`h = \alpha`: only the angle matters (SphereConv).

    Bounded by :math:`\alpha`. A zero input has no direction; the operator is defined to be 0 there,
    with gradient 0.

    Args:
        alpha: the constant.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Sphere(alpha=2.0)(torch.tensor([0.5, 100.0]))
        tensor([2., 2.])

    References:
        [1] W. Liu et al., "Deep Hyperspherical Learning", NIPS 2017. https://arxiv.org/abs/1711.03189
        [2] W. Liu et al., "Decoupled Networks", CVPR 2018, "Bounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    learn_alpha: bool = False
    bounded = True
    continuous_at_zero = False

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return torch.ones_like(norm) * c.alpha

    def slope(self, norm: Tensor, c: Coefficients) -> Tensor:
        return c.alpha / norm

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Tensor:
        return -slope


@dataclass(frozen=True)
class Ball(Magnitude):
    r"""Linear up to the radius, then constant: :math:`h = \alpha \min(\lVert x \rVert, \rho) / \rho`.

    Bounded by :math:`\alpha`; it tends to :class:`Sphere` as :math:`\rho \to 0`.

    Args:
        alpha: the value at and beyond the radius.
        radius: where it turns, in the unit `radius_in`.
        learn_radius: make the radius a parameter of the layer, one per filter.
        radius_in: `"mean_norm"` or `"absolute"`, see the module's text.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Ball(radius=2.0)(torch.tensor([1.0, 2.0, 9.0]))
        tensor([0.5000, 1.0000, 1.0000])

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018, "Bounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    radius: float = 1.0
    learn_radius: bool = False
    radius_in: Literal["mean_norm", "absolute"] = "mean_norm"
    learn_alpha: bool = False
    bounded = True

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return norm * self.slope(norm, c)

    def slope(self, norm: Tensor, c: Coefficients) -> Tensor:
        return c.alpha / larger(norm, c.radius)

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Tensor:
        return -slope * (norm > c.radius)


@dataclass(frozen=True)
class Tanh(Magnitude):
    r"""The smooth ball, :math:`h = \alpha \tanh(\lVert x \rVert / \rho)`.

    Bounded by :math:`\alpha`; slope :math:`\alpha/\rho` at 0.

    Args:
        alpha: the bound.
        radius: the norm at which it reaches 76 % of the bound, in the unit `radius_in`.
        learn_radius: make the radius a parameter of the layer, one per filter.
        radius_in: `"mean_norm"` or `"absolute"`, see the module's text.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Tanh(radius=2.0)(torch.tensor([0.0, 2.0, 100.0]))
        tensor([0.0000, 0.7616, 1.0000])

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018, "Bounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    radius: float = 1.0
    learn_radius: bool = False
    radius_in: Literal["mean_norm", "absolute"] = "mean_norm"
    learn_alpha: bool = False
    bounded = True

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return times(tanh(over(norm, c.radius)), c.alpha)

    def slope(self, norm: Tensor, c: Coefficients) -> Tensor:
        return times(tanh(over(norm, c.radius)) / norm, c.alpha)

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Tensor:
        height = over(slope * norm, c.alpha)
        return times(over(1 - height * height, c.radius), c.alpha) - slope
