"""Formulas whose gradient is known in closed form, as one autograd operation.

Note [Second derivatives]
    The closed form saves what the forward computed and treats it as constant. When a backward is itself to
    be differentiated, the formula's plain form is differentiated by autograd instead, so that second
    derivatives are right. The plain form also is what the compiler, torch.func and sharded tensors see: none
    of them gains from the closed form.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gonio.errors import SecondDerivativeError
from gonio.regularizers.sharding import is_sharded

__all__ = ["Closed", "Formula", "apply"]


class Formula(ABC):
    """A scalar function of one tensor, in its plain and in its fast form."""

    results: ClassVar[int] = 1  # how many tensors `plain` and `fast` return
    held: ClassVar[str] = ""  # what the gradient treats as fixed though it moves, if anything

    @abstractmethod
    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        """The value, then further results that are not differentiated, in differentiable operations."""

    @abstractmethod
    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What :meth:`plain` returns, and the tensors that :meth:`gradient` needs. Runs without grad."""

    @abstractmethod
    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        """factor × the derivative of the value; a new tensor that the caller may keep."""

    def add_gradient_(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: float) -> None:
        """Add factor × the derivative to `target`; formulas that can do it without a new tensor override it."""
        target.add_(self.gradient(x, saved, x.new_tensor(factor)))

    def evaluate_and_add_(self, target: Tensor, x: Tensor, factor: float) -> tuple[Tensor, ...]:
        """The results of :meth:`plain`, and :meth:`add_gradient_`; where one pass does both, it is overridden."""
        results, saved = self.fast(x)
        self.add_gradient_(target, x, saved, factor)
        return results


@dataclass(frozen=True)
class Closed:
    """scale × the formula's value at x + offset, where x is a view of a weight or made from it.

    Attributes:
        names: of the formula's further results, which are the value's summands.
    """

    formula: Formula
    x: Tensor
    scale: float = 1.0
    offset: float = 0.0
    names: tuple[str, ...] = ()

    def evaluate(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The value and its summands."""
        return self._named(apply(self.formula, self.x))

    @torch.no_grad()
    def add_gradient_(self, target: Tensor, factor: float) -> tuple[Tensor, dict[str, Tensor]]:
        """:meth:`evaluate`, adding factor × its derivative by x to `target` instead of recording a graph."""
        return self._named(self.formula.evaluate_and_add_(target, self.x, factor * self.scale))

    def _named(self, results: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        value = results[0] if self.scale == 1 and not self.offset else self.scale * results[0] + self.offset
        return value, dict(zip(self.names, results[1:], strict=False))


def apply(formula: Formula, x: Tensor) -> tuple[Tensor, ...]:
    """The formula's results at `x`; only the first is differentiable."""
    if torch.compiler.is_compiling() or is_sharded(x):
        if formula.held:
            x = _Guarded.apply(x, formula.held)
        value, *rest = formula.plain(x)
        return value, *(r.detach() for r in rest)
    results: tuple[Tensor, ...] = _ClosedForm.apply(x, formula)
    return results[: formula.results]


class _ClosedForm(torch.autograd.Function):
    """One node in the graph for a whole formula."""

    @staticmethod
    def forward(x: Tensor, formula: Formula) -> tuple[Tensor, ...]:
        results, saved = formula.fast(x)
        return *results, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, ctx.formula = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, *output[ctx.formula.results :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, *saved = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.formula.held:
            with torch.no_grad():
                gradient = ctx.formula.gradient(x, tuple(saved), grads[0])
            return _Once.apply(gradient, x, ctx.formula.held), None
        if torch.is_grad_enabled():  # Note [Second derivatives]
            value = ctx.formula.plain(x)[0]
            return torch.autograd.grad(value, x, grads[0], create_graph=True)[0], None
        return ctx.formula.gradient(x, tuple(saved), grads[0]), None


# `apply` reads the signature of `forward` at every call, which takes longer than the call itself unless it is there.
_ClosedForm.forward.__signature__ = inspect.signature(_ClosedForm.forward)  # type: ignore[attr-defined]


class _Guarded(torch.autograd.Function):
    """The identity, with a gradient that refuses to be differentiated."""

    @staticmethod
    def forward(x: Tensor, held: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.held = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if not torch.is_grad_enabled():
            return grads[0], None
        return _Once.apply(grads[0], *ctx.saved_tensors, ctx.held), None


class _Once(torch.autograd.Function):
    """A gradient that refuses to be differentiated.

    torch's own ``once_differentiable`` does so only where the incoming gradient requires grad, and is silently
    wrong elsewhere.
    """

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, held: str) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.held = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SecondDerivativeError("this penalty", f"{ctx.held} is held fixed in the first")
