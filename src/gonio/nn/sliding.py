"""The linear maps of convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gonio.geometry import normalize, safe_norm
from gonio.geometry.norms import least_norm
from gonio.nn.box import box_spread, box_sum
from gonio.nn.fused import ordinary_eager
from gonio.nn.product import Product, wide

__all__ = ["Convolution", "Sliding", "TransposedConvolution"]

MANY = 16  # groups, of which a convolution by group works on a vector of the machine at a time


@dataclass(frozen=True)
class Sliding(Product):
    """Abstract: a map with a kernel that slides over one to three spatial dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]

    transposed = False

    def multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        return torch.convolution(
            x,
            filters,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def multiply_backward(
        self, grad: Tensor, x: Tensor, filters: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        by_input, by_filters, _ = self._backward(grad, x, filters, needed)
        return by_input, by_filters

    def _backward(self, grad: Tensor, x: Tensor, filters: Tensor, needed: Sequence[bool]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = torch.ops.aten.convolution_backward(
            grad,
            x,
            filters,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            (needed[0], needed[1], False),
        )
        return found

    def squares(self, x: Tensor) -> Tensor:
        squares = wide(x)
        squares = squares * squares
        if self.groups == 1:
            return squares.sum(1, keepdim=True)
        return squares if self.groups == x.shape[1] else squares.unflatten(1, (self.groups, -1)).sum(2)

    def over_patches(self, squares: Tensor) -> Tensor:
        if not self._by_slices:
            return self.multiply(squares, self._box(squares))
        if self.transposed:
            return box_spread(squares, self._size(squares.shape[2:]), *self._steps)
        return box_sum(squares, *self._steps)

    @property
    def _steps(self) -> tuple[tuple[int, ...], ...]:
        return self.kernel, self.stride, self.padding, self.dilation

    @property
    def _by_slices(self) -> bool:
        """Whether slices are summed: convolutions are for compilers, and for maps of many channels."""
        return self.groups < MANY and ordinary_eager()

    def _size(self, size: Sequence[int]) -> list[int]:
        """The size of a transposed convolution's output."""
        options = zip(size, *self._steps, self.output_padding, strict=True)
        return [(n - 1) * step - 2 * edge + gap * (taps - 1) + more + 1 for n, taps, step, edge, gap, more in options]

    def _box(self, like: Tensor) -> Tensor:
        return like.new_ones(self.groups, 1, *self.kernel)

    def energy_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        if self._by_slices and self.transposed:
            return self.group(box_sum(grad, *self._steps))
        if self._by_slices:
            return self.group(box_spread(grad, x.shape[2:], *self._steps))
        shape_alone = grad.new_empty(1).expand(x.shape[0], self.groups, *x.shape[2:])
        spread, *_ = self._backward(grad, shape_alone, self._box(grad), (True, False))
        return self.group(spread)

    def group_input(self, x: Tensor) -> Tensor:
        return self.group(x)

    def group(self, y: Tensor) -> Tensor:
        return y.unsqueeze(1) if self.groups == 1 else y.unflatten(1, (self.groups, -1))

    def ungroup(self, y: Tensor) -> Tensor:
        return y.flatten(1, 2)

    def per_filter(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, -1, *(1 for _ in self.kernel))

    def per_group(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, 1, *(1 for _ in self.kernel))

    def over_groups(self, patches: Tensor) -> Tensor:
        return patches.sum((0, *range(2, patches.dim())))


@dataclass(frozen=True)
class Convolution(Sliding):
    """The map of a convolution; zeros that pad the input belong to the patch."""

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(weight, tuple(range(1, weight.dim())))

    def filters(self, weight: Tensor) -> Tensor:
        return normalize(weight, tuple(range(1, weight.dim())))


@dataclass(frozen=True)
class TransposedConvolution(Sliding):
    r"""The map of a transposed convolution.

    Which taps meet an output depends on its phase in the stride and, at the border, on where the input
    ends. An output's patch is the inputs that reach it, and its filter the taps by which they do: both
    norms are sums over those alone.
    """

    transposed = True
    has_phases = True

    def _by_group(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.groups, -1))

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(self._by_group(weight), (1, *range(3, weight.dim() + 1))).flatten()

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        inputs = weight.shape[0] // self.groups
        rows = values.reshape(self.groups, -1).repeat_interleave(inputs, 0)
        return rows.reshape(*weight.shape[:2], *(1 for _ in self.kernel))

    def filters(self, weight: Tensor) -> Tensor:
        return normalize(self._by_group(weight), (1, *range(3, weight.dim() + 1))).flatten(0, 1)

    def lengths(self, weight: Tensor, x: Tensor) -> Tensor:
        energy, zero = self._energy_of_filters(weight, x)
        return energy.sqrt().masked_fill(zero, 0)

    def to_unit(self, y: Tensor, filters: Tensor, x: Tensor) -> Tensor:
        energy, zero = self._energy_of_filters(filters, x)
        return self.ungroup(self.group(y) * energy.rsqrt().masked_fill(zero, 0))

    def _energy_of_filters(self, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """‖w‖² as each output sees it, with 1 in place of 0, and where that is; in the grouped layout."""
        squares = wide(self._by_group(weight))
        squares = (squares * squares).sum(1)
        ones = squares.new_ones(1, self.groups, *x.shape[2:])
        energy = self.group(self.multiply(ones, squares))
        zero = energy < least_norm(weight.dtype) ** 2
        return energy.masked_fill(zero, 1), zero
