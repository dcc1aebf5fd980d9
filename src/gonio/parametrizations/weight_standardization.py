"""Weight standardisation: filters of mean 0 and a fixed standard deviation."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry.kernels import applies_to
from gonio.geometry.norms import least_norm, safe_norm, widen
from gonio.geometry.views import Layout
from gonio.parametrizations.filters import by_filter, filter_size, infinite_where
from gonio.parametrizations.kernels import standardized
from gonio.parametrizations.parametrization import Parametrization, positive

Scale = Literal["std", "fan_in"]
ROUNDING = 16.0  # deviation, in roundings of the mean, up to which a filter is constant


class WeightStandardization(Parametrization):
    r"""Filters of mean 0 and standard deviation 1, times a gain:

    .. math::
        w_i = g_i \, s \, \frac{v_i - \bar v_i}{\operatorname{std}(v_i)},
        \qquad s = 1 \text{ or } d^{-1/2},

    with the unbiased standard deviation over the d entries of a filter. With ``scale="std"`` a filter's norm
    is :math:`g \sqrt{d-1}`, and a normalisation layer should follow; with ``scale="fan_in"`` it is about g, and
    with g the std gain of the activation (1.7129 for ReLU) variances are kept without such a layer. A constant
    filter, up to rounding, becomes zero, with gradient 0.

    Args:
        scale: ``"std"`` or ``"fan_in"``.
        gain: g, of every filter.
        learn_gain: multiply g by a Parameter ``gains`` with one number per filter. It starts such that attaching
            keeps the deviation of each filter and only removes the means; fill it with 1 to start as without.

    Invariances: Adding a constant to a filter of the trained tensor; rescaling it by a positive factor.

    Raises:
        InvalidArgumentError: for another scale, or a `gain` that is not positive and finite.
        NotApplicableError: on attaching to a layer whose filters have one entry, which have no deviation.

    Cost: four passes over the weight; one Parameter per filter if gains are learned.

    Example:
        >>> layer = nn.Conv2d(4, 8, 3)
        >>> ws = gonio.parametrizations.WeightStandardization()
        >>> _ = gonio.parametrizations.attach(layer, "weight", ws)
        >>> filters = layer.weight.flatten(1)
        >>> bool(filters.mean(1).abs().max() < 1e-6), torch.allclose(filters.std(1), torch.ones(8), rtol=1e-3)
        (True, True)

    See also: :func:`gonio.init.gain`, which computes g for any activation.

    References:
        [1] S. Qiao et al., "Micro-batch training with batch-channel normalization and weight
        standardization", 2019, equations (5) and (6). https://arxiv.org/abs/1903.10520
        [2] A. Brock et al., "Characterizing signal propagation to close the performance gap in unnormalized
        ResNets", ICLR 2021, section 4 (``scale="fan_in"``). https://arxiv.org/abs/2101.08692
        Differs: [1] and [2] divide by the biased deviation, smaller by :math:`\sqrt{(d-1)/d}`, and [1] adds a constant
        to it, which makes the map depend on the scale of small filters; the code of the authors of [1] divides by the
        unbiased one plus 1e-5.
    """

    options: ClassVar[tuple[str, ...]] = ("scale", "gain", "learn_gain")

    def __init__(self, *, scale: Scale = "std", gain: float = 1.0, learn_gain: bool = False) -> None:
        super().__init__()
        if scale not in get_args(Scale):
            raise InvalidArgumentError('WeightStandardization has scale="std" or "fan_in"', repr(scale), "Choose one.")
        self.gain = positive("WeightStandardization", "gain", gain, "Use 1, or gonio.init.gain(activation).")
        self.scale, self.learn_gain = scale, bool(learn_gain)
        self.gains: nn.Parameter | None
        self.register_parameter("gains", None)

    def bind(self, weight: Tensor, layout: Layout) -> None:
        size = filter_size(weight, layout)
        if size < 2:
            why = "its filters have one entry, which has no deviation"
            raise NotApplicableError("WeightStandardization", "weight", why, "Leave it out.")
        super().bind(weight, layout)
        if self.learn_gain:
            filters, dims = by_filter(widen(weight), layout)
            std = safe_norm(filters - filters.mean(dims, keepdim=True), dims) / (size - 1) ** 0.5
            self.gains = nn.Parameter((std / self._constant(size)).flatten().to(weight.dtype))

    def weight_of(self, raw: Tensor) -> Tensor:
        layout = self.bound_layout
        size = filter_size(raw, layout)
        if not layout.transposed and applies_to(raw):
            found = standardized(raw, self._per_filter(raw, size, (size - 1) / size), ROUNDING)
            if found is not None:
                return found
        return self._standardized(raw, size)

    def _per_filter(self, raw: Tensor, size: int, square: float) -> Tensor:
        """The standard deviation that each filter gets, times the root of a number."""
        each = self._constant(size) * square**0.5
        gains = self._parameters["gains"]  # the registry itself: `self.gains` is a slow search
        return raw.new_full((raw.numel() // size,), each) if gains is None else gains.to(raw.dtype) * each

    def _standardized(self, raw: Tensor, size: int) -> Tensor:
        """The plain form."""
        filters, dims = by_filter(raw, self.bound_layout)
        var, mean = torch.var_mean(filters, dims, keepdim=True)
        # A constant filter minus its mean is a rounding error and has no direction.
        inexact = mean.detach().abs() * (ROUNDING * torch.finfo(raw.dtype).eps)
        zero = var <= inexact.clamp_min(least_norm(raw.dtype) / (size - 1) ** 0.5).square()
        # A factor per filter: in compiled code it saves 1 % of a ResNet-18's step over a division per entry. The
        # derivative of an inverse root would take the third power of a deviation, which leaves the range of float32.
        scale = self._per_filter(raw, size, 1).view_as(var) / infinite_where(zero, var).sqrt()
        return ((filters - mean) * scale).view_as(raw)

    def holds(self, weight: Tensor) -> bool:
        """Whether every filter has mean 0 and, unless gains are learned, its standard deviation within 1 %."""
        filters, dims = by_filter(weight.detach().double(), self.bound_layout)
        size = filter_size(weight, self.bound_layout)
        expected = self._constant(size)
        std = filters.std(dims)
        centred = filters.mean(dims).abs() <= 4 * torch.finfo(weight.dtype).eps * std.clamp_min(1e-12) + 1e-9 * expected
        scaled = (std / expected - 1).abs() <= 0.01
        return bool(centred.all()) and (self.learn_gain or bool(scaled.all()))

    def _constant(self, size: int) -> float:
        """The standard deviation that a filter gets, without learned gains."""
        return self.gain / size**0.5 if self.scale == "fan_in" else self.gain
