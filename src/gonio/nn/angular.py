r"""Angular activations :math:`g(\theta)`: how a decoupled operator depends on the angle.

Every :math:`g` here falls from 1 at :math:`\theta = 0` to 0 at :math:`\pi/2`. All but :class:`RectifiedCosine`, which
stays 0 from there on, are odd about the right angle, :math:`g(\pi - \theta) = -g(\theta)`. Each is a frozen dataclass:
data and pure functions, no state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError, check_range
from gonio.execution import ordinary_eager
from gonio.geometry.norms import widen
from gonio.nn import kernels
from gonio.plots import angular as draw_angular

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Angular", "Cosine", "Linear", "RectifiedCosine", "Sigmoid", "SquaredCosine"]

# Note [Bounded arcsine]
# The derivative of the arcsine, 1/√(1 − c²), is infinite at c = ±1, and a clamp of c would cut it to 0 beyond. A
# cosine computed from products carries a rounding error of a few eps, so below these values 1 − c² is noise: it is
# floored there in the derivative, which is then at most 1e3 in float32.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def bounded_asin(cosine: Tensor, rounded_as: torch.dtype | None = None) -> Tensor:
    """The arcsine of a cosine, safe at and slightly beyond ±1; see Note [Bounded arcsine].

    The value is that of the cosine clamped to ±1, exact. `rounded_as` is the dtype whose rounding error the cosine
    carries, where it is narrower than its own.

    Example:
        >>> from gonio.nn.angular import bounded_asin
        >>> c = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> bounded_asin(c).sum().backward()
        >>> c.grad.isfinite().all().item()
        True
    """
    floor = FLOOR[rounded_as or cosine.dtype]
    if ordinary_eager(cosine):
        return kernels.bounded_asin(cosine, floor)
    edge = math.sqrt(1 - floor)
    beyond = (cosine - edge).clamp_min(0) + (cosine + edge).clamp_max(0)
    # straight lines beyond the edge for the derivative, then the exact value
    extended = torch.asin(cosine.clamp(-edge, edge)) + beyond / math.sqrt(floor)
    return extended + (torch.asin(cosine.clamp(-1, 1)) - extended).detach()


class Angular(ABC):
    """An angular activation: a function of the angle between a filter and its input."""

    is_cosine: ClassVar[bool] = False  # g = cos θ: the operator is a multiple of the plain product

    def __call__(self, angle: Tensor) -> Tensor:
        """The value at `angle`, in radians."""
        return self.of_cosine(torch.cos(angle))

    @abstractmethod
    def of_cosine(self, cosine: Tensor) -> Tensor:
        """The value where the cosine of the angle is `cosine`; rounding beyond ±1 is allowed."""

    def combine(self, product: Tensor, norm: Tensor, slope: float | Tensor) -> Tensor:
        r"""The operator :math:`h\,g` from the plain product; for the cosine the layer multiplies `product` by `slope`.

        Args:
            product: :math:`\lVert x \rVert \cos\theta`, in the dtype of the layer's input.
            norm: :math:`\lVert x \rVert`, positive.
            slope: :math:`h / \lVert x \rVert`.
        """
        return slope * norm * self.of_cosine(widen(product) / norm)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw :math:`g` over the angle; needs the extra `lab`."""
        return draw_angular(self, ax=ax)


@dataclass(frozen=True)
class Cosine(Angular):
    r"""The cosine, :math:`g(\theta) = \cos\theta`, the angular part of every ordinary layer.

    Example:
        >>> gonio.nn.angular.Cosine()(torch.tensor([0.0, torch.pi]))
        tensor([ 1., -1.])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, angular activation functions.
        https://arxiv.org/abs/1804.08071
    """

    is_cosine = True

    def of_cosine(self, cosine: Tensor) -> Tensor:
        return cosine


@dataclass(frozen=True)
class RectifiedCosine(Angular):
    r"""The positive part of the cosine, :math:`g(\theta) = \max(0, \cos\theta)`: a layer and its ReLU in one operator.

    With :math:`h = \lVert w \rVert \lVert x \rVert` (`magnitude.Linear()`, `weighted="linear"`) the operator is
    :math:`\max(0, \langle w, x \rangle)`, a layer without bias followed by a ReLU. With a bias it is another function,
    because a decoupled layer adds the bias behind :math:`h\,g`.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(8, 4, bias=False, weighted="linear",
        ...     magnitude=gonio.nn.magnitude.Linear(), angular=gonio.nn.angular.RectifiedCosine())
        >>> x = torch.randn(3, 8)
        >>> torch.allclose(layer(x), torch.relu(x @ layer.weight.T), atol=1e-6)
        True

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, discussion of the unified view.
        https://arxiv.org/abs/1804.08071

    Differs: the paper lists no such activation; it states the identity for an ordinary layer with ReLU.
    """

    def of_cosine(self, cosine: Tensor) -> Tensor:
        return cosine.relu()

    def combine(self, product: Tensor, norm: Tensor, slope: float | Tensor) -> Tensor:
        return slope * widen(product).relu()  # no division: exact for h = ‖x‖


