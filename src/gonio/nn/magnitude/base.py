"""What every magnitude function has: coefficients, a value and a slope."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.nn.pictures import draw_magnitude

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gonio.nn.angular import Angular

__all__ = ["Coefficients", "Magnitude", "Number", "larger", "over", "times"]

Number = float | Tensor


@dataclass(frozen=True)
class Coefficients:
    """Numbers that a layer may have learned, broadcastable against the norms."""

    alpha: Number = 1.0
    beta: Number = 0.0
    radius: Number = 1.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are tensors."""
        return tuple(number for number in (self.alpha, self.beta, self.radius) if isinstance(number, Tensor))

    def size_with(self, norm: Tensor) -> int:
        """How many values a function of `norm` has with these coefficients."""
        # torch.broadcast_shapes takes as long as a small convolution
        total, shapes = 1, [t.shape for t in (norm, *self.tensors)]
        for dim in range(1, max(map(len, shapes)) + 1):
            sizes = [shape[-dim] for shape in shapes if dim <= len(shape) and shape[-dim] != 1]
            total *= sizes[0] if sizes else 1
        return total


class Magnitude(ABC):
    """A magnitude function of the input's norm."""

    alpha: float
    bounded: ClassVar[bool]  # |h| ≤ alpha for every input
    continuous_at_zero: ClassVar[bool] = True  # h(0) = 0, so that h·g has a limit at a zero input

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every concrete class is a dataclass
            _check(type(self).__name__, field.name, getattr(self, field.name))

    @property
    def coefficients(self) -> Coefficients:
        """The fields as numbers."""
        return Coefficients(self.alpha, getattr(self, "beta", 0.0), getattr(self, "radius", 1.0))

    @property
    def has_radius(self) -> bool:
        """Whether the function has an operator radius."""
        return hasattr(self, "radius")

    def __call__(self, norm: Tensor) -> Tensor:
        """The value at `norm`, with the fields of this object and an absolute radius."""
        return self.value(norm, self.coefficients)

    @abstractmethod
    def value(self, norm: Tensor, c: Coefficients) -> Tensor:
        """The value at `norm` with the coefficients `c`."""

    @abstractmethod
    def slope(self, norm: Tensor, c: Coefficients) -> Number:
        """The value divided by `norm`; `norm` must be positive."""

    def rate(self, norm: Tensor, slope: Tensor, c: Coefficients) -> Number:
        """`norm` times the derivative of the slope, which is given; by autograd unless a class knows better."""
        with torch.enable_grad():
            at = norm.detach().requires_grad_()
            found = self.slope(at, c)
            if not (isinstance(found, Tensor) and found.requires_grad):
                return 0.0
            (derivative,) = torch.autograd.grad(found, at, torch.ones_like(found))
        return norm * derivative

    def plot(self, ax: Axes | None = None, *, angular: Angular | None = None) -> Axes:
        """Draw this function over the norm, or, with `angular`, the operator over the plane; needs the extra `lab`."""
        return draw_magnitude(self, ax, angular=angular)


def _check(owner: str, name: str, value: Any) -> None:
    if name == "radius_in":
        if value not in ("mean_norm", "absolute"):
            raise InvalidArgumentError(
                f"{owner} was asked for its radius_in", repr(value), 'Give "mean_norm" or "absolute".'
            )
    elif isinstance(value, bool) or name.startswith("learn_"):
        if not (isinstance(value, bool) and name.startswith("learn_")):
            raise InvalidArgumentError(f"{owner} was asked for its {name}", repr(value), "Only learn_* take a bool.")
    elif not (isinstance(value, int | float) and math.isfinite(value)):
        raise InvalidArgumentError(f"{owner} was asked for its {name}", repr(value), "Give a finite number.")
    elif name == "radius" and value <= 0:
        raise InvalidArgumentError(f"{owner} was asked for its radius", repr(value), "Give a positive number.")


def larger(norm: Tensor, radius: Number) -> Tensor:
    """The larger of a norm and a radius, which may be a number."""
    return torch.maximum(norm, radius) if isinstance(radius, Tensor) else norm.clamp_min(radius)


def over(x: Tensor, divisor: Number) -> Tensor:
    """The quotient, without a pass over `x` for the number 1."""
    return x if isinstance(divisor, float) and divisor == 1.0 else x / divisor


def times(x: Tensor, factor: Number) -> Tensor:
    """The product, without a pass over `x` for the number 1."""
    return x if isinstance(factor, float) and factor == 1.0 else x * factor
