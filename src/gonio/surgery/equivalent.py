"""`equivalent`: how far the outputs of two models differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gonio.errors import InvalidArgumentError

__all__ = ["Deviation", "call", "equivalent", "evaluating"]


@dataclass(frozen=True)
class Deviation:
    """The largest difference between two models' outputs.

    Attributes:
        absolute: max |a − b| over all outputs.
        relative: `absolute` over max |a|; 0 if both are 0.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"largest deviation {self.absolute:.3g} ({self.relative:.3g} relative)"


def equivalent(model_a: nn.Module, model_b: nn.Module, *, example: Any) -> Deviation:
    r"""Largest absolute and relative deviation of two models' outputs on the same input.

    .. math::
        \max_i |a_i - b_i| \quad\text{and}\quad \max_i |a_i - b_i| \,/\, \max_i |a_i|

    Both models run in evaluation mode without gradients and get their modes back.

    Args:
        model_a: the reference.
        model_b: the model held against it.
        example: an input tensor, a tuple of arguments or a dict of keyword arguments.

    Raises:
        InvalidArgumentError: if the outputs differ in structure or shape, or are not finite.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> gonio.equivalent(model, model, example=torch.ones(1, 2))
        Deviation(absolute=0.0, relative=0.0)
    """
    return deviation(outputs(model_a, example), outputs(model_b, example))


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The floating-point outputs of a model in evaluation mode, flattened in order."""
    with evaluating(model), torch.no_grad():
        leaves, _ = tree_flatten(call(model, example))
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def deviation(a: list[Tensor], b: list[Tensor]) -> Deviation:
    """The largest difference between two lists of outputs."""
    shapes = [tuple(x.shape) for x in a], [tuple(x.shape) for x in b]
    if shapes[0] != shapes[1] or not a:
        raise InvalidArgumentError(
            "equivalent() compares two models with outputs of the same shapes",
            f"{shapes[0]} and {shapes[1]}",
            "Give an example that both models take.",
        )
    if not all(torch.isfinite(x).all() for x in (*a, *b)):
        raise InvalidArgumentError(
            "equivalent() compares finite outputs", "NaN or infinity", "Check weights and input."
        )
    absolute = max(
        float((x.double() - y.double()).abs().max()) if x.numel() else 0.0 for x, y in zip(a, b, strict=True)
    )
    scale = max(float(x.double().abs().max()) if x.numel() else 0.0 for x in a)
    return Deviation(absolute, absolute / scale if scale > 0 else absolute)


def call(model: nn.Module, example: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, tuple):
        return model(*example)
    return model(example)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
