r"""The linear maps under decoupled layers: the product with every filter, and the energy of every patch.

Each map is a frozen dataclass with pure methods. Tensors come in the *grouped layout*: products have
the shape (N, groups, filters per group, *positions), energies (N, groups, 1, *positions), so that
what belongs to a patch broadcasts over the filters that see it. For a linear layer products are
(…, filters) and energies (…, 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gonio.geometry import normalize, safe_norm

__all__ = ["Convolution", "LinearMap", "Product"]


class Product(ABC):
    """A linear map whose outputs are products of filters with patches of the input."""

    @abstractmethod
    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """⟨w, x⟩ for every filter and patch, in torch's layout."""

    @abstractmethod
    def energy(self, x: Tensor, weight: Tensor) -> Tensor:
        """‖x‖² of every patch, in torch's layout with one channel per group; float32 at least."""

    @abstractmethod
    def directions(self, weight: Tensor) -> Tensor:
        """The weight with every filter scaled to norm 1; a zero filter stays zero."""

    @abstractmethod
    def filter_norms(self, weight: Tensor) -> Tensor:
        """‖w‖ of every filter, of shape (filters,); float32 at least."""

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
    def position_dims(self, grouped: Tensor) -> tuple[int, ...]:
        """The dimensions of the grouped layout over which an input's patches extend, the batch among them."""


def wide(x: Tensor) -> Tensor:
    """At least float32: squares of float16 overflow beyond 256."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True)
class LinearMap(Product):
    """The map of a linear layer; a patch is the whole input vector."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def energy(self, x: Tensor, weight: Tensor) -> Tensor:
        x = wide(x)
        return (x * x).sum(-1, keepdim=True)

    def directions(self, weight: Tensor) -> Tensor:
        return normalize(weight, 1)

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(weight, 1)

    def group(self, y: Tensor) -> Tensor:
        return y

    def ungroup(self, y: Tensor) -> Tensor:
        return y

    def per_filter(self, values: Tensor) -> Tensor:
        return values

    def per_group(self, values: Tensor) -> Tensor:
        return values

    def position_dims(self, grouped: Tensor) -> tuple[int, ...]:
        return tuple(range(grouped.dim()))


@dataclass(frozen=True)
class Convolution(Product):
    """The map of a convolution of one to three dimensions.

    Padding that torch's convolution cannot express (a mode other than zeros, an uneven "same") is done
    before, by `surround`; `padding` is what remains for the convolution itself.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    surround: tuple[int, ...] = ()
    surround_mode: str = "constant"

    @classmethod
    def of(cls, layer: nn.modules.conv._ConvNd) -> Convolution:
        """The map of a torch convolution."""
        ahead = tuple(layer._reversed_padding_repeated_twice)
        uneven = any(ahead[i] != ahead[i + 1] for i in range(0, len(ahead), 2))
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inside = mode == "constant" and not uneven
        size = tuple(reversed(ahead[::2])) if inside else (0,) * (len(ahead) // 2)
        outside = () if inside else ahead
        return cls(layer.stride, size, layer.dilation, layer.groups, outside, mode)

    def prepare(self, x: Tensor) -> Tensor:
        """The input with the padding that the convolution cannot do itself."""
        return F.pad(x, self.surround, self.surround_mode) if self.surround else x

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._convolve(x, weight, self.groups)

    def energy(self, x: Tensor, weight: Tensor) -> Tensor:
        squares = wide(x)
        squares = squares * squares
        if self.groups == 1:
            squares = squares.sum(1, keepdim=True)
        elif self.groups < x.shape[1]:
            squares = squares.unflatten(1, (self.groups, -1)).sum(2)
        box = squares.new_ones(self.groups, 1, *weight.shape[2:])
        return self._convolve(squares, box, self.groups)

    def _convolve(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return torch.convolution(
            x, weight, None, self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), groups
        )

    def directions(self, weight: Tensor) -> Tensor:
        return normalize(weight, tuple(range(1, weight.dim())))

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(weight, tuple(range(1, weight.dim())))

    def group(self, y: Tensor) -> Tensor:
        return y.unflatten(1, (self.groups, -1))

    def ungroup(self, y: Tensor) -> Tensor:
        return y.flatten(1, 2)

    def per_filter(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, -1, *(1 for _ in self.stride))

    def per_group(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, 1, *(1 for _ in self.stride))

    def position_dims(self, grouped: Tensor) -> tuple[int, ...]:
        return (0, *range(3, grouped.dim()))
