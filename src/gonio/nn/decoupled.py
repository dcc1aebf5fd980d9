r"""The decoupled operator :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta)`, from weight and input to output.

A product :math:`\langle w, x \rangle` and an energy :math:`\lVert x \rVert^2` belong to one *patch*: the inputs that
one output sees. The linear maps are frozen dataclasses with pure methods; :class:`Decoupled` makes an operator of one.

Note [Grouped layout]
Torch's layout of an output is (N, filters, *positions). In the *grouped layout* it is (N, groups, filters
per group, *positions), and a quantity of a patch is (N, groups, 1, *positions), so that it broadcasts over
the filters that see the patch. For a linear layer both are (…, filters), and (…, 1) for a patch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.execution import (
    ProcessGroup,
    autocast_is_on,
    inside_backward,
    is_sharded,
    ordinary_eager,
    several_ranks,
    total,
)
from gonio.geometry import normalize, safe_norm
from gonio.geometry.kernels import applies_to, rescaled
from gonio.geometry.norms import full_precision, least_norm, widen
from gonio.nn import kernels
from gonio.nn.angular import Angular, Cosine
from gonio.nn.conversion import RunningStatistics
from gonio.nn.magnitude import Coefficients, Magnitude, Number, Tanh, scaled

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

NARROW = (torch.float16, torch.bfloat16)
FEW = 8  # groups; over more channels a convolution is faster than a pooling, whose backward is faster over few


class LinearMap(ABC):
    """A linear map whose outputs are products of filters with patches of the input."""

    has_phases: ClassVar[bool] = False  # the taps of a filter that meet an output differ between outputs

    def product(self, x: Tensor, filters: Tensor) -> Tensor:
        """⟨w, x⟩ of every filter and patch, in torch's layout."""
        # under autocast the input is narrower than the weight; otherwise a no-op, or torch's own dtype error
        return self._multiply(x, filters.to(x.dtype) if x.dtype in NARROW else filters)

    @abstractmethod
    def _multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        """⟨w, x⟩ of every filter and patch, in torch's layout, for one dtype."""

    def product_and_energy(self, x: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and ‖x‖² of every patch in the grouped layout, float32 at least."""
        return self.product(x, filters), self.energy(x)

    def to_unit(self, product: Tensor, filters: Tensor, x: Tensor) -> Tensor:
        """The product with filters of norm 1 as each output sees them, from that with `unit_filters(weight)`."""
        return product

    @abstractmethod
    def energy(self, x: Tensor) -> Tensor:
        """‖x‖² of every patch, in the grouped layout; float32 at least."""

    def filter_norms(self, weight: Tensor) -> Tensor:
        """‖w‖ of every filter with all its entries, of shape (filters,); float32 at least."""
        return safe_norm(weight, tuple(range(1, weight.dim())))

    def unit_filters(self, weight: Tensor) -> Tensor:
        """The weight with every filter scaled to norm 1; a zero filter stays zero."""
        unit = rescaled(weight, weight.new_ones(len(weight))) if applies_to(weight) else None
        return normalize(weight, tuple(range(1, weight.dim()))) if unit is None else unit

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        """A vector over filters, shaped to broadcast against the weight."""
        return values.reshape(-1, *(1 for _ in weight.shape[1:]))

    def seen_norms(self, weight: Tensor, x: Tensor) -> Tensor:
        """‖w‖ as each output sees it, broadcastable in the grouped layout."""
        return self.per_filter(self.filter_norms(weight))

    @abstractmethod
    def sum_in_groups(self, patches: Tensor) -> Tensor:
        """Sums of a quantity of patches over samples and positions, of shape (groups,)."""

    # Layouts, as they are for a linear layer; see Note [Grouped layout].

    def group(self, y: Tensor) -> Tensor:
        """From torch's layout to the grouped one."""
        return y

    def ungroup(self, y: Tensor) -> Tensor:
        """The inverse of `group`."""
        return y

    def per_filter(self, values: Tensor) -> Tensor:
        """A vector over filters, shaped to broadcast in the grouped layout."""
        return values

    def per_group(self, values: Tensor) -> Tensor:
        """A vector over groups, shaped to broadcast in the grouped layout."""
        return values


@dataclass(frozen=True)
class DenseMap(LinearMap):
    """The map of a linear layer; the patch is the whole input vector."""

    def _multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        return F.linear(x, filters)

    def energy(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype in NARROW else x
        return (x * x).sum(-1, keepdim=True)

    def sum_in_groups(self, patches: Tensor) -> Tensor:
        return patches.sum().reshape(1)


@dataclass(frozen=True)
class ConvMap(LinearMap):
    """The map of a convolution over one to three dimensions; zeros that pad the input belong to the patch."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]

    transposed: ClassVar[bool] = False

    def _multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        return torch.convolution(x, filters, None, *self._options)

    @property
    def _options(self) -> tuple[Any, ...]:
        """The arguments of torch.convolution after the bias."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def product_backward(
        self, grad: Tensor, x: Tensor, filters: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of `product` for the input and the filters, where needed."""
        wanted = (needed[0], needed[1], False)
        by_x, by_filters, _ = torch.ops.aten.convolution_backward(grad, x, filters, None, *self._options, wanted)
        return by_x, by_filters

    def product_and_energy(self, x: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
        if ordinary_eager(x) and x.numel() >= kernels.LARGE and x.dtype not in NARROW:
            product, squares = kernels.product_with_squares(x, filters, self)
            return product, self.over_patches(squares)
        return super().product_and_energy(x, filters)

    def energy(self, x: Tensor) -> Tensor:
        return self.over_patches(self.squares(x))

    def squares(self, x: Tensor) -> Tensor:
        """Σ x² over the channels of each group."""
        x = x.float() if x.dtype in NARROW else x
        return (x * x).sum(1, keepdim=True) if self.groups == 1 else self.group(x * x).sum(2)

    def over_patches(self, squares: Tensor) -> Tensor:
        """Sums over the windows of the kernel, in the grouped layout."""
        if self._pools and ordinary_eager(squares):  # ONNX has no pooling that sums
            return self.group(F.avg_pool2d(squares, self.kernel, self.stride, self.padding, divisor_override=1))
        return self.group(self._multiply(squares, squares.new_ones(self.groups, 1, *self.kernel)))

    @property
    def _pools(self) -> bool:
        """Whether sums over patches are those of an average pooling, which knows no dilation and no wide padding."""
        few = all(2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True)) and self.groups <= FEW
        return few and len(self.kernel) == 2 and not self.transposed and self.dilation == (1, 1)

    def group(self, y: Tensor) -> Tensor:
        return y.unsqueeze(1) if self.groups == 1 else y.unflatten(1, (self.groups, -1))

    def ungroup(self, y: Tensor) -> Tensor:
        return y.flatten(1, 2)

    def per_filter(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, -1, *(1 for _ in self.kernel))

    def per_group(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, 1, *(1 for _ in self.kernel))

    def sum_in_groups(self, patches: Tensor) -> Tensor:
        return patches.sum((0, *range(2, patches.dim())))


@dataclass(frozen=True)
class ConvTransposeMap(ConvMap):
    r"""The map of a transposed convolution.

    Which taps meet an output depends on its phase in the stride and, at the border, on where the input
    ends. An output's patch is the inputs that reach it, and its filter the taps by which they do: both
    norms are sums over those alone.
    """

    has_phases = True
    transposed = True

    def _by_group(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.groups, -1))

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(self._by_group(weight), (1, *range(3, weight.dim() + 1))).flatten()

    def unit_filters(self, weight: Tensor) -> Tensor:
        return normalize(self._by_group(weight), (1, *range(3, weight.dim() + 1))).flatten(0, 1)

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        rows = values.reshape(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return rows.reshape(*weight.shape[:2], *(1 for _ in self.kernel))

    def seen_norms(self, weight: Tensor, x: Tensor) -> Tensor:
        energy, zero = self._seen_energy(weight, x)
        return energy.sqrt().masked_fill(zero, 0)

    def to_unit(self, product: Tensor, filters: Tensor, x: Tensor) -> Tensor:
        energy, zero = self._seen_energy(filters, x)
        return self.ungroup(self.group(product) * energy.rsqrt().masked_fill(zero, 0)).to(product.dtype)

    def _seen_energy(self, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """‖w‖² as each output sees it, with 1 in place of 0, and where that is; in the grouped layout."""
        squares = widen(self._by_group(weight))
        squares = (squares * squares).sum(1)
        # torch refuses a map without positions, unless there are no samples either
        ones = squares.new_ones(1 if x.shape[0] else 0, self.groups, *x.shape[2:])
        energy = self.group(self._multiply(ones, squares))
        zero = energy < least_norm(weight.dtype) ** 2
        return energy.masked_fill(zero, 1), zero


class Decoupled(RunningStatistics):
    """Abstract base of the decoupled layers; their other base is the torch layer."""

    magnitude: Magnitude
    angular: Angular
    weighted: Weighted | None
    gradient: Gradient
    synchronize: bool
    process_group: ProcessGroup | None
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
        if not autocast_is_on(x):
            return self._decouple(x, patches)
        with full_precision(x):  # norms are reduced in float32
            return self._decouple(x.to(torch.get_autocast_dtype(x.device.type)), patches)

    def _decouple(self, x: Tensor, patches: LinearMap) -> Tensor:
        r""":math:`h\,g(\theta)`, from the product :math:`\lVert x \rVert \cos\theta` and the patches' norms."""
        weight = self.weight if self.gradient == "exact" else _with_gradient_times_norm(self.weight, patches)
        filters = weight if self._length_cancels else patches.unit_filters(weight)
        product, energy = (
            (patches.product(x, filters), None) if self._is_linear else patches.product_and_energy(x, filters)
        )
        product = product if self._length_cancels else patches.to_unit(product, filters, x)
        y = patches.group(product)
        if energy is None:
            out = scaled(y, self.magnitude.alpha if self.alpha is None else patches.per_filter(self.alpha.to(y.dtype)))
        else:
            shortest = SHORTEST[x.dtype]
            norm = energy.clamp_min(shortest**2).sqrt()
            c = self._coefficients(norm, x, patches)

            def slope(norm: Tensor, *numbers: Number) -> Tensor:
                """h/‖x‖; 0 at a zero patch for a magnitude that has no limit there."""
                found = self.magnitude.slope(norm, Coefficients(*numbers))
                found = found if isinstance(found, Tensor) else torch.full_like(norm, found)
                return found if self.magnitude.continuous_at_zero else found * (norm > shortest)

            if ordinary_eager(product) and product.numel() >= self._large and not self._needs_product:
                numbers, closed = (c.alpha, c.beta, c.radius), self.magnitude.closed
                return kernels.scale_(product, norm, numbers, slope, closed, patches.group).to(x.dtype)
            ratio = slope(norm, c.alpha, c.beta, c.radius)
            out = y * ratio if self.angular.is_cosine else self.angular.combine(y, norm, ratio)
            if self.weighted == "linear" and not self._length_cancels:
                out = out * patches.seen_norms(self.weight, x)
        if self.blend is not None:
            plain = y if self._length_cancels else y * patches.seen_norms(self.weight, x)
            out = plain + self.blend * (out - plain)
        return patches.ungroup(out).to(x.dtype)

    @property
    def _length_cancels(self) -> bool:
        """Whether the filters' norms cancel: the operator is h(x)·⟨w, x⟩/‖x‖."""
        return self.weighted == "linear" and self.angular.is_cosine

    @property
    def _is_linear(self) -> bool:
        """Whether the input's norm cancels: the operator is α·⟨w, x⟩ or α·⟨w, x⟩/‖w‖."""
        return self.magnitude.is_linear and self.angular.is_cosine

    @property
    def _large(self) -> int:
        """Entries of a product from which it is scaled in place; learned radii make slopes as large as the product."""
        return kernels.LARGE if self.log_radius is None or self.magnitude.closed is None else 0

    @property
    def _needs_product(self) -> bool:
        """Whether backward needs the product itself, and not only its multiple by a slope that is never 0."""
        could_vanish = self.alpha is not None or self.beta is not None
        return could_vanish or self.blend is not None or not self.angular.is_cosine

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
        own = norm.numel() // totals.numel()
        count: int | Tensor = own
        if self.synchronize and several_ranks(self.process_group):
            if is_sharded(totals):
                why = "tensor parallelism gives every process the whole batch, whose mean norms need no joining"
                raise NotApplicableError(
                    f"{type(self).__name__}.forward", "", why, "Construct it with synchronize=False."
                )
            joined = total(torch.cat([totals, totals.new_full((1,), own)]), self.process_group)
            totals, count = joined[:-1], joined[-1].detach()
            mean = totals / count.clamp_min(1)
        else:
            mean = totals / max(own, 1)
        if not inside_backward():  # a checkpointed forward is computed again in backward, and counts once
            self._track_(mean_norm, mean, count)
        return mean

    @torch.no_grad()
    def _track_(self, running: Tensor, mean: Tensor, count: Tensor | int) -> None:
        """Move the running mean norm towards that of a batch: at first all the way, and not for `count` 0 patches."""
        seen = count > 0
        batches = self.num_batches_tracked.add_(seen)
        if self.momentum is None:
            share = (1 / batches.clamp_min(1)).to(running.dtype)
        else:
            share = (batches <= 1).to(running.dtype).clamp_min(self.momentum)
        running.lerp_(mean.to(running.dtype), share if seen is True else share * seen)

    # --- options and state ----------------------------------------------------------------------------

    def _set_operator(
        self,
        magnitude: Magnitude,
        angular: Angular,
        weighted: Weighted | None,
        gradient: Gradient,
        momentum: float | None,
        synchronize: bool,
        process_group: ProcessGroup | None,
    ) -> None:
        """Check and store the options, and create the operator's parameters and buffers on the weight's device."""
        _check_operator(type(self).__name__, magnitude, angular, weighted, gradient)
        self.magnitude, self.angular, self.weighted, self.gradient = magnitude, angular, weighted, gradient
        self.momentum, self.synchronize, self.process_group = momentum, synchronize, process_group
        filters, groups, _ = self._sizes
        device, dtype = self.weight.device, self.weight.dtype
        for name in ("radius", "alpha", "beta"):
            learned = getattr(magnitude, f"learn_{name}", False)
            new = nn.Parameter(torch.empty(filters, device=device, dtype=dtype)) if learned else None
            self.register_parameter("log_radius" if name == "radius" else name, new)
        relative = getattr(magnitude, "radius_in", "absolute") == "mean_norm"
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
    weightings = get_args(Weighted)
    for name, value, valid, do in (
        ("magnitude", magnitude, isinstance(magnitude, Magnitude), "an object of gonio.nn.magnitude, such as Tanh()"),
        ("angular", angular, isinstance(angular, Angular), "an object of gonio.nn.angular, such as Cosine()"),
        ("weighted", weighted, weighted in (None, *weightings), f"None or one of {', '.join(weightings)}"),
        ("gradient", gradient, gradient in get_args(Gradient), f"one of {', '.join(get_args(Gradient))}"),
    ):
        if not valid:
            raise InvalidArgumentError(f"{owner}: invalid {name}", repr(value), f"Pass {do}.")
    if weighted in ("tanh_product", "tanh_each") and not isinstance(magnitude, Tanh):
        problem = f"{owner}: weighted={weighted!r} is defined for the magnitude Tanh only"
        raise InvalidArgumentError(problem, repr(magnitude), 'Pass magnitude=Tanh(…), or weighted="linear".')
    if gradient == "weighted" and weighted is not None:
        problem = f'{owner}: gradient="weighted" is defined for weighted=None only'
        raise InvalidArgumentError(problem, f"weighted={weighted!r}", 'Pass weighted=None, or gradient="exact".')
