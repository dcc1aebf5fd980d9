"""Base classes of all regularizers: a strength and a formula, as frozen data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gonio.editing.memory import refuse_inference
from gonio.errors import InvalidArgumentError, check_range
from gonio.execution import ProcessGroup, apply, autocast_is_on, is_sharded, ordinary_eager, replicated_like
from gonio.geometry.norms import WIDE, full_precision, whole, widen
from gonio.geometry.views import PLAIN, Layout, unview
from gonio.regularizers.kernels import WithGradient
from gonio.regularizers.schedules import Schedule

AddGradient = Callable[..., "Evaluation"]  # the signature of `WeightRegularizer.add_gradient_`


def require(holds: bool, needs: str, found: object, do: str) -> None:
    """Raise an InvalidArgumentError unless a condition on an argument holds."""
    if not holds:
        raise InvalidArgumentError(needs, str(found), do)


@dataclass(frozen=True)
class Evaluation:
    """The value of a regularizer at strength 1.

    Attributes:
        value: a differentiable scalar.
        terms: its summands by name, detached; empty if there is only one.
        state: what an iterative regularizer starts from in the next evaluation.
    """

    value: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    state: Tensor | None = None


@dataclass(frozen=True)
class Regularizer(ABC):
    """A term of the loss: strength × value.

    Args:
        strength: the coefficient of the value in the loss.
        every: evaluate at each n-th step only, at n times the strength: the same mean gradient at 1/n of the cost.
        schedule: a factor on the strength that depends on the step.

    Raises:
        InvalidArgumentError: for values out of range, or none of those that a field's `Literal` type lists.
    """

    strength: float
    _: KW_ONLY
    every: int = 1
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        check_range(name, **numbers)
        if {"strength", "every"} <= numbers.keys():
            check_range(name, **{"strength × every": self.strength * self.every})
        require(
            math.isfinite(self.strength) and self.strength >= 0,
            f"{name}() needs a finite strength >= 0",
            f"strength={self.strength}",
            "A negative strength has no minimum.",
        )
        for key, value in numbers.items():
            require(math.isfinite(value), f"{name}() needs a finite {key}", f"{key}={value}", "Choose a number.")
        require(self.every >= 1, f"{name}() needs every >= 1", f"every={self.every}", "Use 1 for every step.")
        for option, allowed in _options(type(self)).items():
            given = getattr(self, option)
            known = " or ".join(map(repr, allowed))
            require(given in allowed, f"{name}({option}=…) takes {known}", repr(given), "Choose one of them.")

    def strength_at(self, step: int) -> float:
        """The coefficient at a step, counted from 0, with `every` and `schedule` applied.

        Example:
            >>> decay = gonio.regularizers.L2(0.1, every=2)
            >>> [decay.strength_at(step) for step in range(4)]
            [0.2, 0.0, 0.2, 0.0]
        """
        if step % self.every:
            return 0.0
        factor = 1.0 if self.schedule is None else self.schedule.factor(step)
        return self.strength * self.every * factor


@cache
def _options(kind: type[Regularizer]) -> dict[str, tuple[Any, ...]]:
    """The fields of a regularizer that take one of some values, and these values."""
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


@dataclass(frozen=True)
class WeightRegularizer(Regularizer):
    """A regularizer of a layer's weight. A subclass defines :meth:`_evaluate`, and the hooks that concern it."""

    scale_only: ClassVar[bool] = False  # whether the value depends on the norm of the weight alone or mainly on it

    def value(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """The penalty at strength 1, summed over the layer's matrices; a differentiable scalar.

        Computed in float32 at least, also under autocast. The gradient of a float16 weight is clamped to the largest
        float16 number. `layout` is that of the layer, see :func:`gonio.geometry.layout_of`.
        """
        return self.evaluate(weight, layout).value

    def __call__(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """strength × :meth:`value`."""
        return self.strength * self.value(weight, layout)

    def evaluate(self, weight: Tensor, layout: Layout = PLAIN, *, state: Tensor | None = None) -> Evaluation:
        """The value with its summands and the state for the next step.

        `state` is that of the last evaluation, a constant in the backward; None to start from the weight alone.
        """
        with full_precision(weight):
            special = weight.dtype is torch.float16 or is_sharded(weight)
            weight = widen(_Widened.apply(weight) if special else weight)
            if not (torch.is_grad_enabled() and weight.requires_grad) or not ordinary_eager(weight):
                return self._scalar(self._evaluate(weight, layout, state))
            refuse_inference(type(self).__name__, [("a weight", weight)])
            with torch.no_grad():
                found = self._with_gradient(weight.detach(), layout, state)
            if found is None:
                evaluation = self._scalar(self._evaluate(weight, layout, state))
                require(
                    evaluation.value.requires_grad,
                    f"{type(self).__name__}._evaluate() returns a value that autograd traces to the weight",
                    "a value without a gradient",
                    "Compute it from the weight by differentiable operations, without detach(), item() or no_grad().",
                )
                return evaluation
            evaluation, gradient = found
            plain = partial(self._evaluate, layout=layout, state=state)
            return replace(evaluation, value=apply(WithGradient, weight, evaluation.value, gradient, plain))

    def _scalar(self, found: object) -> Evaluation:
        """What :meth:`_evaluate` of a subclass returned; refused unless it is an Evaluation of a scalar."""
        value = found.value if isinstance(found, Evaluation) else found
        if (
            isinstance(found, Evaluation)
            and isinstance(value, Tensor)
            and not value.dim()
            and value.is_floating_point()
        ):
            return found
        kind = (
            f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else repr(value)
        )
        asked = f"{type(self).__name__}._evaluate() returns an Evaluation of a floating-point scalar"
        inside = f"an Evaluation of {kind}" if isinstance(found, Evaluation) else kind
        raise InvalidArgumentError(
            asked, inside, "Return gonio.regularizers.Evaluation(value), summed over the groups."
        )

    def lower_bound(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """A lower bound of the value over all weights of this shape (and, where they matter, these filter norms).

        More filters than dimensions cannot be orthogonal: their least value is not 0.
        """
        with torch.no_grad(), full_precision(weight):
            return self._lower_bound(widen(weight), layout)

    def excess(self, weight: Tensor, layout: Layout = PLAIN) -> Tensor:
        """:meth:`value` − :meth:`lower_bound`, which training could still remove. Detached."""
        with torch.no_grad():
            return (self.value(weight, layout) - self.lower_bound(weight, layout)).clamp_min(0)

    def _with_gradient(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor] | None:
        """The closed form, with a gradient of the weight's shape; that of a single matrix may have two dimensions."""
        found = self._closed_form(weight, layout, state)
        if found is None or found[1].shape == weight.shape:
            return found
        evaluation, gradient = found
        if not layout.transposed:
            return evaluation, gradient.reshape(weight.shape)
        return evaluation, unview(gradient if gradient.dim() > 2 else gradient.unsqueeze(0), weight.shape, layout)

    # --- hooks for `gonio.Penalty` ----------------------------------------------------------------

    def add_gradient_(
        self, grad: Tensor, weight: Tensor, layout: Layout, *, factor: float, state: Tensor | None = None
    ) -> Evaluation:
        """Add factor × the gradient at `weight` to `grad`, of its shape, dtype and placement; under ``no_grad``."""
        if weight.dtype in WIDE and ordinary_eager(weight) and not autocast_is_on(weight):
            found = self._with_gradient(weight, layout, state)
            if found is not None:
                grad.add_(found[1], alpha=factor)
                return found[0]
        with torch.enable_grad():
            weight = weight.detach().requires_grad_()
            evaluation = self.evaluate(weight, layout, state=state)
            (gradient,) = torch.autograd.grad(evaluation.value, weight)
        grad.add_(gradient, alpha=factor)
        return evaluation

    @property
    def skips_before_norm(self) -> bool:
        """Whether weights in front of a normalisation layer are left out."""
        return False

    @property
    def reads_pairs(self) -> bool:
        """Whether the parts of a transformer on which it acts are pairs between which scale moves, or else heads."""
        return False

    @property
    def draws_norms(self) -> bool:
        """Whether the term draws the norms of filters to 1, beside what it does to their angles."""
        return False

    def reason_to_skip(self, weight: Tensor) -> str | None:
        """Why the regularizer cannot act on this weight; None if it can."""
        return None

    def fitted_to(self, weight: Tensor, layout: Layout) -> WeightRegularizer:
        """The regularizer with settings chosen for this weight where they are not given."""
        return self

    def remark(self, activation_after: Callable[[], str | None]) -> str:
        """A remark for the table; `activation_after` returns the activation that follows the layer, if it is known."""
        return ""

    def check_step(self, label: str, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Raise an InvalidArgumentError if a step of this parameter group is too large for the term."""

    def compiled(self, backend: str) -> AddGradient | None:
        """:meth:`add_gradient_` compiled by ``torch.compile``; None if compilation would gain nothing."""
        return None

    # --- for subclasses -----------------------------------------------------------------------------

    @abstractmethod
    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        """The value of a weight in float32 or float64."""

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor] | None:
        """The evaluation and the gradient, by the weight or by its matrix view, without autograd; None for autograd."""
        return None

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        """A lower bound for a weight in float32 or float64."""
        return weight.new_zeros(())


@dataclass(frozen=True)
class OutputRegularizer(Regularizer):
    """A regularizer of the outputs of a layer for a batch."""

    @property
    @abstractmethod
    def ignores_bias(self) -> bool:
        """Whether the value does not change when a constant is added to an output channel."""

    @property
    def reads_probes(self) -> int | None:
        """How many random inputs a penalty puts in the place of those of the batch; None for the batch."""
        return None

    def value(
        self,
        outputs: Tensor,
        *,
        groups: int = 1,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Tensor:
        """The penalty at strength 1; a differentiable scalar, computed in float32 at least, also under autocast.

        Args:
            outputs: (N, k) or (N, k, *positions) with k output channels, without the bias.
            groups: channels of different groups see different inputs and are never paired.
            generator: for regularizers that sample.
            process_group: processes over which the batch is spread; the value is that of the whole batch.
        """
        return self.evaluate(outputs, groups=groups, generator=generator, process_group=process_group).value

    def __call__(
        self,
        outputs: Tensor,
        *,
        groups: int = 1,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Tensor:
        """strength × :meth:`value`."""
        return self.strength * self.value(outputs, groups=groups, generator=generator, process_group=process_group)

    def evaluate(
        self,
        outputs: Tensor,
        *,
        groups: int = 1,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Evaluation:
        """The value with its summands; arguments as for :meth:`value`."""
        if outputs.ndim < 2 or outputs.shape[1] % groups:
            raise InvalidArgumentError(
                f"{type(self).__name__} takes outputs (N, k, *positions) with k divisible by groups={groups}",
                f"shape {tuple(outputs.shape)}",
                "Put the channels on dim 1, for example with .flatten(0, -2) after a linear layer.",
            )
        outputs = whole(outputs)  # under tensor parallelism each process has a part of the channels
        with full_precision(outputs):
            return self._evaluate(outputs, groups, generator, process_group)

    @abstractmethod
    def _evaluate(
        self, outputs: Tensor, groups: int, generator: torch.Generator | None, process_group: ProcessGroup | None
    ) -> Evaluation:
        """The value of outputs in their own dtype."""


# --- weights in half precision, and weights that are spread over processes (`DTensor`, as under FSDP2) ---


class _Widened(torch.autograd.Function):
    """float16 to float32, with a gradient clamped to finite float16 numbers and sharded like the weight (FSDP2)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.float() if x.dtype is torch.float16 else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any], output: Tensor) -> None:
        ctx.dtype, ctx.placements = inputs[0].dtype, inputs[0].placements if is_sharded(inputs[0]) else None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient = grads[0] if ctx.placements is None else grads[0].redistribute(placements=ctx.placements)
        most = torch.finfo(torch.float16).max
        return gradient.clamp(-most, most).half() if ctx.dtype is torch.float16 else gradient

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].float() if ctx.dtype is torch.float16 else tangents[0].view_as(tangents[0])


def identity_like(gram: Tensor) -> Tensor:
    """The identity matrix of the size of a (stack of) square matrices."""
    return replicated_like(torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device), gram)
