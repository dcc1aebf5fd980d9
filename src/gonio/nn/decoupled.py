r"""The decoupled operator :math:`h(\lVert w \rVert, \lVert x \rVert)\, g(\theta)`, from weight and input to output.

A product :math:`\langle w, x \rangle` and an energy :math:`\lVert x \rVert^2` belong to one *patch*: the inputs that
one output sees. The linear maps are frozen dataclasses with pure methods; :class:`Decoupled` makes an operator of one.

Note [Grouped layout]
Torch's layout of an output is (N, filters, *positions). In the *grouped layout* it is (N, groups, filters
per group, *positions), and a quantity of a patch is (N, groups, 1, *positions), so that it broadcasts over
the filters that see the patch. For a linear layer both are (…, filters), and (…, 1) for a patch.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.errors import NotApplicableError
from gonio.execution import autocast_is_on, inside_backward, is_sharded, ordinary_eager, several_ranks, total
from gonio.geometry import normalize, safe_norm
from gonio.geometry.kernels import applies_to, rescaled
from gonio.geometry.norms import computed_in, full_precision, least_norm, widen
from gonio.nn import kernels
from gonio.nn.conversion import RunningStatistics, check_plain, share_, with_weight_
from gonio.nn.kernels import Number
from gonio.nn.magnitude import SHORTEST, scaled
from gonio.nn.operator import Operator

# The logarithm of a learned coefficient counts within ±10, a factor of 22,026 either way: far beyond use, and its
# exponential is far from the ends of float16.
LOG_LIMIT = 10.0

NARROW = (torch.float16, torch.bfloat16)
FEW = 8  # groups; over more channels a convolution is faster than a pooling, whose backward is faster over few


class LinearMap(ABC):
    """A linear map whose outputs are products of filters with patches of the input."""

    groups: int
    ahead: tuple[int, ...]  # padding that is applied to the input first, as `F.pad` takes it
    padding_mode: str  # of `ahead`, as `F.pad` takes it
    has_phases: ClassVar[bool] = False  # the taps of a filter that meet an output differ between outputs

    @classmethod
    @abstractmethod
    def of(cls, layer: Any) -> Self:
        """The map of a layer."""

    @abstractmethod
    def product(self, x: Tensor, filters: Tensor) -> Tensor:
        """⟨w, x⟩ of every filter and patch, in torch's layout."""

    @abstractmethod
    def energy(self, x: Tensor) -> Tensor:
        """‖x‖² of every patch, in the grouped layout; float32 at least."""

    @abstractmethod
    def sum_in_groups(self, patches: Tensor) -> Tensor:
        """Sums of a quantity of patches over samples and positions, of shape (groups,)."""

    @abstractmethod
    def inputs(self, weight: Tensor) -> int:
        """How many inputs a filter sees."""

    def filters(self, weight: Tensor) -> int:
        """How many filters there are."""
        return len(weight)

    def filter_norms(self, weight: Tensor) -> Tensor:
        """‖w‖ of every filter with all its entries, of shape (filters,); float32 at least."""
        return safe_norm(weight, tuple(range(1, weight.dim())))

    def unit_filters(self, weight: Tensor) -> Tensor:
        """The weight with every filter scaled to norm 1; a zero filter stays zero."""
        unit = rescaled(weight, weight.new_ones(len(weight))) if applies_to(weight) else None
        return normalize(weight, tuple(range(1, weight.dim()))) if unit is None else unit

    def to_unit(self, product: Tensor, filters: Tensor, x: Tensor) -> Tensor:
        """The product with filters of norm 1 as each output sees them, from that with `unit_filters(weight)`."""
        return product

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        """A vector over filters, shaped to broadcast against the weight."""
        return values.reshape(-1, *(1 for _ in weight.shape[1:]))

    def seen_norms(self, weight: Tensor, x: Tensor) -> Tensor:
        """‖w‖ as each output sees it, broadcastable in the grouped layout."""
        return self.spread(self.filter_norms(weight))

    # Layouts, as they are for a linear layer; see Note [Grouped layout].

    def group(self, y: Tensor) -> Tensor:
        """From torch's layout to the grouped one."""
        return y

    def ungroup(self, y: Tensor) -> Tensor:
        """The inverse of `group`."""
        return y

    def spread(self, values: Tensor) -> Tensor:
        """A vector over filters or over groups, shaped to broadcast in the grouped layout."""
        return values


