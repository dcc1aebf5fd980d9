r"""The decoupled operator :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta)`, from weight and input to output."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.execution import inside_backward
from gonio.nn import kernels
from gonio.nn.angular import Angular, Cosine
from gonio.nn.magnitude import Coefficients, Linear, Magnitude, Number, Tanh, scaled
from gonio.nn.patches import LinearMap
from gonio.nn.running import RunningStatistics, several_ranks, total

__all__ = ["COSINE", "TANH", "Decoupled", "Gradient", "Weighted"]

Weighted = Literal["linear", "tanh_product", "tanh_each"]
Gradient = Literal["exact", "weighted"]

TANH = Tanh()  # the defaults of a decoupled layer
COSINE = Cosine()

# Note [Zero inputs]
# A patch with a norm below this counts as this long. Every magnitude but Sphere has a bounded slope there, so
# its value and gradient at a zero patch are the true limits; Sphere has no limit and is defined to be 0 with
# gradient 0. float16 gets a larger value because 1/norm must be representable.
SHORTEST = {torch.float64: 1e-60, torch.float32: 1e-9, torch.bfloat16: 1e-9, torch.float16: 2.0**-10}

# The logarithm of a learned radius counts within ±10, a factor of 22,026 either way: far beyond use, and its
# exponential is far from the ends of float16.
LOG_RADIUS = 10.0


class Decoupled(RunningStatistics):
    """Abstract base of the decoupled layers; their other base is the torch layer."""

    magnitude: Magnitude
    angular: Angular
    weighted: Weighted | None
    gradient: Gradient
    synchronize: bool
    first_batch_replaces = True
    weight: Tensor
    log_radius: Tensor | None
    alpha: Tensor | None
    beta: Tensor | None
    mean_norm: Tensor | None
    blend: Tensor | None

    @property
    @abstractmethod
    def _map(self) -> LinearMap:
        """The linear map under the operator."""

    @property
    @abstractmethod
    def _sizes(self) -> tuple[int, int, int]:
        """(filters, groups, inputs per filter)."""

    # --- from weight and input to output --------------------------------------------------------------

    def _operate(self, x: Tensor, patches: LinearMap) -> Tensor:
        """The layer's output without the bias, for a padded and batched input."""
        kind = x.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):  # not for meta tensors
            return self._decouple(x, patches)
        with torch.autocast(kind, enabled=False):  # norms are reduced in float32
            return self._decouple(x.to(torch.get_autocast_dtype(kind)), patches)

    def _decouple(self, x: Tensor, patches: LinearMap) -> Tensor:
        r""":math:`h\,g(\theta)`, from the product :math:`\lVert x \rVert \cos\theta` and the patches' norms."""
        weight = self.weight if self.gradient == "exact" else _with_gradient_times_norm(self.weight, patches)
        filters = weight if self._length_cancels else patches.unit_filters(weight)
        if self._is_linear:
            product = patches.product(x, filters)
            product = product if self._length_cancels else patches.to_unit(product, filters, x)
            out = self._times_alpha(patches.group(product), patches)
        else:
            shortest = SHORTEST[x.dtype]
            product, energy = patches.product_and_energy(x, filters)
            product = product if self._length_cancels else patches.to_unit(product, filters, x)
            norm = energy.clamp_min(shortest**2).sqrt()
            c = self._coefficients(norm, x, patches)

            def slope(norm: Tensor, *numbers: Number) -> Tensor:
                """h/‖x‖; 0 at a zero patch for a magnitude that has no limit there."""
                found = self.magnitude.slope(norm, Coefficients(*numbers))
                found = found if isinstance(found, Tensor) else torch.full_like(norm, found)
                return found if self.magnitude.continuous_at_zero else found * (norm > shortest)

            if kernels.scales_in_place(product) and not self._needs_product:
                return kernels.scale_(product, norm, (c.alpha, c.beta, c.radius), slope, patches.group).to(x.dtype)
            ratio = slope(norm, c.alpha, c.beta, c.radius)
            out = self.angular.combine(patches.group(product), norm, ratio)
            if self.weighted == "linear" and not self._length_cancels:
                out = out * patches.seen_norms(self.weight, x)
        if self.blend is not None:
            plain = patches.group(product)
            plain = plain if self._length_cancels else plain * patches.seen_norms(self.weight, x)
            out = plain + self.blend * (out - plain)
        return patches.ungroup(out).to(x.dtype)

    def _times_alpha(self, y: Tensor, patches: LinearMap) -> Tensor:
        alpha = self.magnitude.alpha if self.alpha is None else patches.per_filter(self.alpha.to(y.dtype))
        return scaled(y, alpha)

    @property
    def _length_cancels(self) -> bool:
        """Whether the filters' norms cancel: the operator is h(x)·⟨w, x⟩/‖x‖."""
        return self.weighted == "linear" and isinstance(self.angular, Cosine)

    @property
    def _is_linear(self) -> bool:
        """Whether the input's norm cancels: the operator is α·⟨w, x⟩ or α·⟨w, x⟩/‖w‖."""
        return isinstance(self.magnitude, Linear) and isinstance(self.angular, Cosine)

    @property
    def _needs_product(self) -> bool:
        """Whether backward needs the product itself, and not only its multiple by a slope that is never 0."""
        could_vanish = self.alpha is not None or self.beta is not None
        return could_vanish or self.blend is not None or not isinstance(self.angular, Cosine)

    def _coefficients(self, norm: Tensor, x: Tensor, patches: LinearMap) -> Coefficients:
        """The magnitude's numbers, shaped for the grouped layout; moves the running mean norm."""
        given = self.magnitude.coefficients
        alpha, beta = (
            value if learned is None else patches.per_filter(learned.to(norm.dtype))
            for learned, value in ((self.alpha, given.alpha), (self.beta, given.beta))
        )
        learned_radius = None if self.log_radius is None else _radius_of(self.log_radius).to(norm.dtype)
        own = radius = given.radius if learned_radius is None else patches.per_filter(learned_radius)
        if self.mean_norm is not None:
            radius = scaled(patches.per_group(self._mean_norm(norm, self.mean_norm, patches)), own)
        if self.weighted == "tanh_product":
            radius = radius / patches.seen_norms(self.weight, x).clamp_min(SHORTEST[torch.float32])
        elif self.weighted == "tanh_each":
            alpha = scaled(torch.tanh(patches.seen_norms(self.weight, x) / own), alpha)
        return Coefficients(alpha, beta, radius)

    def _mean_norm(self, norm: Tensor, mean_norm: Tensor, patches: LinearMap) -> Tensor:
        """The mean norm of the patches, the unit of a radius: the batch's in training, otherwise the running one."""
        if not self.training:
            return mean_norm.to(norm.dtype).clamp_min(SHORTEST[norm.dtype])
        totals = patches.sum_in_groups(norm)
        count: int | Tensor = norm.numel() // totals.numel()
        if self.synchronize and several_ranks():
            joined = total(torch.cat([totals, totals.new_tensor([count])]))
            totals, count = joined[:-1], joined[-1].detach()
            mean = totals / count.clamp_min(1)
        else:
            mean = totals / max(count, 1)
        if not inside_backward():  # a checkpointed forward is computed again in backward, and counts once
            self._track({"mean_norm": mean}, count)
        return mean

    # --- options and state ----------------------------------------------------------------------------

    def _set_operator(
        self,
        magnitude: Magnitude,
        angular: Angular,
        weighted: Weighted | None,
        gradient: Gradient,
        momentum: float | None,
        synchronize: bool,
    ) -> None:
        """Check and store the options, and create the operator's parameters and buffers."""
        _check_operator(type(self).__name__, magnitude, angular, weighted, gradient)
        self.magnitude, self.angular, self.weighted, self.gradient = magnitude, angular, weighted, gradient
        self.momentum, self.synchronize = momentum, synchronize
        self._create_state()

    def _create_state(self) -> None:
        """Create the operator's parameters and buffers with their initial values, on the weight's device."""
        filters, groups, _ = self._sizes
        device, dtype = self.weight.device, self.weight.dtype
        for name in ("radius", "alpha", "beta"):
            learned = getattr(self.magnitude, f"learn_{name}", False)
            new = nn.Parameter(torch.empty(filters, device=device, dtype=dtype)) if learned else None
            self.register_parameter("log_radius" if name == "radius" else name, new)
        relative = getattr(self.magnitude, "radius_in", "absolute") == "mean_norm"
        single = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_buffer("mean_norm", torch.empty(groups, device=device, dtype=single) if relative else None)
        count = torch.zeros((), device=device, dtype=torch.long) if relative else None
        self.register_buffer("num_batches_tracked", count)
        self.register_buffer("blend", None)
        self._reset_operator()

    @torch.no_grad()
    def _reset_operator(self) -> None:
        """Set the operator's parameters and buffers to their initial values."""
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
        """Draw the weight anew as torch does, and reset the operator's parameters and buffers."""
        super().reset_parameters()  # type: ignore[misc]  # the torch layer's
        if hasattr(self, "magnitude"):  # torch's constructor calls this before the operator is set
            self._reset_operator()

    @property
    def radius(self) -> Tensor | None:
        """The radius of every filter, in the unit of the magnitude's `radius_in`; None if it has none."""
        if not self.magnitude.has_radius:
            return None
        if self.log_radius is not None:
            return _radius_of(self.log_radius)
        return self.weight.new_full((self._sizes[0],), float(self.magnitude.coefficients.radius))

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"magnitude={self.magnitude!r}", f"angular={self.angular!r}"]
        if self.weighted is not None:
            parts.append(f"weighted={self.weighted!r}")
        if self.gradient != "exact":
            parts.append(f"gradient={self.gradient!r}")
        return ", ".join(parts)

    def _folded_weight(self) -> Tensor:
        """The weight of the torch layer that computes the same."""
        why = None
        if not self._is_linear or self.blend is not None:
            why = "its output is not linear in its input"
        elif not self._length_cancels and self._map.has_phases:
            why = "the norm of its filters differs between outputs"
        if why is not None:
            do = "Only the magnitude Linear with the angular part Cosine is exact."
            raise NotApplicableError("a torch layer that computes the same", type(self).__name__, why, do)
        weight = self.weight if self._length_cancels else self._map.unit_filters(self.weight)
        alpha = self.magnitude.alpha if self.alpha is None else self._map.along_filters(self.alpha, weight)
        return weight * alpha


