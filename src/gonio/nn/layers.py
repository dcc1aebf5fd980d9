"""The decoupled layers: linear, convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gonio.execution import ProcessGroup
from gonio.nn.angular import Angular
from gonio.nn.conversion import annotate_, check_plain, share_, with_weight_
from gonio.nn.decoupled import COSINE, TANH, ConvMap, ConvTransposeMap, Decoupled, DenseMap, Gradient, Weighted
from gonio.nn.magnitude import Magnitude

Size = int | tuple[int, ...]


class DecoupledLinear(Decoupled, nn.Linear):
    r"""A linear layer whose product is split into a magnitude and an angular part.

    :math:`y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b` for every filter (row) :math:`w` and input vector
    :math:`x`; options and properties are those of :class:`gonio.nn.DecoupledConv2d`.

    Shape: (…, in_features) → (…, out_features).

    Invariances: Rescaling any filter by a positive factor, unless `weighted`.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 5, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.eye(3)
        >>> y = layer(x)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(7.0)
        >>> torch.allclose(layer(10 * x), y)
        True

    Folding: exact for the magnitude Linear with the cosine, else impossible.
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
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize, process_group)

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
        process_group: ProcessGroup | None = None,
    ) -> Self:
        """A decoupled layer on the same Parameter objects; the options are those of the constructor."""
        check_plain(linear, nn.Linear, verb="from_linear")
        new = share_(cls(linear.in_features, linear.out_features, linear.bias is not None, "meta"), linear)
        new._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize, process_group)
        return new

    def to_linear(self) -> nn.Linear:
        """The torch layer on the same Parameter objects: its product is the plain one."""
        return share_(nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta"), self)

    def to_plain(self) -> nn.Linear:
        """A torch layer with parameters of its own that computes the same; raises where none does."""
        return with_weight_(self.to_linear(), self._folded_weight())

    @property
    def _map(self) -> DenseMap:
        return DenseMap()

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.out_features, 1, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        out = self._operate(x, self._map)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _DecoupledConvNd(Decoupled, nn.modules.conv._ConvNd):
    """Abstract base of the decoupled convolutions."""

    plain: ClassVar[type[nn.modules.conv._ConvNd]]  # the torch layer, the last base of the class
    arguments: ClassVar[str] = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"

    def __init_subclass__(cls, *, plain: type[nn.modules.conv._ConvNd] | None = None) -> None:
        super().__init_subclass__()
        if plain is not None:
            cls.plain = plain
            annotate_(cls, "from_conv", conv=f"nn.{plain.__name__}")

    @classmethod
    def from_conv(
        cls,
        conv: nn.modules.conv._ConvNd,
        *,
        magnitude: Magnitude = TANH,
        angular: Angular = COSINE,
        weighted: Weighted | None = None,
        gradient: Gradient = "exact",
        momentum: float | None = 0.1,
        synchronize: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> Self:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`DecoupledConv2d`."""
        check_plain(conv, cls.plain, verb="from_conv")
        new = share_(cls(**cls._arguments(conv)), conv)
        new._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize, process_group)
        return new

    @classmethod
    def _arguments(cls, conv: nn.modules.conv._ConvNd) -> dict[str, Any]:
        """The constructor arguments of a layer of the same shape, on the meta device: its parameters are shared."""
        return {n: getattr(conv, n) for n in cls.arguments.split()} | {"bias": conv.bias is not None, "device": "meta"}

    def to_conv(self) -> nn.modules.conv._ConvNd:
        """The torch layer on the same Parameter objects: its product is the plain one."""
        return share_(self.plain(**self._arguments(self)), self)

    def to_plain(self) -> nn.modules.conv._ConvNd:
        """A torch layer with parameters of its own that computes the same; raises where none does."""
        return with_weight_(self.to_conv(), self._folded_weight())

    def _padded(self, x: Tensor) -> Tensor:
        """The input with the padding that the linear map leaves to the layer."""
        return x

    def _convolve(self, x: Tensor, patches: ConvMap) -> Tensor:
        """The layer's output for an input, batched or not."""
        batched = x.dim() == self.weight.dim()
        out = self._operate(self._padded(x if batched else x.unsqueeze(0)), patches)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).reshape(-1, *(1 for _ in self.kernel_size))
        return out if batched else out.squeeze(0)


class _DecoupledConv(_DecoupledConvNd):
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
        process_group: ProcessGroup | None = None,
    ) -> None:
        torch_arguments: tuple[Any, ...] = (kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(in_channels, out_channels, *torch_arguments, device, dtype)  # type: ignore[call-arg]  # the torch layer's
        self._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize, process_group)

    @property
    def _padding_ahead(self) -> tuple[int, ...]:
        """Padding that torch's convolution cannot do: a mode other than zeros, or an uneven "same"."""
        padding = tuple(self._reversed_padding_repeated_twice)
        uneven = any(padding[i] != padding[i + 1] for i in range(0, len(padding), 2))
        return padding if uneven or self.padding_mode != "zeros" else ()

    @property
    def _map(self) -> ConvMap:
        padding = tuple(reversed(self._reversed_padding_repeated_twice[::2]))
        none = (0,) * len(padding)
        inside = none if self._padding_ahead else padding
        return ConvMap(self.kernel_size, self.stride, inside, self.dilation, self.groups, none)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.out_channels, self.groups, self.weight[0].numel()

    def _padded(self, x: Tensor) -> Tensor:
        ahead = self._padding_ahead
        return F.pad(x, ahead, "constant" if self.padding_mode == "zeros" else self.padding_mode) if ahead else x

    def forward(self, x: Tensor) -> Tensor:
        return self._convolve(x, self._map)


