r"""The linear maps under decoupled layers: the product with every filter, and the energy of every patch.

A product :math:`\langle w, x \rangle` and an energy :math:`\lVert x \rVert^2` belong to one *patch*: the
inputs that one output sees. Each map is a frozen dataclass with pure methods.

Note [Grouped layout]
Torch's layout of an output is (N, filters, *positions). In the *grouped layout* it is (N, groups, filters
per group, *positions), and a quantity of a patch is (N, groups, 1, *positions), so that it broadcasts over
the filters that see the patch. For a linear layer both are (…, filters), and (…, 1) for a patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gonio.execution import ordinary_eager
from gonio.geometry import normalize, safe_norm
from gonio.geometry.norms import least_norm, widen
from gonio.nn import kernels

__all__ = ["NARROW", "ConvMap", "ConvTransposeMap", "DenseMap", "LinearMap"]

NARROW = (torch.float16, torch.bfloat16)
FEW = 8  # groups; over more channels a convolution is faster than an average pooling


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
        """The weight with every filter scaled to norm 1."""
        return normalize(weight, tuple(range(1, weight.dim())))

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        """A vector over filters, shaped to broadcast against the weight."""
        return values.reshape(-1, *(1 for _ in weight.shape[1:]))

    def seen_norms(self, weight: Tensor, x: Tensor) -> Tensor:
        """‖w‖ as each output sees it, broadcastable in the grouped layout."""
        return self.per_filter(self.filter_norms(weight))

    @abstractmethod
    def group(self, y: Tensor) -> Tensor:
        """From torch's layout to the grouped one."""

    @abstractmethod
    def ungroup(self, y: Tensor) -> Tensor:
        """The inverse of `group`."""

    @abstractmethod
    def per_filter(self, values: Tensor) -> Tensor:
        """A vector over filters, shaped to broadcast in the grouped layout."""

    @abstractmethod
    def per_group(self, values: Tensor) -> Tensor:
        """A vector over groups, shaped to broadcast in the grouped layout."""

    @abstractmethod
    def sum_in_groups(self, patches: Tensor) -> Tensor:
        """Sums of a quantity of patches over samples and positions, of shape (groups,)."""


@dataclass(frozen=True)
class DenseMap(LinearMap):
    """The map of a linear layer; the patch is the whole input vector."""

    def _multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        return F.linear(x, filters)

    def energy(self, x: Tensor) -> Tensor:
        x = widen(x)
        return (x * x).sum(-1, keepdim=True)

    def group(self, y: Tensor) -> Tensor:
        return y

    def ungroup(self, y: Tensor) -> Tensor:
        return y

    def per_filter(self, values: Tensor) -> Tensor:
        return values

    def per_group(self, values: Tensor) -> Tensor:
        return values

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
        if not kernels.squares_beside_product(x):
            return super().product_and_energy(x, filters)
        product, squares = kernels.product_with_squares(x, filters, self)
        return product, self.over_patches(squares)

    def energy(self, x: Tensor) -> Tensor:
        return self.over_patches(self.squares(x))

    def squares(self, x: Tensor) -> Tensor:
        """Σ x² over the channels of each group."""
        x = widen(x)
        return (x * x).sum(1, keepdim=True) if self.groups == 1 else self.group(x * x).sum(2)

    def over_patches(self, squares: Tensor) -> Tensor:
        """Sums over the windows of the kernel, in the grouped layout."""
        if self._pools and ordinary_eager(squares):
            return self.group(kernels.window_sum(squares, self.kernel, self.stride, self.padding))
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
