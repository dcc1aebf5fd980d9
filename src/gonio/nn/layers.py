"""The decoupled layers: linear, convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from gonio.nn.decoupled import ConvMap, ConvTransposeMap, Decoupled, DenseMap


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

    takes = (nn.Linear,)
    linear_map = DenseMap

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`Operator`."""
        return cls._from_plain(linear, "from_linear", options)

    def to_linear(self) -> nn.Linear:
        """The torch layer on the same Parameter objects: its product is the plain one."""
        layer: nn.Linear = self._to_plain_product()
        return layer


class _DecoupledConv(Decoupled):
    """Abstract base of the decoupled convolutions."""

    linear_map = ConvMap

    @classmethod
    def from_conv(cls, conv: nn.modules.conv._ConvNd, **options: Any) -> Self:
        """A decoupled layer on the same Parameter objects; the options are those of :class:`Operator`."""
        return cls._from_plain(conv, "from_conv", options)

    def to_conv(self) -> nn.modules.conv._ConvNd:
        """The torch layer on the same Parameter objects: its product is the plain one."""
        layer: nn.modules.conv._ConvNd = self._to_plain_product()
        return layer


class DecoupledConv1d(_DecoupledConv, nn.Conv1d):
    r"""A 1-D convolution whose product is split into a magnitude and an angular part; see :class:`DecoupledConv2d`.

    :math:`y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b` for every filter :math:`w` and patch :math:`x`.

    Shape: input (N, in_channels, L) or (in_channels, L); output as `torch.nn.Conv1d`.

    Example:
        >>> layer = gonio.nn.DecoupledConv1d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.ones(1, 2, 8)
        >>> torch.allclose(layer(5 * x), layer(x))
        True
    """

    takes = (nn.Conv1d,)


class DecoupledConv2d(_DecoupledConv, nn.Conv2d):
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
        magnitude, angular, weighted, gradient, momentum, synchronize, process_group: as in :class:`Operator`.

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

    takes = (nn.Conv2d,)


class DecoupledConv3d(_DecoupledConv, nn.Conv3d):
    r"""A 3-D convolution whose product is split into a magnitude and an angular part; see :class:`DecoupledConv2d`.

    :math:`y = h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b` for every filter :math:`w` and patch :math:`x`.

    Shape: input (N, in_channels, D, H, W) or (in_channels, D, H, W); output as `torch.nn.Conv3d`.

    Example:
        >>> layer = gonio.nn.DecoupledConv3d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> x = torch.ones(1, 2, 4, 4, 4)
        >>> torch.allclose(layer(5 * x), layer(x))
        True
    """

    takes = (nn.Conv3d,)


class _DecoupledConvTranspose(_DecoupledConv):
    """Abstract base of the decoupled transposed convolutions."""

    linear_map = ConvTransposeMap

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self  # of torch's type, whose annotations ask for lists
        sizes = (layer.stride, layer.padding, layer.kernel_size, len(layer.kernel_size), layer.dilation)
        padding = tuple(layer._output_padding(x, output_size, *sizes))
        return self._operate(x, ConvTransposeMap.of(self, padding))


class DecoupledConvTranspose1d(_DecoupledConvTranspose, nn.ConvTranspose1d):
    r"""A 1-D transposed convolution of a magnitude and an angular part; see :class:`DecoupledConvTranspose2d`.

    Every output is :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b`.

    Shape: input (N, in_channels, L) or (in_channels, L); output as `torch.nn.ConvTranspose1d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose1d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> bool((layer(torch.ones(1, 2, 8)).abs() <= 1).all())
        True
    """

    takes = (nn.ConvTranspose1d,)


class DecoupledConvTranspose2d(_DecoupledConvTranspose, nn.ConvTranspose2d):
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

    takes = (nn.ConvTranspose2d,)


class DecoupledConvTranspose3d(_DecoupledConvTranspose, nn.ConvTranspose3d):
    r"""A 3-D transposed convolution of a magnitude and an angular part; see :class:`DecoupledConvTranspose2d`.

    Every output is :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta) + b`.

    Shape: input (N, in_channels, D, H, W) or (in_channels, D, H, W); output as `torch.nn.ConvTranspose3d`.

    Example:
        >>> layer = gonio.nn.DecoupledConvTranspose3d(2, 4, 3, bias=False, magnitude=gonio.nn.magnitude.Sphere())
        >>> bool((layer(torch.ones(1, 2, 4, 4, 4)).abs() <= 1).all())
        True
    """

    takes = (nn.ConvTranspose3d,)