class DecoupledConv1d(_DecoupledConv, nn.Conv1d, plain=nn.Conv1d):
    """A 1-D convolution whose product is split into a magnitude and an angular part; see :class:`DecoupledConv2d`.

    Shape: input (N, in_channels, L) or (in_channels, L); output as `torch.nn.Conv1d`.

    Example:
        >>> layer = gonio.nn.DecoupledConv1d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.ones(1, 2, 8)
        >>> torch.allclose(layer(5 * x), layer(x))
        True
    """


class DecoupledConv2d(_DecoupledConv, nn.Conv2d, plain=nn.Conv2d):
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
        process_group: the processes that share a batch, if they are not all. A layer with a group cannot be copied or
            pickled; its state dict can.

    Shape: input (N, in_channels, H, W) or (in_channels, H, W); output as `torch.nn.Conv2d`.

    Invariances:
        Rescaling any filter by a positive factor, unless `weighted`; in training, rescaling the input
        too, if the radius is measured in mean norms or the magnitude is constant.

    Raises: InvalidArgumentError for options that have no meaning together.

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

    Cost: about a tenth of a dense convolution; of a depthwise one several times.

    Folding: exact for the magnitude Linear with the cosine, else impossible.

    References: W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071

    Differs: the norms have no additive constant (the official code adds 1e-4 under each root, which
    halves the cosine of vectors of norm 0.01). The radius is a positive number times the mean norm
    (official: a square plus 1e-4), kept as its logarithm, and its running mean has momentum 0.1 and
    starts with the first batch (official: 0.001).
    """


class DecoupledConv3d(_DecoupledConv, nn.Conv3d, plain=nn.Conv3d):
    """A 3-D convolution whose product is split into a magnitude and an angular part; see :class:`DecoupledConv2d`.

    Shape: input (N, in_channels, D, H, W) or (in_channels, D, H, W); output as `torch.nn.Conv3d`.

    Example:
        >>> layer = gonio.nn.DecoupledConv3d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.ones(1, 2, 4, 4, 4)
        >>> torch.allclose(layer(5 * x), layer(x))
        True
    """


class _DecoupledConvTranspose(_DecoupledConvNd):
    arguments = f"{_DecoupledConvNd.arguments} output_padding"

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
        process_group: ProcessGroup | None = None,
    ) -> None:
        sizes: tuple[Any, ...] = (kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode)
        super().__init__(in_channels, out_channels, *sizes, device, dtype)  # type: ignore[call-arg]  # the torch layer's
        self._set_operator(magnitude, angular, weighted, gradient, momentum, synchronize, process_group)

    def _map_with(self, output_padding: tuple[int, ...]) -> ConvTransposeMap:
        padding: Any = self.padding  # a transposed convolution takes no "same"
        return ConvTransposeMap(self.kernel_size, self.stride, padding, self.dilation, self.groups, output_padding)

    @property
    def _map(self) -> ConvTransposeMap:
        return self._map_with(self.output_padding)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        # a patch holds one tap per input channel and residue of the stride
        taps = 1.0
        for kernel, stride in zip(self.kernel_size, self.stride, strict=True):
            taps *= kernel / stride
        return self.out_channels, self.groups, max(1, round(self.in_channels // self.groups * taps))

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        compute: Any = self._output_padding  # its annotations ask for lists
        sizes = (self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation)
        return self._convolve(x, self._map_with(tuple(compute(x, output_size, *sizes))))


class DecoupledConvTranspose1d(_DecoupledConvTranspose, nn.ConvTranspose1d, plain=nn.ConvTranspose1d):
    """A 1-D transposed convolution of a magnitude and an angular part; see :class:`DecoupledConvTranspose2d`.

    Shape: input (N, in_channels, L) or (in_channels, L); output as `torch.nn.ConvTranspose1d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose1d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> bool((layer(torch.ones(1, 2, 8)).abs() <= 1).all())
        True
    """


class DecoupledConvTranspose2d(_DecoupledConvTranspose, nn.ConvTranspose2d, plain=nn.ConvTranspose2d):
    r"""A 2-D transposed convolution whose product is split into a magnitude and an angular part.

    Every output is :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b`. Its patch :math:`x` is the
    inputs that reach it, and its filter :math:`w` the taps that connect them; both depend on the output's phase in
    the stride and, at the border, on where the input ends, and so do both norms. An output that no input reaches
    is :math:`b`. The options are those of :class:`DecoupledConv2d`.

    Shape: input (N, in_channels, H, W) or (in_channels, H, W); output as `torch.nn.ConvTranspose2d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose2d(2, 4, 3, stride=2, bias=False,
        ...     magnitude=gonio.nn.magnitude.Sphere(), angular=gonio.nn.angular.Linear())
        >>> x = torch.ones(1, 2, 5, 5)
        >>> bool((layer(5 * x).abs() <= 1).all())
        True

    References: W. Liu et al., "Decoupled Networks", CVPR 2018. https://arxiv.org/abs/1804.08071

    Differs: the paper treats no transposed convolution.
    """


class DecoupledConvTranspose3d(_DecoupledConvTranspose, nn.ConvTranspose3d, plain=nn.ConvTranspose3d):
    """A 3-D transposed convolution of a magnitude and an angular part; see :class:`DecoupledConvTranspose2d`.

    Shape: input (N, in_channels, D, H, W) or (in_channels, D, H, W); output as `torch.nn.ConvTranspose3d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose3d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> bool((layer(torch.ones(1, 2, 4, 4, 4)).abs() <= 1).all())
        True
    """