def _radius_of(log_radius: Tensor) -> Tensor:
    return log_radius.clamp(-LOG_RADIUS, LOG_RADIUS).exp()


def _with_gradient_times_norm(weight: Tensor, patches: LinearMap) -> Tensor:
    r"""The weight itself, whose gradient is multiplied by the norm of each filter.

    An operator that uses :math:`\hat w = w/\lVert w \rVert` has the gradient
    :math:`(I - \hat w \hat w^\top)\, \partial L / \partial \hat w \,/\, \lVert w \rVert`: long filters learn
    slowly. Multiplied by :math:`\lVert w \rVert` it is the same for filters of every length.
    """
    fixed = weight.detach()
    norms = patches.along_filters(patches.filter_norms(fixed), weight).to(weight.dtype)
    return fixed + (weight - fixed) * norms


def _check_operator(
    owner: str, magnitude: object, angular: object, weighted: Weighted | None, gradient: Gradient
) -> None:
    """Raise for options of the wrong type, and for options that contradict each other."""
    if not isinstance(magnitude, Magnitude):
        do = "Pass an object of gonio.nn.magnitude, such as Tanh()."
        raise InvalidArgumentError(f"{owner}: invalid magnitude", repr(magnitude), do)
    if not isinstance(angular, Angular):
        do = "Pass an object of gonio.nn.angular, such as Cosine()."
        raise InvalidArgumentError(f"{owner}: invalid angular", repr(angular), do)
    if weighted is not None and weighted not in get_args(Weighted):
        do = f"Pass None or one of {', '.join(get_args(Weighted))}."
        raise InvalidArgumentError(f"{owner}: invalid weighted", repr(weighted), do)
    if weighted in ("tanh_product", "tanh_each") and not isinstance(magnitude, Tanh):
        problem = f"{owner}: weighted={weighted!r} is defined for the magnitude Tanh only"
        raise InvalidArgumentError(problem, repr(magnitude), 'Pass magnitude=Tanh(…), or weighted="linear".')
    if gradient not in get_args(Gradient):
        do = f"Pass one of {', '.join(get_args(Gradient))}."
        raise InvalidArgumentError(f"{owner}: invalid gradient", repr(gradient), do)
    if gradient == "weighted" and weighted is not None:
        problem = f'{owner}: gradient="weighted" is defined for weighted=None only'
        raise InvalidArgumentError(problem, f"weighted={weighted!r}", 'Pass weighted=None, or gradient="exact".')
