"""Decoupled convolutions."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gonio.nn.angular import Angular
from gonio.nn.conversion import check_plain, share_, with_weight_
from gonio.nn.decoupled import Decoupled
from gonio.nn.gradient import Gradient
from gonio.nn.magnitude import Magnitude
from gonio.nn.operator import COSINE, TANH, Weighted
from gonio.nn.sliding import Convolution

__all__ = ["DecoupledConv1d", "DecoupledConv2d", "DecoupledConv3d"]

Size = int | tuple[int, ...]
Self = TypeVar("Self", bound="DecoupledConv")


class DecoupledConv(Decoupled, nn.modules.conv._ConvNd):
    """Abstract base of the decoupled convolutions; the last base of each is the torch layer."""

    plain: ClassVar[type[nn.modules.conv._ConvNd]]

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
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> None:
        torch_arguments: tuple[Any, ...] = (kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(in_channels, out_channels, *torch_arguments, device, dtype)  # type: ignore[call-arg]  # the torch layer\'s
        self._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize)

    @classmethod
    def _around(cls: type[Self], conv: nn.modules.conv._ConvNd, *operator: Any) -> Self:
        check_plain(conv, cls.plain, asked="from_conv")
        new = share_(cls(**_arguments(conv)), conv)
        new._set_operator(*operator)
        return new

    @property
    def _ahead(self) -> tuple[int, ...]:
        """Padding that torch's convolution cannot do: a mode other than zeros, or an uneven "same"."""
        padding = tuple(self._reversed_padding_repeated_twice)
        uneven = any(padding[i] != padding[i + 1] for i in range(0, len(padding), 2))
        return padding if uneven or self.padding_mode != "zeros" else ()

    @property
    def _product(self) -> Convolution:
        padding = tuple(reversed(self._reversed_padding_repeated_twice[::2]))
        inside = (0,) * len(padding) if self._ahead else padding
        none = (0,) * len(padding)
        return Convolution(self.kernel_size, self.stride, inside, self.dilation, self.groups, none)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.out_channels, self.groups, self.weight[0].numel()

    def forward(self, x: Tensor) -> Tensor:
        batched = x.dim() == self.weight.dim()
        x = x if batched else x.unsqueeze(0)
        if self._ahead:
            x = F.pad(x, self._ahead, "constant" if self.padding_mode == "zeros" else self.padding_mode)
        out = self._operate(x, self._product)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).reshape(-1, *(1 for _ in self.kernel_size))
        return out if batched else out.squeeze(0)


