r"""Magnitude functions :math:`h(\lVert x \rVert)`: how a decoupled operator depends on the norm of its input.

Each is a frozen dataclass of coefficients and pure functions: `alpha` (:math:`\alpha`), `beta` (:math:`\beta`) and the
operator radius `radius` (:math:`\rho`) of its formula.

`radius_in` is the unit of the radius: `"mean_norm"` (the mean norm of the layer's inputs: of the batch in
training, its running mean in evaluation) or `"absolute"`. Norms grow as the square root of the number of
inputs, so the same absolute radius has another effect in each layer; one mean norm has the same in all.

`learn_alpha`, `learn_beta` and `learn_radius` make the coefficient a parameter of the layer, one per filter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, check_range
from gonio.nn import kernels
from gonio.nn.angular import Angular
from gonio.nn.kernels import Number
from gonio.plots import magnitude as draw_magnitude
from gonio.plots import operator as draw_operator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Ball", "Linear", "Logarithm", "Magnitude", "Mixed", "Segmented", "Sphere", "Tanh"]

Unit = Literal["mean_norm", "absolute"]
Weighted = Literal["linear", "tanh_product", "tanh_each"]

# Note [Zero inputs]
# A patch with a norm below this counts as this long. Every magnitude but Sphere has a bounded slope there, so
# its value and gradient at a zero patch are the true limits; Sphere has no limit and is defined to be 0 with
# gradient 0. float16 gets a larger value because 1/norm must be representable.
SHORTEST = {torch.float64: 1e-60, torch.float32: 1e-9, torch.bfloat16: 1e-9, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Magnitude(ABC):
    """A magnitude function of the input's norm; how to add one: `docs/extending/magnitude.md`.

    Every field that is annotated `float` is a coefficient: `slope` and `value` take it as a keyword argument, as a
    number or as a tensor that broadcasts against the norms. A coefficient with a field `learn_NAME: bool` can be a
    parameter of the layer.
    """

    alpha: float = 1.0
    learn_alpha: bool = field(default=False, kw_only=True)
    is_linear: ClassVar[bool] = False  # h = alpha·‖x‖
    continuous_at_zero: ClassVar[bool] = True  # h(0) = 0, so that h·g has a limit at a zero input
    positive: ClassVar[tuple[str, ...]] = ()  # coefficients above 0, which are learned as their logarithms
    weightings: ClassVar[tuple[Weighted, ...]] = ("linear",)  # the values of `weighted` that are defined for it
    # A second form of the slope of a function alpha·f(‖x‖/radius); see `kernels.scale_`.
    slope_and_elasticity: ClassVar[Callable[..., tuple[Tensor, Tensor]] | None] = None

    def __post_init__(self) -> None:
        named = {each.name.removeprefix("learn_") for each in fields(self) if each.name.startswith("learn_")}
        if unknown := sorted({*named, *self.positive} - self.coefficients.keys()):
            asked = (
                f"{type(self).__name__}: learn_NAME and `positive` name coefficients, which are fields of type float"
            )
            raise InvalidArgumentError(asked, unknown[0], f"Declare {unknown[0]}: float, or leave it out.")
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type in ("bool", bool):
                valid, expected = isinstance(value, bool), "True or False"
            elif each.name not in self.coefficients:
                continue
            elif isinstance(value, bool) or not (isinstance(value, int | float) and abs(value) < math.inf):
                valid, expected = False, "a finite number"
            else:
                check_range(type(self).__name__, **{each.name: value})
                valid, expected = each.name not in self.positive or value > 0, "a positive number"
            if not valid:
                problem = f"{type(self).__name__}: invalid value of {each.name}"
                raise InvalidArgumentError(problem, repr(value), f"Pass {expected}.")

    @cached_property
    def coefficients(self) -> Mapping[str, float]:
        """The coefficients by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.type in ("float", float)}

    @cached_property
    def learned(self) -> Mapping[str, str]:
        """The names of the layer's parameters for the learned coefficients, those that are logarithms first."""
        names = [name for name in self.coefficients if getattr(self, f"learn_{name}", False)]
        logarithms = {name: f"log_{name}" for name in names if name in self.positive}
        return logarithms | {name: name for name in names if name not in self.positive}

    @property
    def in_mean_norms(self) -> tuple[str, ...]:
        """The coefficients whose unit is the mean norm of the layer's inputs."""
        return ()

    def __call__(self, norm: Tensor) -> Tensor:
        """The value at `norm`, with the coefficients of this object and an absolute radius."""
        return self.value(norm, **self.coefficients)

    def value(self, norm: Tensor, *_: Any, **coefficients: Any) -> Tensor:
        """The value at `norm`; defined anew where the slope is not finite at 0."""
        return norm * self.slope(norm, **coefficients)

    @abstractmethod
    def slope(self, norm: Tensor, *_: Any, **coefficients: Any) -> Number:
        """The value divided by `norm`; `norm` must be positive."""

    def with_lengths(self, weighted: Weighted, length: Tensor, coefficients: dict[str, Number]) -> dict[str, Number]:
        """The coefficients with the filters' norms in them, for the `weightings` in which these are not a factor."""
        return coefficients

    def plot(self, ax: Axes | None = None, *, angular: Angular | None = None) -> Figure:
        """Draw this function over the norm, or, with `angular`, the operator over the plane; needs the extra `lab`."""
        reach = 3 * self.coefficients.get("radius", 1.0)
        if angular is None:
            return draw_magnitude(self, reach=reach, ax=ax)
        return draw_operator(self, angular, reach=reach, ax=ax)