@dataclass(frozen=True)
class DenseMap(LinearMap):
    """The map of a linear layer; the patch is the whole input vector."""

    groups = 1
    ahead = ()
    padding_mode = "constant"

    @classmethod
    def of(cls, layer: Any) -> Self:
        return cls()

    def product(self, x: Tensor, filters: Tensor) -> Tensor:
        return F.linear(x, filters)

    def energy(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype in NARROW else x
        return (x * x).sum(-1, keepdim=True)

    def sum_in_groups(self, patches: Tensor) -> Tensor:
        return patches.sum().reshape(1)

    def inputs(self, weight: Tensor) -> int:
        return weight.shape[1]


@dataclass(frozen=True)
class ConvMap(LinearMap):
    """The map of a convolution over one to three dimensions; zeros that pad the input belong to the patch."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]
    ahead: tuple[int, ...] = ()
    padding_mode: str = "constant"

    transposed: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: Any) -> Self:
        sides = tuple(layer._reversed_padding_repeated_twice)  # before and after, of the last dimension first
        zeros, before, after = (0,) * len(layer.kernel_size), sides[-2::-2], sides[::-2]
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        # torch's convolution has no mode other than zeros, and no uneven padding, as of "same"
        ahead = () if before == after and mode == "constant" else sides
        inside = zeros if ahead else before
        return cls(layer.kernel_size, layer.stride, inside, layer.dilation, layer.groups, zeros, ahead, mode)

    def product(self, x: Tensor, filters: Tensor) -> Tensor:
        sizes = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding)
        return torch.convolution(x, filters, None, *sizes, self.groups)

    def energy(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype in NARROW else x
        squares = (x * x).sum(1, keepdim=True) if self.groups == 1 else self.group(x * x).sum(2)
        # An average pooling supports no dilation and no wide padding; ONNX has none that sums.
        if self.dilation == (1, 1) and not self.transposed and self.groups <= FEW and ordinary_eager(squares):
            (height, width), (rows, columns) = self.kernel, self.padding
            if 2 * rows <= height and 2 * columns <= width:
                return self.group(F.avg_pool2d(squares, self.kernel, self.stride, self.padding, divisor_override=1))
        return self.group(self.product(squares, squares.new_ones(self.groups, 1, *self.kernel)))

    def sum_in_groups(self, patches: Tensor) -> Tensor:
        return patches.sum((0, *range(2, patches.dim())))

    def inputs(self, weight: Tensor) -> int:
        return weight[0].numel()

    def group(self, y: Tensor) -> Tensor:
        return y.unsqueeze(1) if self.groups == 1 else y.unflatten(1, (self.groups, -1))

    def ungroup(self, y: Tensor) -> Tensor:
        return y.flatten(1, 2)

    def spread(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, -1, *[1] * len(self.kernel))


@dataclass(frozen=True)
class ConvTransposeMap(ConvMap):
    r"""The map of a transposed convolution.

    Which taps meet an output depends on its phase in the stride and, at the border, on where the input
    ends. An output's patch is the inputs that reach it, and its filter the taps by which they do: both
    norms are sums over those alone.
    """

    has_phases = True
    transposed = True

    @classmethod
    def of(cls, layer: Any, output_padding: tuple[int, ...] | None = None) -> Self:
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return cls(*sizes, layer.groups, layer.output_padding if output_padding is None else output_padding)

    def filters(self, weight: Tensor) -> int:
        return weight.shape[1] * self.groups

    def inputs(self, weight: Tensor) -> int:
        # a patch holds one tap per input channel and residue of the stride
        taps = math.prod(kernel / stride for kernel, stride in zip(self.kernel, self.stride, strict=True))
        return max(1, round(weight.shape[0] // self.groups * taps))

    def _by_group(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.groups, -1))

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(self._by_group(weight), (1, *range(3, weight.dim() + 1))).flatten()

    def unit_filters(self, weight: Tensor) -> Tensor:
        return normalize(self._by_group(weight), (1, *range(3, weight.dim() + 1))).flatten(0, 1)

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        rows = values.reshape(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return rows.reshape(*weight.shape[:2], *[1] * len(self.kernel))

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
        energy = self.group(self.product(ones, squares))
        zero = energy < least_norm(weight.dtype) ** 2
        return energy.masked_fill(zero, 1), zero


class Decoupled(RunningStatistics):
    """Abstract base of the decoupled layers; their other base is the torch layer that they replace."""

    takes: ClassVar[tuple[type[nn.Module], ...]]  # the torch type that the layer replaces
    options: ClassVar[type] = Operator  # the keyword arguments of its converter
    linear_map: ClassVar[type[LinearMap]]

    operator: Operator
    blends: bool  # whether the plain product has a share of the output, which is 1 - blend
    loads: int = 0  # of states, which may have brought another share
    weight: Tensor
    bias: Any  # torch declares it in two ways
    mean_norm: Tensor | None
    blend: Tensor | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        names = [each.name for each in fields(Operator) if each.name in options]
        operator = Operator(**{name: options.pop(name) for name in names})
        super().__init__(*arguments, **options)  # torch's layer
        self._set_operator_(operator)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "takes" in vars(cls):  # what help(), editors and recipes show
            torchs, own = (inspect.signature(kind).parameters.values() for kind in (*cls.takes, Operator))
            cls.__signature__ = inspect.Signature([*torchs, *own])  # type: ignore[attr-defined]

    # --- from weight and input to output --------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        return self._operate(x, self._map)

    @property
    def _map(self) -> LinearMap:
        """The linear map under the operator."""
        return self.linear_map.of(self)

    def _operate(self, x: Tensor, patches: LinearMap) -> Tensor:
        """The layer's output for an input, batched or not."""
        alone = x.dim() < self.weight.dim()
        x = x.unsqueeze(0) if alone else x
        x = F.pad(x, patches.ahead, patches.padding_mode) if patches.ahead else x
        if autocast_is_on(x):
            with full_precision(x):  # norms are reduced in float32
                out = self._decouple(x.to(torch.get_autocast_dtype(x.device.type)), patches)
        else:
            out = self._decouple(x, patches)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).reshape(-1, *[1] * (self.weight.dim() - 2))
        return out.squeeze(0) if alone else out

    def _decouple(self, x: Tensor, patches: LinearMap) -> Tensor:
        r""":math:`h\,g(\theta)`, from the product :math:`\lVert x \rVert \cos\theta` and the patches' norms."""
        operator, magnitude, angular = self.operator, self.operator.magnitude, self.operator.angular
        weight = self.weight if operator.gradient == "exact" else _with_gradient_times_norm(self.weight, patches)
        raw = operator.takes_raw_filters
        filters = weight if raw else patches.unit_filters(weight)
        # under autocast the input is narrower than the weight; other dtypes that differ raise torch's error
        product = patches.product(x, filters.to(x.dtype) if x.dtype in NARROW else filters)
        if patches.has_phases and not raw:
            product = patches.to_unit(product, filters, x)
        y = patches.group(product)
        if operator.is_linear:
            out = scaled(y, self._own_coefficients(y.dtype, patches)["alpha"])
        else:
            shortest = SHORTEST[x.dtype]
            norm = patches.energy(x).clamp_min(shortest**2).sqrt()
            coefficients = self._coefficients(norm, x, patches)

            def slope(norm: Tensor, **coefficients: Number) -> Tensor:
                """h/‖x‖; 0 at a zero patch for a magnitude that has no limit there."""
                found = magnitude.slope(norm, **coefficients)
                found = found if isinstance(found, Tensor) else torch.full_like(norm, found)
                return found if magnitude.continuous_at_zero else found * (norm > shortest)

            if self._scales_in_place(product):
                closed = magnitude.slope_and_elasticity
                return kernels.scale_(product, norm, coefficients, slope, closed, patches.group).to(x.dtype)
            ratio = slope(norm, **coefficients)
            out = y * ratio if angular.is_cosine else angular.combine(y, norm, ratio)
            if operator.weighted == "linear" and not raw:
                out = out * patches.seen_norms(self.weight, x)
        if self.blends and self.blend is not None:
            plain = y if raw else y * patches.seen_norms(self.weight, x)
            out = plain + self.blend * (out - plain)
        return patches.ungroup(out).to(x.dtype)

    def _scales_in_place(self, product: Tensor) -> bool:
        """Whether to use `kernels.scale_`: backward divides by the slope, which must not be 0, to get the product.

        It pays where the product is large; with a slope as large as the product, of learned coefficients, it always
        does.
        """
        magnitude = self.operator.magnitude
        learned = magnitude.learned
        if self.blends or not self.operator.angular.is_cosine or not learned.keys() <= set(magnitude.positive):
            return False
        large = 0 if learned and magnitude.slope_and_elasticity is not None else kernels.LARGE
        return ordinary_eager(product) and product.numel() >= large  # a symbolic size must not be compared

    def _own_coefficients(self, dtype: torch.dtype, patches: LinearMap) -> dict[str, Number]:
        """The magnitude's coefficients, the learned ones shaped for the grouped layout."""
        magnitude = self.operator.magnitude
        found: dict[str, Number] = dict(magnitude.coefficients)
        for name in magnitude.learned:
            found[name] = patches.spread(self._learned(name).to(dtype))
        return found

    def _coefficients(self, norm: Tensor, x: Tensor, patches: LinearMap) -> dict[str, Number]:
        """The magnitude's coefficients in the units of `norm`; moves the running mean norm."""
        magnitude, weighted = self.operator.magnitude, self.operator.weighted
        found = self._own_coefficients(norm.dtype, patches)
        if weighted is not None and weighted != "linear":
            found = magnitude.with_lengths(weighted, patches.seen_norms(self.weight, x), found)
        if self.mean_norm is not None:
            mean = patches.spread(self._mean_norm(norm, self.mean_norm, patches))
            for name in magnitude.in_mean_norms:
                found[name] = scaled(mean, found[name])
        return found

    def _mean_norm(self, norm: Tensor, running: Tensor, patches: LinearMap) -> Tensor:
        """The mean norm of the patches: the batch's in training, which moves the running one, otherwise that one.

        The first batch replaces the running mean norm; one without patches leaves it.
        """
        if not self.training:
            return running.to(norm.dtype).clamp_min(SHORTEST[norm.dtype])
        totals = patches.sum_in_groups(norm)
        own = norm.numel() // totals.numel()
        seen: Any  # whether the batch has patches; of several processes, a tensor
        if self.operator.synchronize and several_ranks(self.operator.process_group):
            if is_sharded(totals):
                why = "tensor parallelism gives every process the whole batch, whose mean norms need no joining"
                do = "Construct it with synchronize=False."
                raise NotApplicableError(f"{type(self).__name__}.forward", "", why, do)
            joined = total(torch.cat([totals, totals.new_full((1,), own)]), self.operator.process_group)
            totals, count = joined[:-1], joined[-1].detach()
            mean, seen = totals / count.clamp_min(1), count > 0
        else:
            mean, seen = totals / max(own, 1), own > 0
        if inside_backward():  # a checkpointed forward is computed again in backward, and counts once
            return mean
        with torch.no_grad():
            batches, momentum = self.num_batches_tracked.add_(seen), self.operator.momentum
            if momentum is None:
                share = batches.clamp_min(1).to(running.dtype).reciprocal()
            else:
                share = (batches <= 1).to(running.dtype).clamp_min(momentum)
            running.lerp_(mean.to(running.dtype), share if seen is True else share * seen)
        return mean

    # --- options and state ----------------------------------------------------------------------------

    def _set_operator_(self, operator: Operator) -> None:
        """Store the options, and create the operator's parameters and buffers on the weight's device."""
        self.operator, self.blends = operator, False
        magnitude, patches = operator.magnitude, self._map
        device, dtype = self.weight.device, self.weight.dtype
        for key in magnitude.learned.values():
            new = torch.empty(patches.filters(self.weight), device=device, dtype=dtype)
            self.register_parameter(key, nn.Parameter(new))
        relative = bool(magnitude.in_mean_norms)
        mean_norm = torch.empty(patches.groups, device=device, dtype=computed_in(dtype)) if relative else None
        self.register_buffer("mean_norm", mean_norm)
        count = torch.zeros((), device=device, dtype=torch.long) if relative else None
        self.register_buffer("num_batches_tracked", count)
        self.register_buffer("blend", None)
        self._reset_operator_()

    @torch.no_grad()
    def _reset_operator_(self) -> None:
        """Set the operator's parameters and buffers to their initial values."""
        magnitude = self.operator.magnitude
        for name, key in magnitude.learned.items():
            given = magnitude.coefficients[name]
            getattr(self, key).fill_(math.log(given) if name in magnitude.positive else given)
        if self.mean_norm is not None:
            # the norm of a patch with entries of unit variance, until the first batch is seen
            self.mean_norm.fill_(math.sqrt(self._map.inputs(self.weight)))
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Draw the weight anew as torch does, and reset the operator's parameters and buffers."""
        super().reset_parameters()  # type: ignore[misc]  # the torch layer's
        if hasattr(self, "operator"):  # torch's constructor calls this before the operator is set
            self._reset_operator_()

    def _learned(self, name: str) -> Tensor:
        """A learned coefficient, one number per filter."""
        magnitude = self.operator.magnitude
        values: Tensor = getattr(self, magnitude.learned[name])
        return values.clamp(-LOG_LIMIT, LOG_LIMIT).exp() if name in magnitude.positive else values

    @property
    def radius(self) -> Tensor | None:
        """The radius of every filter, in the unit of the magnitude's `radius_in`; None if it has none."""
        magnitude = self.operator.magnitude
        if "radius" in magnitude.learned:
            return self._learned("radius")
        given = magnitude.coefficients.get("radius")
        return None if given is None else self.weight.new_full((self._map.filters(self.weight),), given)

    def set_blend_(self, share: float | Tensor | None, *, ended: bool = False) -> None:
        """Give the decoupled product a share of the output, of 0 to 1, and the plain product the rest.

        None removes the buffer `blend`. With `ended` the plain product is no longer computed; the buffer stays, because
        averages of models pair buffers, or state dicts, by their order.
        """
        value = None if share is None else torch.as_tensor(share, dtype=torch.float32, device=self.weight.device)
        kept = value if value is None or self.blend is None else self.blend.copy_(value)
        self.register_buffer("blend", kept)
        self.blends = value is not None and not ended

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """As torch's; a state from a gradual conversion brings its share, any other has the share 1, where it ended."""
        key = f"{prefix}blend"
        if self.blend is None and key in state_dict:
            self.set_blend_(1.0)
        elif self.blend is not None:
            state_dict.setdefault(key, torch.ones((), dtype=torch.float32))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.blend is not None and not self.blend.is_meta:
            self.blends = bool(self.blend < 1)
        self.loads += 1

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        for each in fields(Operator)[:4]:
            value = getattr(self.operator, each.name)
            if each.name in ("magnitude", "angular") or value != each.default:
                parts.append(f"{each.name}={value!r}")
        return ", ".join(parts)

    # --- conversion ---------------------------------------------------------------------------------------

    @classmethod
    def _from_plain(cls, layer: nn.Module, verb: str, options: dict[str, Any]) -> Self:
        check_plain(layer, cls.takes[0], verb=verb)
        weight = layer._parameters["weight"]
        if weight is None or is_lazy(weight) or not weight.is_floating_point():
            why = "its weight is not a real floating-point tensor with a shape"
            raise NotApplicableError(verb, type(layer).__name__, why, "Leave the layer out.")
        new = share_(cls(**_arguments(cls.takes[0], layer), **options), layer)
        new._set_operator_(new.operator)  # on the device and in the dtype of the weight
        return new

    def _to_plain_product(self) -> Any:
        """The torch layer on the same Parameter objects: its product is the plain one."""
        return share_(self.takes[0](**_arguments(self.takes[0], self)), self)

    def to_plain(self) -> Any:
        """A torch layer with parameters of its own that computes the same; raises where none does."""
        operator, patches, why = self.operator, self._map, None
        if not operator.is_linear or self.blends:
            why = "its output is not linear in its input"
        elif not operator.takes_raw_filters and patches.has_phases:
            why = "the norm of its filters differs between outputs"
        if why is not None:
            do = "Only the magnitude Linear with the angular part Cosine is exact."
            raise NotApplicableError("a torch layer that computes the same", type(self).__name__, why, do)
        weight = self.weight if operator.takes_raw_filters else patches.unit_filters(self.weight)
        alpha: Number = operator.magnitude.alpha
        if "alpha" in operator.magnitude.learned:
            alpha = patches.along_filters(self._learned("alpha"), weight)
        return with_weight_(self._to_plain_product(), weight * alpha)


def _arguments(kind: type[nn.Module], layer: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a torch layer of the same shape, on the meta device: its parameters are shared."""
    names = inspect.signature(kind).parameters.keys() - {"bias", "device", "dtype"}
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None, "device": "meta"}


def _with_gradient_times_norm(weight: Tensor, patches: LinearMap) -> Tensor:
    r"""The weight itself, whose gradient is multiplied by the norm of each filter.

    An operator that uses :math:`\hat w = w/\lVert w \rVert` has the gradient
    :math:`(I - \hat w \hat w^\top)\, \partial L / \partial \hat w \,/\, \lVert w \rVert`: long filters learn
    slowly. Multiplied by :math:`\lVert w \rVert` it is the same for filters of every length.
    """
    fixed = weight.detach()
    norms = patches.along_filters(patches.filter_norms(fixed), weight).to(weight.dtype)
    return fixed + (weight - fixed) * norms
