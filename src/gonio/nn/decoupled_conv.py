"""Decoupled convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gonio.nn.angular import Angular
from gonio.nn.conversion import check_plain, share_
from gonio.nn.decoupled import COSINE, TANH, Decoupled, Weighted
from gonio.nn.magnitude import Magnitude
from gonio.nn.product import Convolution

__all__ = ["DecoupledConv2d"]

Size = int | tuple[int, ...]


class DecoupledConv2d(Decoupled, nn.Conv2d):
    r"""A convolution whose product is split into a magnitude and an angular part."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        momentum: float | None = 0.1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._set_operator(magnitude, angular, weighted, momentum)

    @classmethod
    def from_conv(
        cls,
        conv: nn.Conv2d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        momentum: float | None = 0.1,
    ) -> DecoupledConv2d:
        """A decoupled layer on the same Parameter objects."""
        check_plain(conv, nn.Conv2d, asked="from_conv")
        new = cls(*_arguments(conv), device="meta")
        share_(new, conv)
        new._set_operator(magnitude, angular, weighted, momentum)
        return new

    def to_conv(self) -> nn.Conv2d:
        """The plain layer on the same Parameter objects."""
        return share_(nn.Conv2d(*_arguments(self), device="meta"), self)

    @property
    def _product(self) -> Convolution:
        return Convolution.of(self)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.out_channels, self.groups, self.weight[0].numel()

    def forward(self, x: Tensor) -> Tensor:
        batched = x.dim() == self.weight.dim()
        x = self._product.prepare(x if batched else x.unsqueeze(0))
        out = self._operate(x)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).reshape(-1, *(1 for _ in self.stride))
        return out if batched else out.squeeze(0)


def _arguments(conv: nn.modules.conv._ConvNd) -> tuple:
    return (
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,
    )
