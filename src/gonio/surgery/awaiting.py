"""Parameters that an edit added and that wait for an optimizer: a step without them raises.

Note [Optimizers that were built before]
An edit that is not told of an optimizer cannot know whether one exists, and whether one will be built afterwards. What
can be seen is a step: of an optimizer that trains the layer's old parameters while no optimizer of the process has the
new ones. They would stay at their initial values for ever, without an error, so that step is one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gonio.errors import UntrainedParametersError
from gonio.surgery.edit import Edit

__all__ = ["await_optimizer", "held_by"]


@dataclass(frozen=True, eq=False)
class _Waiting:
    """The parameters that an edit added to one layer, and those beside which an optimizer should hold them.

    Attributes:
        every: whether the optimizer must hold all of `beside` to be meant, because they are not the layer's own.
    """

    verb: str
    added: Mapping[str, weakref.ref[nn.Parameter]]
    beside: tuple[weakref.ref[nn.Parameter], ...]
    every: bool

    def alive(self) -> bool:
        """Whether any of the parameters still exist."""
        return any(ref() is not None for ref in self.added.values())

    def concerns(self, held: set[int]) -> bool:
        known = [parameter for ref in self.beside if (parameter := ref()) is not None]
        return bool(known) and (all if self.every else any)(id(parameter) in held for parameter in known)

    def missing(self, held: set[int]) -> list[str]:
        """Those that are to be trained and are not held."""
        there = {name: ref() for name, ref in self.added.items()}
        return [n for n, p in there.items() if p is not None and p.requires_grad and id(p) not in held]


_WAITING: list[_Waiting] = []
_HOOKS: list[Any] = []


def await_optimizer(
    edit: Edit,
    path: str,
    layer: Iterable[nn.Parameter],
    added: Mapping[str, nn.Parameter],
    model: Iterable[nn.Parameter],
) -> None:
    """Raise at the next step of an optimizer that trains the layer, unless some optimizer has what was added.

    Args:
        edit: an undo of it ends the waiting.
        path: of the layer.
        layer: the parameters that it had.
        added: those that it has besides, by name.
        model: the parameters that the model had; for a layer without any, an optimizer of all of them is meant.

    Raises:
        UntrainedParametersError: not here, but from `optimizer.step()`, at each one until the cause is gone.
    """
    own = [parameter for parameter in layer if parameter.requires_grad]
    beside = own or [parameter for parameter in model if parameter.requires_grad]
    if not added or not beside:
        return
    _WAITING[:] = [waiting for waiting in _WAITING if waiting.alive()]
    names = {f"{path}.{name}" if path else name: weakref.ref(parameter) for name, parameter in added.items()}
    waiting = _Waiting(edit.verb, names, tuple(weakref.ref(parameter) for parameter in beside), not own)
    edit.on_undo(lambda: _forget(waiting))
    _WAITING.append(waiting)
    if not _HOOKS:  # for good: a hook that removed itself would change what torch is iterating over
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def held_by(optimizer: Optimizer) -> set[int]:
    """`id` of each Parameter in an optimizer's groups."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not _WAITING:
        return
    held = held_by(optimizer)
    concerned = [waiting for waiting in _WAITING if waiting.concerns(held)]
    if any(waiting.missing(held) for waiting in concerned):
        held = held.union(*(held_by(other) for other in _optimizers()))
    missing = [name for waiting in concerned for name in waiting.missing(held)]
    for waiting in concerned:
        if not waiting.missing(held):
            _forget(waiting)
    if missing:
        verb = next(waiting.verb for waiting in concerned if waiting.missing(held))
        raise UntrainedParametersError(verb, missing)


def _forget(waiting: _Waiting) -> None:
    if waiting in _WAITING:
        _WAITING.remove(waiting)


def _optimizers() -> list[Optimizer]:
    """Every optimizer of the process. Torch keeps no list of them, but the garbage collector knows every object."""
    return [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
