"""The decoupled linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gonio.nn.angular import Angular
from gonio.nn.conversion import check_plain, share_
from gonio.nn.decoupled import COSINE, TANH, Decoupled, Weighted
from gonio.nn.magnitude import Magnitude
from gonio.nn.product import LinearMap, Product

__all__ = ["DecoupledLinear"]


class DecoupledLinear(Decoupled, nn.Linear):
    r"""A linear layer whose product is split into a magnitude and an angular part."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        momentum: float | None = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._set_operator(magnitude, angular, weighted, momentum)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        momentum: float | None = 0.1,
    ) -> DecoupledLinear:
        """A decoupled layer on the same Parameter objects."""
        check_plain(linear, nn.Linear, asked="from_linear")
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        share_(new, linear)
        new._set_operator(magnitude, angular, weighted, momentum)
        return new

    def to_linear(self) -> nn.Linear:
        """The plain layer on the same Parameter objects."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        return share_(plain, self)

    @property
    def _product(self) -> Product:
        return LinearMap()

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.out_features, 1, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        out = self._operate(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)