def _arguments(conv: nn.modules.conv._ConvNd) -> dict[str, Any]:
    """What builds a layer of the same shape, without memory: its parameters come from elsewhere."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(conv, name) for name in names} | {"bias": conv.bias is not None, "device": "meta"}


class DecoupledConv1d(DecoupledConv, nn.Conv1d):
    r"""A 1-D convolution whose product is split into a magnitude and an angular part.

    :math:`y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b` for every filter and patch; all options
    and properties are those of :class:`DecoupledConv2d`.

    Shape:
        - input: (N, in_channels, L) or (in_channels, L).
        - output: as `torch.nn.Conv1d`.

    Example:
        >>> layer = gonio.nn.DecoupledConv1d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.ones(1, 2, 8)
        >>> torch.allclose(layer(5 * x), layer(x))
        True

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071
    """

    plain = nn.Conv1d

    @classmethod
    def from_conv(
        cls,
        conv: nn.Conv1d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledConv1d:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        return cls._around(conv, magnitude, angular, weighted, gradient, momentum, synchronize)

    def to_conv(self) -> nn.Conv1d:
        """The torch layer on the same Parameter objects; its product is the plain one."""
        return share_(nn.Conv1d(**_arguments(self)), self)

    def to_plain(self) -> nn.Conv1d:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())


class DecoupledConv2d(DecoupledConv, nn.Conv2d):
    r"""A 2-D convolution whose product is split into a magnitude and an angular part.

    For every filter :math:`w` and patch :math:`x`, with the angle :math:`\theta` between them,

    .. math::
        y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b

    instead of :math:`\lVert w \rVert \lVert x \rVert \cos\theta + b`. A patch is what a filter sees:
    per group, zeros of the padding included. A zero filter gives :math:`y = b`, as does a zero patch.

    With the options' defaults, :math:`y = \tanh(\lVert x \rVert / \rho) \cos\theta + b`, where
    :math:`\rho` is the mean norm of the layer's patches. A random filter has a cosine of size
    :math:`1/\sqrt{d}` with its patch of :math:`d` inputs, so outputs of bounded magnitudes are small:
    put a normalisation layer after, or give ``alpha`` :math:`= \sqrt{d}`.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode:
            as in torch.
        magnitude: one of :mod:`gonio.nn.magnitude`.
        angular: one of :mod:`gonio.nn.angular`.
        weighted: how :math:`\lVert w \rVert` enters. None: not at all. ``"linear"``: :math:`h` is
            multiplied by it. ``"tanh_product"``: :math:`\alpha\tanh(\lVert x \rVert\lVert w \rVert/\rho)`.
            ``"tanh_each"``: :math:`\alpha\tanh(\lVert x \rVert/\rho)\tanh(\lVert w \rVert/\rho_0)`, where
            :math:`\rho_0` is the radius as given, since a mean norm of inputs is no unit for filters.
        gradient: ``"exact"``, or ``"weighted"``, which multiplies the gradient of each filter by its
            norm and so removes its dependence on that norm; for ``weighted=None`` only.
        momentum: of the running mean norm, torch's convention; None averages all batches.
        synchronize: take the mean norm over all processes of a data-parallel training.

    Shape:
        - input: (N, in_channels, H, W) or (in_channels, H, W).
        - output: as `torch.nn.Conv2d`.

    Invariances:
        Rescaling any filter by a positive factor, unless `weighted`; in training, rescaling the input
        too, if the radius is measured in mean norms or the magnitude is constant.

    Raises:
        InvalidArgumentError: for options that have no meaning together.

    Example:
        Equal to the torch layer for one choice of options:

        >>> conv = nn.Conv2d(3, 8, 3, padding=1)
        >>> plain = gonio.nn.DecoupledConv2d.from_conv(
        ...     conv, magnitude=gonio.nn.magnitude.Linear(), weighted="linear")
        >>> x = torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4)
        >>> torch.allclose(plain(x), conv(x), atol=1e-6), plain.weight is conv.weight
        (True, True)

        Bounded for another, however long the input is:

        >>> bounded = gonio.nn.DecoupledConv2d(3, 8, 3, bias=False, magnitude=gonio.nn.magnitude.Ball())
        >>> bool((bounded(1000 * x).abs() <= 1).all())
        True

    Cost: one pass over the input for the patch norms and one over the output; about a tenth of a dense
    convolution, as much again as a depthwise one.

    Folding: exact for the magnitude Linear with the cosine, else impossible.

    References:
        [1] W. Liu et al., "Decoupled Networks", CVPR 2018.
        https://arxiv.org/abs/1804.08071

    Differs: the norms have no additive constant (the official code adds 1e-4 under each root, which
    halves the cosine of vectors of norm 0.01). The radius is a positive number times the mean norm
    (official: a square plus 1e-4), kept as its logarithm, and its running mean has momentum 0.1 and
    starts with the first batch (official: 0.001).
    """

    plain = nn.Conv2d

    @classmethod
    def from_conv(
        cls,
        conv: nn.Conv2d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledConv2d:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        return cls._around(conv, magnitude, angular, weighted, gradient, momentum, synchronize)

    def to_conv(self) -> nn.Conv2d:
        """The torch layer on the same Parameter objects; its product is the plain one."""
        return share_(nn.Conv2d(**_arguments(self)), self)

    def to_plain(self) -> nn.Conv2d:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())


class DecoupledConv3d(DecoupledConv, nn.Conv3d):
    r"""A 3-D convolution whose product is split into a magnitude and an angular part.

    :math:`y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b` for every filter and patch; all options
    and properties are those of :class:`DecoupledConv2d`.

    Shape:
        - input: (N, in_channels, D, H, W) or (in_channels, D, H, W).
        - output: as `torch.nn.Conv3d`.

    Example:
        >>> layer = gonio.nn.DecoupledConv3d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.ones(1, 2, 4, 4, 4)
        >>> torch.allclose(layer(5 * x), layer(x))
        True

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071
    """

    plain = nn.Conv3d

    @classmethod
    def from_conv(
        cls,
        conv: nn.Conv3d,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
    ) -> DecoupledConv3d:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        return cls._around(conv, magnitude, angular, weighted, gradient, momentum, synchronize)

    def to_conv(self) -> nn.Conv3d:
        """The torch layer on the same Parameter objects; its product is the plain one."""
        return share_(nn.Conv3d(**_arguments(self)), self)

    def to_plain(self) -> nn.Conv3d:
        """A torch layer that computes the same, with parameters of its own; refused where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())