class _OfArcsine(Angular):
    """Abstract base of the activations that are functions of the arcsine of the cosine."""

    @abstractmethod
    def of_arcsine(self, arcsine: Tensor) -> Tensor:
        """The value where the arcsine of the cosine is `arcsine`."""

    def of_cosine(self, cosine: Tensor) -> Tensor:
        return self.of_arcsine(bounded_asin(cosine))

    def combine(self, product: Tensor, norm: Tensor, slope: float | Tensor) -> Tensor:
        return slope * norm * self.of_arcsine(bounded_asin(widen(product) / norm, rounded_as=product.dtype))


@dataclass(frozen=True)
class Linear(_OfArcsine):
    r"""The angle itself, :math:`g(\theta) = 1 - 2\theta/\pi`.

    It is also the expected product of the signs that two directions give a random projection.
    Evaluated as :math:`\tfrac{2}{\pi}\arcsin(\cos\theta)`, which is exact at the right angle; the
    derivative of the arcsine is bounded near ±1 (Note [Bounded arcsine]).

    Example:
        >>> gonio.nn.angular.Linear()(torch.tensor([torch.pi / 4]))
        tensor([0.5000])

    References: W. Liu et al., "Decoupled Networks", CVPR 2018, angular activation functions.
        https://arxiv.org/abs/1804.08071
    """

    def of_arcsine(self, arcsine: Tensor) -> Tensor:
        return arcsine * (2 / math.pi)


@dataclass(frozen=True)
class Sigmoid(_OfArcsine):
    r"""A sigmoid of the angle, steep about the right angle for small :math:`k`.

    .. math::
        g(\theta) = \frac{1 + e^{-\pi/2k}}{1 - e^{-\pi/2k}} \cdot
                    \frac{1 - e^{\theta/k - \pi/2k}}{1 + e^{\theta/k - \pi/2k}}
                  = -\frac{\tanh\frac{\theta - \pi/2}{2k}}{\tanh\frac{\pi}{4k}}.

    The right-hand form is the one evaluated: the left one overflows for small :math:`k`. It tends to
    :class:`Linear` for large :math:`k` and to the sign of the cosine for small.

    Args:
        k: width of the transition, in radians, positive.

    Raises: InvalidArgumentError if `k` is not positive and finite.

    Example:
        >>> gonio.nn.angular.Sigmoid(k=0.01)(torch.tensor([0.0, 1.5, torch.pi]))
        tensor([ 1.0000,  0.9983, -1.0000])

    References: W. Liu et al., "Deep Hyperspherical Learning", NIPS 2017 (k = 0.3). https://arxiv.org/abs/1711.03189
    """

    k: float = 0.3

    def __post_init__(self) -> None:
        check_range("Sigmoid", k=self.k)
        if not (math.isfinite(self.k) and self.k > 0):
            raise InvalidArgumentError("Sigmoid: invalid width k", repr(self.k), "Pass a positive number.")

    def of_arcsine(self, arcsine: Tensor) -> Tensor:
        return torch.tanh(arcsine / (2 * self.k)) * (1 / math.tanh(math.pi / (4 * self.k)))


@dataclass(frozen=True)
class SquaredCosine(Angular):
    r"""The signed square of the cosine, :math:`g(\theta) = \operatorname{sgn}(\cos\theta)\cos^2\theta`.

    It suppresses nearly orthogonal pairs: two random directions in :math:`d` dimensions get :math:`1/d` where the
    cosine gives :math:`1/\sqrt{d}`.

    Example:
        >>> gonio.nn.angular.SquaredCosine()(torch.tensor([0.0, torch.pi / 3, torch.pi]))
        tensor([ 1.0000,  0.2500, -1.0000])

    References: the official code (`linear_sqcos`) of W. Liu et al., "Decoupled Networks", CVPR 2018, whose text does
        not list it. https://arxiv.org/abs/1804.08071
    """

    def of_cosine(self, cosine: Tensor) -> Tensor:
        return cosine * cosine.abs()

    def combine(self, product: Tensor, norm: Tensor, slope: float | Tensor) -> Tensor:
        product = widen(product)
        return product * product.abs() * (slope / norm)  # the division stays on the small map
