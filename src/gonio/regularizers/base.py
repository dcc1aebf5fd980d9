"""What every regularizer is: a strength and a formula, as frozen data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import full_precision, widen
from gonio.geometry.views import Layout
from gonio.regularizers.closed_form import Closed
from gonio.regularizers.schedules import Schedule
from gonio.regularizers.sharding import is_sharded, with_placed_gradient

if TYPE_CHECKING:
    from gonio.regularizers.additions import Addition

__all__ = [
    "ClosedFormRegularizer",
    "Evaluation",
    "Regularizer",
    "WeightRegularizer",
    "can_add_directly",
    "require",
    "shares_memory",
]

PLAIN = Layout()


def require(holds: bool, asked: str, found: object, do: str) -> None:
    """Raise an InvalidArgumentError unless a condition on an argument holds."""
    if not holds:
        raise InvalidArgumentError(asked, str(found), do)


@dataclass(frozen=True)
class Evaluation:
    """A value at strength 1 and what it is made of.

    Attributes:
        value: a differentiable scalar.
        terms: its summands by name, detached; empty if there is only one.
        state: what an iterative regularizer starts from next time.
    """

    value: Tensor
    terms: dict[str, Tensor]
    state: Tensor | None = None


@dataclass(frozen=True)
class Regularizer(ABC):
    """A term that is added to the loss: strength × value.

    Args:
        strength: the coefficient of the value in the loss.
        every: apply at each n-th step only, at n-fold strength: the same pull on average at 1/n of the cost.
        schedule: a factor on the strength that depends on the step.
    """

    strength: float
    _: KW_ONLY
    every: int = 1
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(
            math.isfinite(self.strength) and self.strength >= 0,
            f"{name}() needs a finite strength >= 0",
            f"strength={self.strength}",
            "A term that rewards what it should penalise has no minimum.",
        )
        require(self.every >= 1, f"{name}() needs every >= 1", f"every={self.every}", "Use 1 for every step.")

    def strength_at(self, step: int) -> float:
        """The coefficient at a step, counted from 0: `every` and `schedule` applied.

        Example:
            >>> decay = gonio.regularizers.L2(0.1, every=2)
            >>> [decay.strength_at(step) for step in range(4)]
            [0.2, 0.0, 0.2, 0.0]
        """
        if step % self.every:
            return 0.0
        factor = 1.0 if self.schedule is None else self.schedule.factor(step)
        return self.strength * self.every * factor


@dataclass(frozen=True)
class WeightRegularizer(Regularizer):
    """A regularizer of a layer's weight."""

    # What `Penalty` has to know: a term that acts on the scale of a weight alone has nothing to act on where
    # a normalisation layer follows; one that takes the logarithm of the scale makes no sense at zero.
    scale_only: ClassVar[bool] = False
    logarithmic: ClassVar[bool] = False
    compilable: ClassVar[bool] = False  # whether `add_gradients_` has a compiled form

    def value(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """The penalty at strength 1, summed over the layer's matrices; a differentiable scalar.

        Computed in float32 at least, also under autocast. A gradient that a float16 weight cannot hold is cut
        at the largest float16 number.

        Args:
            weight: as the layer stores it.
            layout: how that is, from :func:`gonio.geometry.layout_of`.
        """
        return self.evaluate(weight, layout).value

    def __call__(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """strength × :meth:`value`."""
        return self.strength * self.value(weight, layout)

    def evaluate(self, weight: Tensor, layout: Layout = PLAIN, *, state: Tensor | None = None) -> Evaluation:
        """The value together with its summands, and what an iteration carries on to the next step.

        Args:
            weight: as the layer stores it.
            layout: how that is.
            state: of the last evaluation; None to start from the weight alone. Never changed, and held fixed in
                the backward. `Penalty` keeps one per layer.
        """
        with full_precision(weight):
            return self._evaluate(_widened(weight), layout, state)

    def lower_bound(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """A value below which no weight of this shape (and, where it matters, these filter norms) can come.

        More filters than dimensions cannot be orthogonal, and the best that they can do is not 0.
        """
        with torch.no_grad(), full_precision(weight):
            return self._lower_bound(widen(weight), layout)

    def excess(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """:meth:`value` above :meth:`lower_bound`: the most that training could still remove. Detached."""
        with torch.no_grad():
            return (self.value(weight, layout) - self.lower_bound(weight, layout)).clamp_min(0)

    def add_gradient_(
        self, grad: Tensor, weight: Tensor, layout: Layout, *, factor: float, state: Tensor | None = None
    ) -> Evaluation:
        """Add factor × the gradient at `weight` to `grad`, in place and without a graph.

        Args:
            grad: of the shape, dtype and placement of the weight.
            weight: as the layer stores it.
            layout: how that is.
            factor: the coefficient.
            state: see :meth:`evaluate`.
        """
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            evaluation = self.evaluate(leaf, layout, state=state)
            (gradient,) = torch.autograd.grad(evaluation.value, leaf)
        grad.add_(gradient, alpha=factor)
        return evaluation

    @staticmethod
    def add_gradients_(additions: Sequence[Addition], *, backend: str | None = None) -> list[Evaluation]:
        """:meth:`add_gradient_` for many weights; overridden where together they cost less.

        Args:
            additions: of regularizers of the class on which this is called.
            backend: of ``torch.compile``, for a class that is `compilable`; None for eager mode.
        """
        return [addition.carry_out_() for addition in additions]

    @abstractmethod
    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        """The value of a weight in float32 or float64."""

    @abstractmethod
    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        """A lower bound for a weight in float32 or float64."""


class _Float(torch.autograd.Function):
    """float16 to float32, with a gradient that stays finite on the way back."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.float()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        most = torch.finfo(torch.float16).max
        return grads[0].clamp(-most, most).half()


def _widened(weight: Tensor) -> Tensor:
    if weight.dtype is torch.float16:
        wide: Tensor = _Float.apply(weight)
        return wide
    return widen(with_placed_gradient(weight))


@dataclass(frozen=True)
class ClosedFormRegularizer(WeightRegularizer):
    """A regularizer whose value is a closed form of the weight's matrices."""

    @abstractmethod
    def _closed(self, weight: Tensor, layout: Layout) -> Closed:
        """The closed form at a weight."""

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        return Evaluation(*self._closed(weight, layout).evaluate())

    def add_gradient_(
        self, grad: Tensor, weight: Tensor, layout: Layout, *, factor: float, state: Tensor | None = None
    ) -> Evaluation:
        if can_add_directly(grad, weight):
            closed, target = self._closed(weight.detach(), layout), self._closed(grad, layout).x
            if shares_memory(closed.x, weight) and shares_memory(target, grad):
                with full_precision(weight):
                    return Evaluation(*closed.add_gradient_(target, factor))
        return super().add_gradient_(grad, weight, layout, factor=factor, state=state)


def can_add_directly(grad: Tensor, weight: Tensor) -> bool:
    """Whether a gradient in closed form needs neither a conversion nor another process."""
    plain = weight.dtype in (torch.float32, torch.float64) and not is_sharded(weight)
    return plain and grad.dtype is weight.dtype


def shares_memory(view: Tensor, whole: Tensor) -> bool:
    """Whether writing into `view` writes into `whole`."""
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
