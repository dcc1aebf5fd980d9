"""Magnitude functions that grow without bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gonio.nn.magnitude.base import Coefficients, Magnitude, Number, larger, times

__all__ = ["Linear", "Logarithm", "Mixed", "Segmented"]


@dataclass(frozen=True)
class Linear(Magnitude):
    r"""The norm itself, :math:`h = \alpha \lVert x \rVert`: a layer with normalised filters.

    Unbounded. With the cosine and `weighted="linear"`, :math:`\alpha = 1`, it is the ordinary layer.

    Args:
        alpha: the slope.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Linear(alpha=0.5)(torch.tensor([4.0]))
        tensor([2.])

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018, "Unbounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    learn_alpha: bool = False
    bounded = False

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return norm * c.alpha

    def slope(self, norm: Tensor, c: Coefficients) -> Number:
        return c.alpha

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> float:
        return 0.0


@dataclass(frozen=True)
class Segmented(Magnitude):
    r"""Two slopes that meet at the radius.

    .. math::
        h = \alpha \lVert x \rVert \ (\lVert x \rVert \le \rho), \qquad
        h = \beta \lVert x \rVert + (\alpha - \beta)\rho \ (\lVert x \rVert > \rho).

    Unbounded unless :math:`\beta = 0`. With :math:`\beta = \alpha` it is :class:`Linear`; with
    :math:`\beta = 0, \alpha = 1/\rho` it is :class:`Ball`.

    Args:
        alpha: the slope inside the radius.
        beta: the slope outside.
        radius: where they meet, in the unit `radius_in`.
        learn_radius: make the radius a parameter of the layer, one per filter.
        radius_in: `"mean_norm"` or `"absolute"`, see the module's text.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.
        learn_beta: make `beta` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Segmented(radius=2.0)(torch.tensor([1.0, 2.0, 4.0]))
        tensor([1., 2., 3.])

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018, "Unbounded Decoupled Operators"; the slopes 1 and
        0.5 are those of the official code. https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    beta: float = 0.5
    radius: float = 1.0
    learn_radius: bool = False
    radius_in: Literal["mean_norm", "absolute"] = "mean_norm"
    learn_alpha: bool = False
    learn_beta: bool = False
    bounded = False

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return norm * self.slope(norm, c)

    def slope(self, norm: Tensor, c: Coefficients) -> Tensor:
        return (c.radius / larger(norm, c.radius)) * (c.alpha - c.beta) + c.beta

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Tensor:
        return (c.beta - slope) * (norm > c.radius)


@dataclass(frozen=True)
class Logarithm(Magnitude):
    r"""The logarithm, :math:`h = \alpha \log(1 + \lVert x \rVert)`.

    Unbounded, with slope :math:`\alpha` at 0.

    Args:
        alpha: the factor.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Logarithm()(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.6931])

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018, "Unbounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    learn_alpha: bool = False
    bounded = False

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return times(torch.log1p(norm), c.alpha)

    def slope(self, norm: Tensor, c: Coefficients) -> Tensor:
        return times(torch.log1p(norm) / norm, c.alpha)

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Tensor:
        return c.alpha / (1 + norm) - slope


@dataclass(frozen=True)
class Mixed(Magnitude):
    r"""A line plus a logarithm, :math:`h = \alpha \lVert x \rVert + \beta \log(1 + \lVert x \rVert)`.

    Unbounded; with :math:`\beta = 0` it is :class:`Linear`, with :math:`\alpha = 0` :class:`Logarithm`.

    Args:
        alpha: the factor of the norm.
        beta: the factor of the logarithm.
        learn_alpha: make `alpha` a parameter of the layer, one per filter.
        learn_beta: make `beta` a parameter of the layer, one per filter.

    Example:
        >>> gonio.nn.magnitude.Mixed(alpha=1.0, beta=1.0)(torch.tensor([1.0]))
        tensor([1.6931])

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018, "Unbounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    alpha: float = 1.0
    beta: float = 0.5
    learn_alpha: bool = False
    learn_beta: bool = False
    bounded = False

    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        return norm * c.alpha + torch.log1p(norm) * c.beta

    def slope(self, norm: Tensor, c: Coefficients) -> Tensor:
        return torch.log1p(norm) / norm * c.beta + c.alpha

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Tensor:
        return c.beta / (1 + norm) - (slope - c.alpha)
