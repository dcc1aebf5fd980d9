r"""What every decoupled layer shares: the operator :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta)`."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.nn.angular import Angular, Cosine
from gonio.nn.magnitude import Coefficients, Linear, Magnitude, Tanh
from gonio.nn.magnitude.base import Number
from gonio.nn.product import Product
from gonio.nn.running import RunningStatistics

__all__ = ["COSINE", "TANH", "Decoupled", "Weighted"]

TANH = Tanh()  # the parts of a decoupled layer that is told nothing else
COSINE = Cosine()

Weighted = Literal["linear", "tanh_product", "tanh_each"]

# Note [Zero inputs]
# A patch with a norm below this counts as this long. Every magnitude but Sphere has a bounded slope there, so
# its value and gradient at a zero patch are the true limits; Sphere has no limit and is defined to be 0 with
# gradient 0. float16 gets a larger value because 1/norm must be representable.
SHORTEST = {torch.float64: 1e-100, torch.float32: 1e-12, torch.bfloat16: 1e-12, torch.float16: 2.0**-10}

# The logarithm of a learned radius is kept within ±10 mean norms: beyond, the operator is constant to rounding.
LOG_RADIUS = 10.0


class Decoupled(RunningStatistics):
    """Abstract base of the decoupled layers; the other base is the torch layer."""

    magnitude: Magnitude
    angular: Angular
    weighted: Weighted | None
    log_radius: Tensor | None
    alpha: Tensor | None
    beta: Tensor | None
    mean_norm: Tensor | None
    weight: Tensor
    bias: Tensor | None

    @property
    @abstractmethod
    def _product(self) -> Product:
        """The linear map under the operator."""

    @property
    @abstractmethod
    def _sizes(self) -> tuple[int, int, int]:
        """(filters, groups, inputs per filter)."""

    def _set_operator(self, magnitude: Magnitude, angular: Angular, weighted: Weighted | None, momentum: float) -> None:
        """Store the options and create parameters and buffers on the weight's device."""
        _check_options(type(self).__name__, magnitude, angular, weighted)
        self.magnitude, self.angular, self.weighted, self.momentum = magnitude, angular, weighted, momentum
        filters, groups, _ = self._sizes
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        for name, learned in (("log_radius", "radius"), ("alpha", "alpha"), ("beta", "beta")):
            learn = getattr(magnitude, f"learn_{learned}", False)
            self.register_parameter(name, nn.Parameter(torch.empty(filters, **like)) if learn else None)
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        relative = magnitude.has_radius and getattr(magnitude, "radius_in", "") == "mean_norm"
        device = self.weight.device
        self.register_buffer("mean_norm", torch.empty(groups, device=device, dtype=wide) if relative else None)
        count = torch.zeros((), device=device, dtype=torch.long) if relative else None
        self.register_buffer("num_batches_tracked", count)
        self._reset_operator()

    @torch.no_grad()
    def _reset_operator(self) -> None:
        """Initial values of what the operator adds to the torch layer."""
        if self.log_radius is not None:
            self.log_radius.fill_(math.log(getattr(self.magnitude, "radius")))  # noqa: B009
        for name in ("alpha", "beta"):
            parameter = getattr(self, name)
            if parameter is not None:
                parameter.fill_(getattr(self.magnitude, name))
        if self.mean_norm is not None:
            # the norm of a patch with entries of unit variance, until the first batch is seen
            self.mean_norm.fill_(math.sqrt(self._sizes[2]))
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Draw the weight anew as torch does and set what the operator adds to its initial values."""
        super().reset_parameters()  # type: ignore[misc]  # the torch layer's
        if hasattr(self, "magnitude"):  # torch's constructor calls this before the operator is set
            self._reset_operator()

    @property
    def radius(self) -> Tensor | None:
        """The radius of every filter, in the unit of the magnitude's `radius_in`; None if it has none."""
        if not self.magnitude.has_radius:
            return None
        if self.log_radius is not None:
            return self.log_radius.clamp(-LOG_RADIUS, LOG_RADIUS).exp()
        value: float = getattr(self.magnitude, "radius")  # noqa: B009
        return torch.full((self._sizes[0],), value, device=self.weight.device, dtype=self.weight.dtype)

    def _operate(self, x: Tensor) -> Tensor:
        """The layer's output for a prepared input, without the bias."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return self._decouple(x, self.weight)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return self._decouple(x.to(dtype), self.weight.to(dtype))

    def _decouple(self, x: Tensor, weight: Tensor) -> Tensor:
        product = self._product
        plain = self.weighted == "linear" and isinstance(self.angular, Cosine)  # no direction is needed
        y = product.group(product.multiply(x, weight if plain else product.directions(weight)))
        if isinstance(self.magnitude, Linear) and isinstance(self.angular, Cosine):
            out = y * self._coefficients(y, product).alpha  # the norm of the input cancels
        else:
            energy = product.group(product.energy(x, weight))
            norm = energy.clamp_min(SHORTEST[x.dtype] ** 2).sqrt()
            out = self.angular.combine(y, norm, self._slope(norm, weight, SHORTEST[x.dtype]))
        if self.weighted == "linear" and not plain:
            out = out * product.per_filter(product.filter_norms(weight))
        return product.ungroup(out).to(x.dtype)

    def _slope(self, norm: Tensor, weight: Tensor, shortest: float) -> Number:
        product = self._product
        c = self._coefficients(norm, product)
        if self.weighted == "tanh_product":
            length = product.per_filter(product.filter_norms(weight))
            c = replace(c, radius=c.radius / length.clamp_min(SHORTEST[torch.float32]))
        slope = self.magnitude.slope(norm, c)
        if not self.magnitude.continuous_at_zero:
            slope = slope * (norm > shortest)
        if self.weighted == "tanh_each":
            radius = product.per_filter(self.radius.to(norm.dtype))
            slope = slope * torch.tanh(product.per_filter(product.filter_norms(weight)) / radius)
        return slope

    def _coefficients(self, norm: Tensor, product: Product) -> Coefficients:
        """The magnitude's numbers in force, shaped for the grouped layout; moves the running mean norm."""
        given = self.magnitude.coefficients
        alpha, beta, radius = given.alpha, given.beta, given.radius
        if self.alpha is not None:
            alpha = product.per_filter(self.alpha.to(norm.dtype))
        if self.beta is not None:
            beta = product.per_filter(self.beta.to(norm.dtype))
        if self.log_radius is not None:
            radius = product.per_filter(self.radius.to(norm.dtype))
        if self.mean_norm is not None:
            radius = product.per_group(self._unit(norm, self.mean_norm, product)) * radius
        return Coefficients(alpha, beta, radius)

    def _unit(self, norm: Tensor, mean_norm: Tensor, product: Product) -> Tensor:
        """The mean norm by which the radius is measured: the batch's in training, the running one otherwise."""
        if not self.training:
            return mean_norm.to(norm.dtype)
        mean = norm.mean(product.position_dims(norm)).reshape(-1)
        self._track({"mean_norm": mean})
        return mean


def _check_options(owner: str, magnitude: Magnitude, angular: Angular, weighted: Weighted | None) -> None:
    if not isinstance(magnitude, Magnitude):
        raise InvalidArgumentError(
            f"{owner} was asked for its magnitude", repr(magnitude), "Give one of gonio.nn.magnitude, such as Tanh()."
        )
    if not isinstance(angular, Angular):
        raise InvalidArgumentError(
            f"{owner} was asked for its angular part", repr(angular), "Give one of gonio.nn.angular, such as Cosine()."
        )
    if weighted is not None and weighted not in get_args(Weighted):
        raise InvalidArgumentError(
            f"{owner} was asked for weighted", repr(weighted), f"Give None or one of {', '.join(get_args(Weighted))}."
        )
    if weighted in ("tanh_product", "tanh_each") and not isinstance(magnitude, Tanh):
        raise InvalidArgumentError(
            f"{owner} was asked for weighted={weighted!r}, which is defined for magnitude Tanh",
            repr(magnitude),
            'Use magnitude=Tanh(…) or weighted="linear".',
        )
