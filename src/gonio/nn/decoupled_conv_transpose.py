"""Decoupled transposed convolutions."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from gonio.nn.angular import Angular
from gonio.nn.conversion import check_plain, share_, with_weight_
from gonio.nn.decoupled import Decoupled
from gonio.nn.gradient import Gradient
from gonio.nn.magnitude import Magnitude
from gonio.nn.operator import COSINE, TANH, Weighted
from gonio.nn.sliding import TransposedConvolution

__all__ = ["DecoupledConvTranspose1d", "DecoupledConvTranspose2d", "DecoupledConvTranspose3d"]

Size = int | tuple[int, ...]
Self = TypeVar("Self", bound="DecoupledConvTranspose")


class DecoupledConvTranspose(Decoupled, nn.modules.conv._ConvTransposeNd):
    """Abstract base of the decoupled transposed convolutions; the last base of each is the torch layer."""

    plain: ClassVar[type[nn.modules.conv._ConvTransposeNd]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        padding_mode: str = "zeros",
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
        sizes: tuple[Any, ...] = (kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode)
        super().__init__(in_channels, out_channels, *sizes, device, dtype)  # type: ignore[call-arg]  # the torch layer\'s
        self._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize)

    @classmethod
    def _around(cls: type[Self], conv: nn.modules.conv._ConvTransposeNd, *operator: Any) -> Self:
        check_plain(conv, cls.plain, asked="from_conv")
        new = share_(cls(**_arguments(conv)), conv)
        new._set_operator(*operator)
        return new

    def _product_with(self, output_padding: tuple[int, ...]) -> TransposedConvolution:
        padding: Any = self.padding  # a transposed convolution takes no "same"
        return TransposedConvolution(self.kernel_size, self.stride, padding, self.dilation, self.groups, output_padding)

    @property
    def _product(self) -> TransposedConvolution:
        return self._product_with(self.output_padding)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        # a patch holds one tap per input channel and residue of the stride
        taps = 1.0
        for kernel, stride in zip(self.kernel_size, self.stride, strict=True):
            taps *= kernel / stride
        return self.out_channels, self.groups, max(1, round(self.in_channels // self.groups * taps))

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        batched = x.dim() == self.weight.dim()
        x = x if batched else x.unsqueeze(0)
        dims = len(self.kernel_size)
        compute: Any = self._output_padding  # its annotations ask for lists
        extra = compute(x, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)
        out = self._operate(x, self._product_with(tuple(extra)))
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).reshape(-1, *(1 for _ in self.kernel_size))
        return out if batched else out.squeeze(0)


def _arguments(conv: nn.modules.conv._ConvNd) -> dict[str, Any]:
    """What builds a layer of the same shape, without memory: its parameters come from elsewhere."""
    names = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "output_padding",
        "groups",
        "dilation",
        "padding_mode",
    )
    return {name: getattr(conv, name) for name in names} | {"bias": conv.bias is not None, "device": "meta"}


class DecoupledConvTranspose1d(DecoupledConvTranspose, nn.ConvTranspose1d):
    r"""A 1-D transposed convolution whose product is split into a magnitude and an angular part.

    Every output is :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b`. Its patch :math:`x` is the
    inputs that reach it, and its filter :math:`w` the taps by which they do; which taps those are depends
    on the output's phase in the stride and, at the border, on where the input ends, and so do both
    norms. An output that no input reaches is :math:`b`. The options are those of
    :class:`DecoupledConv2d`.

    Shape:
        - input: (N, in_channels, L) or (in_channels, L).
        - output: as `torch.nn.ConvTranspose1d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose1d(2, 4, 3, stride=2, bias=False,
        ...     magnitude=gonio.nn.magnitude.Sphere(), angular=gonio.nn.angular.Linear())
        >>> x = torch.ones(1, 2, 8)
        >>> bool((layer(5 * x).abs() <= 1).all())
        True

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071

    Differs: the paper treats no transposed convolution.
    """

    plain = nn.ConvTranspose1d

    @classmethod
    def from_conv(
        cls,
        conv: nn.ConvTranspose1d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledConvTranspose1d:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        return cls._around(conv, magnitude, angular, weighted, gradient, momentum, synchronize)

    def to_conv(self) -> nn.ConvTranspose1d:
        """The torch layer on the same Parameter objects; its product is the plain one."""
        return share_(nn.ConvTranspose1d(**_arguments(self)), self)

    def to_plain(self) -> nn.ConvTranspose1d:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())


class DecoupledConvTranspose2d(DecoupledConvTranspose, nn.ConvTranspose2d):
    r"""A 2-D transposed convolution whose product is split into a magnitude and an angular part.

    Every output is :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b`. Its patch :math:`x` is the
    inputs that reach it, and its filter :math:`w` the taps by which they do; which taps those are depends
    on the output's phase in the stride and, at the border, on where the input ends, and so do both
    norms. An output that no input reaches is :math:`b`. The options are those of
    :class:`DecoupledConv2d`.

    Shape:
        - input: (N, in_channels, H, W) or (in_channels, H, W).
        - output: as `torch.nn.ConvTranspose2d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose2d(2, 4, 3, stride=2, bias=False,
        ...     magnitude=gonio.nn.magnitude.Sphere(), angular=gonio.nn.angular.Linear())
        >>> x = torch.ones(1, 2, 5, 5)
        >>> bool((layer(5 * x).abs() <= 1).all())
        True

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071

    Differs: the paper treats no transposed convolution.
    """

    plain = nn.ConvTranspose2d

    @classmethod
    def from_conv(
        cls,
        conv: nn.ConvTranspose2d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledConvTranspose2d:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        return cls._around(conv, magnitude, angular, weighted, gradient, momentum, synchronize)

    def to_conv(self) -> nn.ConvTranspose2d:
        """The torch layer on the same Parameter objects; its product is the plain one."""
        return share_(nn.ConvTranspose2d(**_arguments(self)), self)

    def to_plain(self) -> nn.ConvTranspose2d:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())


class DecoupledConvTranspose3d(DecoupledConvTranspose, nn.ConvTranspose3d):
    r"""A 3-D transposed convolution whose product is split into a magnitude and an angular part.

    Every output is :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b`. Its patch :math:`x` is the
    inputs that reach it, and its filter :math:`w` the taps by which they do; which taps those are depends
    on the output's phase in the stride and, at the border, on where the input ends, and so do both
    norms. An output that no input reaches is :math:`b`. The options are those of
    :class:`DecoupledConv2d`.

    Shape:
        - input: (N, in_channels, D, H, W) or (in_channels, D, H, W).
        - output: as `torch.nn.ConvTranspose3d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose3d(2, 4, 3, stride=2, bias=False,
        ...     magnitude=gonio.nn.magnitude.Sphere(), angular=gonio.nn.angular.Linear())
        >>> x = torch.ones(1, 2, 4, 4, 4)
        >>> bool((layer(5 * x).abs() <= 1).all())
        True

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071

    Differs: the paper treats no transposed convolution.
    """

    plain = nn.ConvTranspose3d

    @classmethod
    def from_conv(
        cls,
        conv: nn.ConvTranspose3d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledConvTranspose3d:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        return cls._around(conv, magnitude, angular, weighted, gradient, momentum, synchronize)

    def to_conv(self) -> nn.ConvTranspose3d:
        """The torch layer on the same Parameter objects; its product is the plain one."""
        return share_(nn.ConvTranspose3d(**_arguments(self)), self)

    def to_plain(self) -> nn.ConvTranspose3d:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())
