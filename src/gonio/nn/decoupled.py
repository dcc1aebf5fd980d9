r"""What every decoupled layer shares: the operator :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta)`."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from gonio.errors import NotApplicableError
from gonio.nn.angular import Angular, Cosine
from gonio.nn.compiled import computed_once, fusing
from gonio.nn.fused import multiply_with_energy, ordinary_eager, unit_filters
from gonio.nn.gradient import Gradient, scaled_gradient
from gonio.nn.magnitude import Linear, Magnitude
from gonio.nn.magnitude.base import Coefficients, Number, times
from gonio.nn.operator import Weighted, check_operator
from gonio.nn.product import Product, wide
from gonio.nn.ranks import several_ranks, total
from gonio.nn.running import RunningStatistics
from gonio.nn.scaling import scale_, scale_by_parts_, total_norm
from gonio.nn.slope import root, slope_at, slope_of

__all__ = ["Decoupled"]

# Note [Zero inputs]
# A patch with a norm below this counts as this long. Every magnitude but Sphere has a bounded slope there, so
# its value and gradient at a zero patch are the true limits; Sphere has no limit and is defined to be 0 with
# gradient 0. float16 gets a larger value because 1/norm must be representable.
SHORTEST = {torch.float64: 1e-60, torch.float32: 1e-9, torch.bfloat16: 1e-9, torch.float16: 2.0**-10}

NARROW = (torch.float16, torch.bfloat16)

# The logarithm of a learned radius counts within ±10, a factor of 22,026 either way: far beyond use, and its
# exponential far from the ends of float16.
LOG_RADIUS = 10.0


def _belongs_to_patches(c: Coefficients, energy: Tensor, y: Tensor) -> bool:
    """Whether the slope is much smaller than the output, one value for many filters."""
    return 2 * c.size_with(energy) <= y.numel()


class Decoupled(RunningStatistics):
    """Abstract base of the decoupled layers; their other base is the torch layer."""

    magnitude: Magnitude
    angular: Angular
    weighted: Weighted | None
    first_batch_replaces = True
    gradient: Gradient
    synchronize: bool
    weight: Tensor
    log_radius: Tensor | None
    alpha: Tensor | None
    beta: Tensor | None
    mean_norm: Tensor | None
    blend: Tensor | None

    @property
    @abstractmethod
    def _product(self) -> Product:
        """The linear map under the operator."""

    @property
    @abstractmethod
    def _sizes(self) -> tuple[int, int, int]:
        """(filters, groups, inputs per filter)."""

    def _set_operator(
        self,
        magnitude: Magnitude,
        angular: Angular,
        weighted: Weighted | None,
        gradient: Gradient,
        momentum: float | None,
        synchronize: bool,
    ) -> None:
        """Store the options and create what the operator adds, on the weight's device."""
        check_operator(type(self).__name__, magnitude, angular, weighted, gradient)
        self.magnitude, self.angular, self.weighted, self.gradient = magnitude, angular, weighted, gradient
        self.momentum, self.synchronize = momentum, synchronize
        filters, groups, _ = self._sizes
        device, dtype = self.weight.device, self.weight.dtype
        for name, flag in (("log_radius", "learn_radius"), ("alpha", "learn_alpha"), ("beta", "learn_beta")):
            learned = getattr(magnitude, flag, False)
            new = nn.Parameter(torch.empty(filters, device=device, dtype=dtype)) if learned else None
            self.register_parameter(name, new)
        relative = getattr(magnitude, "radius_in", "absolute") == "mean_norm"
        single = torch.float64 if dtype == torch.float64 else torch.float32
        norm = torch.empty(groups, device=device, dtype=single) if relative else None
        self.register_buffer("mean_norm", norm)
        count = torch.zeros((), device=device, dtype=torch.long) if relative else None
        self.register_buffer("num_batches_tracked", count)
        self.register_buffer("blend", None)
        self._reset_operator()

    @torch.no_grad()
    def _reset_operator(self) -> None:
        """Initial values of what the operator adds to the torch layer."""
        given = self.magnitude.coefficients
        if self.log_radius is not None:
            self.log_radius.fill_(math.log(given.radius))
        if self.alpha is not None:
            self.alpha.fill_(given.alpha)
        if self.beta is not None:
            self.beta.fill_(given.beta)
        if self.mean_norm is not None:
            # the norm of a patch with entries of unit variance, until the first batch is seen
            self.mean_norm.fill_(math.sqrt(self._sizes[2]))
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Draw the weight anew as torch does, and give what the operator adds its initial values."""
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
        return self.weight.new_full((self._sizes[0],), float(self.magnitude.coefficients.radius))

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"magnitude={self.magnitude!r}", f"angular={self.angular!r}"]
        if self.weighted is not None:
            parts.append(f"weighted={self.weighted!r}")
        if self.gradient != "exact":
            parts.append(f"gradient={self.gradient!r}")
        return ", ".join(parts)

    @property
    def _keeps_length(self) -> bool:
        """Whether the filters' norms cancel: the operator is h(x)·⟨w, x⟩/‖x‖."""
        return self.weighted == "linear" and isinstance(self.angular, Cosine)

    @property
    def _keeps_norm(self) -> bool:
        """Whether the input's norm cancels: the operator is α·⟨w, x⟩ or α·⟨w, x⟩/‖w‖."""
        return isinstance(self.magnitude, Linear) and isinstance(self.angular, Cosine)

    def _operate(self, x: Tensor, product: Product) -> Tensor:
        """The layer's output without the bias, for a padded and batched input."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return self._decouple(x, product)
        with torch.autocast(kind, enabled=False):  # norms are reduced in float32
            return self._decouple(x.to(torch.get_autocast_dtype(kind)), product)

    def _decouple(self, x: Tensor, product: Product) -> Tensor:
        weight = scaled_gradient(self.weight, product) if self.gradient == "weighted" else self.weight
        filters = weight if self._keeps_length else unit_filters(weight, product)
        # under autocast the input is narrower than the weight; else this does nothing or lets torch complain
        filters = filters.to(x.dtype) if x.dtype in NARROW else filters
        if self._keeps_norm:
            y = product.multiply(x, filters)
            y = y if self._keeps_length else product.to_unit(y, filters, x)
            out = self._times_alpha(product.group(y), product)
        else:
            y, energy = multiply_with_energy(x, filters, product)
            y = y if self._keeps_length else product.to_unit(y, filters, x)
            out = self._combine(y, product.group(energy), x, product)
        if self.blend is not None:
            out = self._blended(out, product.group(y), x, product, self.blend)
        return product.ungroup(out).to(x.dtype)

    def _times_alpha(self, y: Tensor, product: Product) -> Tensor:
        return times(y, self._coefficients(y, y, product).alpha)

    def _combine(self, y: Tensor, energy: Tensor, x: Tensor, product: Product) -> Tensor:
        """The operator in the grouped layout, from the product and the energy of the patches."""
        shortest = SHORTEST[x.dtype]
        c = self._coefficients(energy, x, product)
        if not self._needs_product and ordinary_eager():
            return self._scaled_in_place(y, energy, c, product, shortest)
        norm = root(energy, shortest)
        slope = slope_at(norm, c, self.magnitude, shortest)
        if fusing(y) and isinstance(slope, Tensor) and _belongs_to_patches(c, energy, y):
            slope = computed_once(slope)
            norm = norm if isinstance(self.angular, Cosine) else computed_once(norm)
        out = self.angular.combine(wide(product.group(y)), norm, slope)
        if self.weighted == "linear" and not self._keeps_length:
            out = out * product.lengths(self.weight, x)
        return out

    def _scaled_in_place(self, y: Tensor, energy: Tensor, c: Coefficients, product: Product, shortest: float) -> Tensor:
        """With the cosine: the product times the slope."""
        if c.size_with(energy) == energy.numel() or _belongs_to_patches(c, energy, y):
            return product.group(scale_(y, slope_of(energy, c, self.magnitude, shortest), product))
        return product.group(scale_by_parts_(y, energy, c, self.magnitude, product, shortest))

    @property
    def _needs_product(self) -> bool:
        """Whether the plain product is needed beside, or after, its multiple by the slope."""
        could_vanish = self.alpha is not None or self.beta is not None
        return could_vanish or self.blend is not None or not isinstance(self.angular, Cosine)

    def _radius_of_filters(self, dtype: torch.dtype, product: Product) -> Number:
        if self.log_radius is None:
            return self.magnitude.coefficients.radius
        return product.per_filter(self.log_radius.clamp(-LOG_RADIUS, LOG_RADIUS).exp().to(dtype))

    def _coefficients(self, energy: Tensor, x: Tensor, product: Product) -> Coefficients:
        """The magnitude's numbers in force, shaped for the grouped layout; moves the running mean norm."""
        given = self.magnitude.coefficients
        alpha, beta = (
            value if learned is None else product.per_filter(learned.to(energy.dtype))
            for learned, value in ((self.alpha, given.alpha), (self.beta, given.beta))
        )
        own = radius = self._radius_of_filters(energy.dtype, product)
        if self.mean_norm is not None:
            radius = product.per_group(self._unit(energy, self.mean_norm, x.dtype, product)) * own
        if self.weighted == "tanh_product":
            radius = radius / product.lengths(self.weight, x).clamp_min(SHORTEST[torch.float32])
        elif self.weighted == "tanh_each":
            alpha = times(torch.tanh(product.lengths(self.weight, x) / own), alpha)
        return Coefficients(alpha, beta, radius)

    def _unit(self, energy: Tensor, mean_norm: Tensor, given: torch.dtype, product: Product) -> Tensor:
        """The mean norm by which a radius is measured: the batch's in training, else the running one."""
        if not self.training:
            return mean_norm.to(energy.dtype).clamp_min(SHORTEST[energy.dtype])
        totals = total_norm(energy, SHORTEST[given], product)
        count: int | Tensor = energy.numel() // totals.numel()
        if self.synchronize and several_ranks():
            joined = total(torch.cat([totals, totals.new_tensor([count])]))
            totals, count = joined[:-1], joined[-1].detach()
            mean = totals / count.clamp_min(1)
        else:
            mean = totals / max(count, 1)
        self._track({"mean_norm": mean}, count)
        return mean

    def _blended(self, out: Tensor, y: Tensor, x: Tensor, product: Product, blend: Tensor) -> Tensor:
        """Between the plain product and the operator, during a gradual conversion."""
        plain = y if self._keeps_length else y * product.lengths(self.weight, x)
        return plain + blend * (out - plain)

    def _folded_weight(self) -> Tensor:
        """The weight of the torch layer that computes the same."""
        why = None
        if not self._keeps_norm or self.blend is not None:
            why = "its output is not linear in its input"
        elif not self._keeps_length and self._product.has_phases:
            why = "the norm of its filters differs between outputs"
        if why is not None:
            do = "Exact are the magnitude Linear with the angular part Cosine alone."
            raise NotApplicableError("a torch layer that computes the same", type(self).__name__, why, do)
        weight = self.weight if self._keeps_length else self._product.filters(self.weight)
        alpha = self.magnitude.coefficients.alpha if self.alpha is None else self.alpha
        if isinstance(alpha, Tensor):
            alpha = self._product.along_filters(alpha, weight)
        return weight * alpha
