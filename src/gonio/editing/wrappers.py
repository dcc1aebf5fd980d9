"""The optimizers in a wrapper: which ones change the parameters, and whether their steps can be observed."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from gonio.errors import InvalidArgumentError, with_article
from gonio.execution import loaded

# Wrappers that change no weight after the step of the optimizer that they contain, by class.
_TRANSPARENT = (
    "accelerate.optimizer:AcceleratedOptimizer",
    "lightning.pytorch.core.optimizer:LightningOptimizer",
    "pytorch_lightning.core.optimizer:LightningOptimizer",
)


def real_optimizers(optimizer: Any, *, verb: str) -> tuple[Optimizer, ...]:
    """The optimizers whose `step()` changes the parameters: the given one, or those that it contains.

    A wrapper (of Accelerate, of Lightning, Lookahead, SAM) has another optimizer of some of its parameters as an
    attribute, or several in a list or dict.

    Raises:
        InvalidArgumentError: for another object, for an optimizer whose steps torch does not report to hooks, and for
            one without a `step` of its own, such as LOMO, which changes the weights in the backward pass.

    Example:
        >>> from gonio.editing.wrappers import real_optimizers
        >>> class Wrapper:
        ...     def __init__(self, inner):
        ...         self.inner, self.param_groups = inner, inner.param_groups
        >>> sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        >>> real_optimizers(Wrapper(sgd), verb="demo_") == (sgd,)
        True
    """
    found = innermost(optimizer)
    for each in found:
        why = (
            "" if is_reported(each) else "neither calls Optimizer.__init__ nor contains an optimizer of its parameters"
        )
        if not why and inspect.unwrap(type(each).step) is inspect.unwrap(Optimizer.step):
            why = "has no step() of its own and changes the weights elsewhere, as in the backward pass"
        if why:
            raise InvalidArgumentError(
                f"{verb} needs an optimizer whose steps can be observed",
                f"{with_article(type(each).__name__)}, which {why}",
                "Pass the torch.optim.Optimizer whose step() changes the weights.",
            )
    return tuple(found)


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers in the attributes of an optimizer that share parameters with it."""
    mine, found = parameter_ids(optimizer), dict[int, Optimizer]()
    for value in vars(optimizer).values() if hasattr(optimizer, "__dict__") else ():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for item in items:
            if isinstance(item, Optimizer) and item is not optimizer and mine & parameter_ids(item):
                found[id(item)] = item
    return list(found.values())


def with_inner(optimizer: Any) -> list[Any]:
    """An optimizer and all that it contains, each once, outer ones first."""
    found: dict[int, Any] = {}
    left = [optimizer]
    while left:
        each = left.pop(0)
        if id(each) not in found:
            found[id(each)] = each
            left += inner_optimizers(each)
    return list(found.values())


def innermost(optimizer: Any) -> list[Any]:
    """An optimizer itself, or those in its wrappers that contain no other."""
    return [each for each in with_inner(optimizer) if not inner_optimizers(each)]


def is_reported(optimizer: Any) -> bool:
    """Whether torch calls its hooks around the step."""
    return isinstance(optimizer, Optimizer) and getattr(type(optimizer).step, "hooked", False)


def is_transparent(wrapper: Any) -> bool:
    """Whether the step of a wrapper changes weights by the steps of what it contains alone."""
    return isinstance(wrapper, loaded(*_TRANSPARENT))


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """`id` of each Parameter in an optimizer's groups."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