def scaled(x: Tensor, factor: Number) -> Tensor:
    """The product, without an operation for the number 1."""
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def _at_least(norm: Tensor, radius: Number) -> Tensor:
    return torch.maximum(norm, radius) if isinstance(radius, Tensor) else norm.clamp_min(radius)


@dataclass(frozen=True)
class _WithBeta(Magnitude):
    beta: float = 0.5
    learn_beta: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class _WithRadius(Magnitude):
    radius: float = 1.0
    learn_radius: bool = field(default=False, kw_only=True)
    radius_in: Unit = field(default="mean_norm", kw_only=True)

    positive = ("radius",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius_in not in ("mean_norm", "absolute"):
            problem = f"{type(self).__name__}: invalid value of radius_in"
            raise InvalidArgumentError(problem, repr(self.radius_in), 'Pass "mean_norm" or "absolute".')

    @cached_property
    def in_mean_norms(self) -> tuple[str, ...]:
        return ("radius",) if self.radius_in == "mean_norm" else ()


@dataclass(frozen=True)
class Sphere(Magnitude):
    r"""A constant, :math:`h = \alpha`: only the angle matters (SphereConv).

    Bounded by :math:`\alpha`. A zero input has no direction; the operator is defined to be 0 there, with gradient 0.

    Example:
        >>> gonio.nn.magnitude.Sphere(alpha=2.0)(torch.tensor([0.5, 100.0]))
        tensor([2., 2.])

    References:
        [1] W. Liu et al., "Deep Hyperspherical Learning", NIPS 2017. https://arxiv.org/abs/1711.03189
        [2] W. Liu et al., "Decoupled Networks", CVPR 2018, "Bounded Decoupled Operators". https://arxiv.org/abs/1804.08071
    """

    continuous_at_zero = False

    def value(self, norm: Tensor, *, alpha: Number) -> Tensor:
        return torch.ones_like(norm) * alpha

    def slope(self, norm: Tensor, *, alpha: Number) -> Tensor:
        return alpha / norm


@dataclass(frozen=True)
class Ball(_WithRadius):
    r"""Linear up to the radius, then constant: :math:`h = \alpha \min(\lVert x \rVert, \rho) / \rho`.

    Bounded by :math:`\alpha`; it tends to :class:`Sphere` as :math:`\rho \to 0`.

    Example:
        >>> gonio.nn.magnitude.Ball(radius=2.0)(torch.tensor([1.0, 2.0, 9.0]))
        tensor([0.5000, 1.0000, 1.0000])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, Bounded Decoupled Operators. https://arxiv.org/abs/1804.08071
    """

    def slope(self, norm: Tensor, *, alpha: Number, radius: Number) -> Tensor:
        return alpha / _at_least(norm, radius)


@dataclass(frozen=True)
class Tanh(_WithRadius):
    r"""The smooth ball, :math:`h = \alpha \tanh(\lVert x \rVert / \rho)`.

    Bounded by :math:`\alpha`, of which it reaches 76 % at the radius; slope :math:`\alpha/\rho` at 0.

    Example:
        >>> gonio.nn.magnitude.Tanh(radius=2.0)(torch.tensor([0.0, 2.0, 100.0]))
        tensor([0.0000, 0.7616, 1.0000])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, Bounded Decoupled Operators. https://arxiv.org/abs/1804.08071
    """

    weightings = ("linear", "tanh_product", "tanh_each")
    slope_and_elasticity = staticmethod(kernels.slope_and_elasticity_of_tanh)

    def value(self, norm: Tensor, *, alpha: Number, radius: Number) -> Tensor:
        return scaled(torch.tanh(norm / radius), alpha)

    def slope(self, norm: Tensor, *, alpha: Number, radius: Number) -> Tensor:
        return scaled(torch.tanh(norm / radius) / norm, alpha)

    def with_lengths(self, weighted: Weighted, length: Tensor, coefficients: dict[str, Number]) -> dict[str, Number]:
        if weighted == "tanh_product":  # α tanh(‖x‖ ‖w‖/ρ)
            return {**coefficients, "radius": coefficients["radius"] / length.clamp_min(SHORTEST[torch.float32])}
        return {**coefficients, "alpha": scaled(torch.tanh(length / coefficients["radius"]), coefficients["alpha"])}


@dataclass(frozen=True)
class Linear(Magnitude):
    r"""The norm itself, :math:`h = \alpha \lVert x \rVert`: a layer with normalised filters.

    Unbounded. With the cosine and `weighted="linear"`, :math:`\alpha = 1`, it is the ordinary layer.

    Example:
        >>> gonio.nn.magnitude.Linear(alpha=0.5)(torch.tensor([4.0]))
        tensor([2.])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, Unbounded Decoupled Operators. https://arxiv.org/abs/1804.08071
    """

    is_linear = True

    def slope(self, norm: Tensor, *, alpha: Number) -> Number:
        return alpha


@dataclass(frozen=True)
class Segmented(_WithRadius, _WithBeta):
    r"""Two slopes that meet at the radius.

    .. math::
        h = \alpha \lVert x \rVert \ (\lVert x \rVert \le \rho), \qquad
        h = \beta \lVert x \rVert + (\alpha - \beta)\rho \ (\lVert x \rVert > \rho).

    Unbounded unless :math:`\beta = 0`. With :math:`\beta = \alpha` it is :class:`Linear`; with
    :math:`\beta = 0, \alpha = 1/\rho` it is :class:`Ball`.

    Example:
        >>> gonio.nn.magnitude.Segmented(radius=2.0)(torch.tensor([1.0, 2.0, 4.0]))
        tensor([1., 2., 3.])

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018, "Unbounded Decoupled Operators"; the slopes 1 and
        0.5 are those of the official code. https://arxiv.org/abs/1804.08071
    """

    def slope(self, norm: Tensor, *, alpha: Number, beta: Number, radius: Number) -> Tensor:
        return (radius / _at_least(norm, radius)) * (alpha - beta) + beta


@dataclass(frozen=True)
class Logarithm(Magnitude):
    r"""The logarithm, :math:`h = \alpha \log(1 + \lVert x \rVert)`.

    Unbounded, with slope :math:`\alpha` at 0.

    Example:
        >>> gonio.nn.magnitude.Logarithm()(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.6931])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, Unbounded Decoupled Operators. https://arxiv.org/abs/1804.08071
    """

    def value(self, norm: Tensor, *, alpha: Number) -> Tensor:
        return scaled(torch.log1p(norm), alpha)

    def slope(self, norm: Tensor, *, alpha: Number) -> Tensor:
        return scaled(torch.log1p(norm) / norm, alpha)


@dataclass(frozen=True)
class Mixed(_WithBeta):
    r"""A line plus a logarithm, :math:`h = \alpha \lVert x \rVert + \beta \log(1 + \lVert x \rVert)`.

    Unbounded; with :math:`\beta = 0` it is :class:`Linear`, with :math:`\alpha = 0` :class:`Logarithm`.

    Example:
        >>> gonio.nn.magnitude.Mixed(alpha=1.0, beta=1.0)(torch.tensor([1.0]))
        tensor([1.6931])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, Unbounded Decoupled Operators. https://arxiv.org/abs/1804.08071
    """

    def value(self, norm: Tensor, *, alpha: Number, beta: Number) -> Tensor:
        return norm * alpha + torch.log1p(norm) * beta

    def slope(self, norm: Tensor, *, alpha: Number, beta: Number) -> Tensor:
        return torch.log1p(norm) / norm * beta + alpha
