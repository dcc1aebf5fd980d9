"""A gradient that is to be added, so that a regularizer can take many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from gonio.geometry.views import Layout

if TYPE_CHECKING:
    from gonio.regularizers.base import Evaluation, WeightRegularizer

__all__ = ["Addition"]


class Addition(NamedTuple):
    """factor × the gradient of a regularizer at `weight`, for `grad`: the arguments of `add_gradient_`."""

    regularizer: WeightRegularizer
    grad: Tensor
    weight: Tensor
    layout: Layout
    factor: float
    state: Tensor | None = None

    def carry_out_(self) -> Evaluation:
        """Add it."""
        return self.regularizer.add_gradient_(self.grad, self.weight, self.layout, factor=self.factor, state=self.state)
