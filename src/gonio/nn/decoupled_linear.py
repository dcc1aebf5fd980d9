"""The decoupled linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gonio.nn.angular import Angular
from gonio.nn.conversion import check_plain, share_, with_weight_
from gonio.nn.decoupled import Decoupled
from gonio.nn.gradient import Gradient
from gonio.nn.magnitude import Magnitude
from gonio.nn.operator import COSINE, TANH, Weighted
from gonio.nn.product import LinearMap, Product

__all__ = ["DecoupledLinear"]


class DecoupledLinear(Decoupled, nn.Linear):
    r"""A linear layer whose product is split into a magnitude and an angular part.

    For every filter (row) :math:`w` and input vector :math:`x`,

    .. math::
        y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b

    instead of :math:`\lVert w \rVert \lVert x \rVert \cos\theta + b`. All options and properties are
    those of :class:`gonio.nn.DecoupledConv2d`; the patch is the whole vector.

    Shape:
        - input: (…, in_features).
        - output: (…, out_features).

    Invariances:
        Rescaling any filter by a positive factor, unless `weighted`.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 5, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.eye(3)
        >>> y = layer(x)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(7.0)
        >>> torch.allclose(layer(10 * x), y)
        True

    Cost: one pass over the input and one over the output.

    Folding: exact for the magnitude Linear with the cosine, else impossible.

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledLinear:
        """A decoupled layer on the same Parameter objects; the options are those of the constructor."""
        check_plain(linear, nn.Linear, asked="from_linear")
        new = share_(cls(linear.in_features, linear.out_features, linear.bias is not None, "meta"), linear)
        new._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize)
        return new

    def to_linear(self) -> nn.Linear:
        """The torch layer on the same Parameter objects: its product is the plain one."""
        return share_(nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta"), self)

    def to_plain(self) -> nn.Linear:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_linear(), self._folded_weight())

    @property
    def _product(self) -> Product:
        return LinearMap()

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.out_features, 1, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        out = self._operate(x, self._product)
        return out if self.bias is None else out + self.bias.to(out.dtype)
