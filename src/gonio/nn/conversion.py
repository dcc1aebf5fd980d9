"""What the layers of this package share: a torch layer and its parameters, and running statistics in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from gonio.errors import NotApplicableError, with_article

Layer = TypeVar("Layer", bound=nn.Module)


def computes_as(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module is of one of these classes and runs that class's own forward.

    Example:
        >>> from gonio.nn.conversion import computes_as
        >>> class Halved(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) / 2
        >>> computes_as(nn.Linear(2, 2), (nn.Linear,)), computes_as(Halved(2, 2), (nn.Linear,))
        (True, False)
    """
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    methods = ("forward", "_conv_forward")
    return kind is not None and all(
        method not in vars(module) and getattr(type(module), method, None) is getattr(kind, method, None)
        for method in methods
    )


def check_plain(layer: nn.Module, *kinds: type[nn.Module], verb: str) -> None:
    """Raise unless `layer` computes exactly what one of torch's `kinds` computes from its own parameters."""
    found = _own_class(layer).__name__
    kind = next((kind for kind in kinds if isinstance(layer, kind)), None)
    if kind is None:
        known = " or ".join(each.__name__ for each in kinds)
        raise NotApplicableError(verb, found, f"it takes {with_article(known)}", "Select layers of that type.")
    if not computes_as(layer, (kind,)):
        why = f"this subclass of {kind.__name__} computes something else"
        raise NotApplicableError(verb, found, why, "Convert it to the torch layer first, or leave it out.")
    for name in ("weight", "bias"):
        stored = name in layer._parameters or not hasattr(layer, name)
        if not stored or isinstance(getattr(type(layer), name, None), property):
            why = f"its {name} is computed by a parametrization"
            raise NotApplicableError(verb, found, why, "Fold the parametrization first.")


def _own_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer before a parametrization replaced it by a generated one."""
    own: type[nn.Module] = getattr(type(layer), "parametrized_base", None) or type_before_parametrizations(layer)
    return own


def share_(target: Layer, source: nn.Module) -> Layer:
    """Give `target` the weight and bias of `source`, the same Parameter objects, and its mode; returns `target`."""
    for name in ("weight", "bias"):
        target._parameters[name] = source._parameters[name]
    return target.train(source.training)


def with_weight_(target: Layer, weight: Tensor) -> Layer:
    """Give `target` parameters of its own: this weight, and a copy of its bias; returns `target`."""
    values = {"weight": weight, "bias": target._parameters["bias"]}
    for name, value in values.items():
        old = target._parameters[name]
        if value is not None and old is not None:
            target._parameters[name] = nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad)
    return target


class RunningStatistics(nn.Module):
    """Abstract base of the layers with running statistics, which are buffers of their own names.

    `momentum` is torch's: the weight of the new batch, or None for the average of all batches.
    """

    momentum: float | None
    num_batches_tracked: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """As torch's, but `half()` and `bfloat16()` leave the running statistics in float32."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype in (torch.float16, torch.bfloat16):
                keep = new if old.is_meta else old.to(new.device)
                self._buffers[name] = keep.float()
        return self
