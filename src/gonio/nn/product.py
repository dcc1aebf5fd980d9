r"""The linear maps under decoupled layers: the product with every filter, the energy of every patch.

A product :math:`\langle w, x \rangle` and an energy :math:`\lVert x \rVert^2` belong to one *patch*: the
inputs that one output sees. Each map is a frozen dataclass with pure methods.

Note [Grouped layout]
Torch's layout of an output is (N, filters, *positions). In the *grouped layout* it is (N, groups, filters
per group, *positions), and what belongs to a patch is (N, groups, 1, *positions), so that it broadcasts over
the filters that see the patch. For a linear layer both are (…, filters), and (…, 1) for a patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gonio.geometry import normalize, safe_norm

__all__ = ["LinearMap", "Product", "wide"]


def wide(x: Tensor) -> Tensor:
    """At least float32: squares of float16 overflow beyond 256."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Product(ABC):
    """A linear map whose outputs are products of filters with patches of the input."""

    has_phases: ClassVar[bool] = False  # the taps of a filter that meet an output differ between outputs

    @abstractmethod
    def multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        """⟨w, x⟩ of every filter and patch, in torch's layout."""

    @abstractmethod
    def multiply_backward(
        self, grad: Tensor, x: Tensor, filters: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of `multiply` for the input and the filters, where needed."""

    def energy(self, x: Tensor) -> Tensor:
        """‖x‖² of every patch, in torch's layout with one channel per group; float32 at least."""
        return self.over_patches(self.squares(x))

    @abstractmethod
    def squares(self, x: Tensor) -> Tensor:
        """Σ x² over the channels of each group, in torch's layout; float32 at least."""

    @abstractmethod
    def over_patches(self, squares: Tensor) -> Tensor:
        """The sum over each patch."""

    @abstractmethod
    def energy_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """Half the derivative of ⟨grad, energy(x)⟩ by each x², broadcastable against x in the grouped layout."""

    @abstractmethod
    def group_input(self, x: Tensor) -> Tensor:
        """The input in the grouped layout."""

    @abstractmethod
    def filter_norms(self, weight: Tensor) -> Tensor:
        """‖w‖ of every filter with all its entries, of shape (filters,); float32 at least."""

    def along_filters(self, values: Tensor, weight: Tensor) -> Tensor:
        """A vector over filters, shaped to broadcast against the weight."""
        return values.reshape(-1, *(1 for _ in weight.shape[1:]))

    @abstractmethod
    def filters(self, weight: Tensor) -> Tensor:
        """The weight to multiply with for products with unit filters, before `to_unit`."""

    def to_unit(self, y: Tensor, filters: Tensor, x: Tensor) -> Tensor:
        """The product with filters that have norm 1 as each output sees them, from that with `filters(weight)`."""
        return y

    def lengths(self, weight: Tensor, x: Tensor) -> Tensor:
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
    def over_groups(self, patches: Tensor) -> Tensor:
        """Sums over everything but the groups, of something that belongs to patches."""


@dataclass(frozen=True)
class LinearMap(Product):
    """The map of a linear layer; the patch is the whole input vector."""

    def multiply(self, x: Tensor, filters: Tensor) -> Tensor:
        return F.linear(x, filters)

    def multiply_backward(
        self, grad: Tensor, x: Tensor, filters: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        by_input = grad @ filters if needed[0] else None
        by_filters = grad.flatten(0, -2).T @ x.flatten(0, -2) if needed[1] else None
        return by_input, by_filters

    def squares(self, x: Tensor) -> Tensor:
        x = wide(x)
        return (x * x).sum(-1, keepdim=True)

    def over_patches(self, squares: Tensor) -> Tensor:
        return squares

    def energy_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad

    def group_input(self, x: Tensor) -> Tensor:
        return x

    def filter_norms(self, weight: Tensor) -> Tensor:
        return safe_norm(weight, 1)

    def filters(self, weight: Tensor) -> Tensor:
        return normalize(weight, 1)

    def group(self, y: Tensor) -> Tensor:
        return y

    def ungroup(self, y: Tensor) -> Tensor:
        return y

    def per_filter(self, values: Tensor) -> Tensor:
        return values

    def per_group(self, values: Tensor) -> Tensor:
        return values

    def over_groups(self, patches: Tensor) -> Tensor:
        return patches.sum().reshape(1)
