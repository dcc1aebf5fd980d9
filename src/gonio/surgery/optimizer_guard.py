"""Parameters that an edit added and that no optimizer has yet: the next step without them raises.

Note [Optimizers that were built before] An edit that is not given `optimizer=` cannot know whether an optimizer exists,
and whether one will be built afterwards. Torch keeps no list of optimizers; a hook sees one when it takes a step. Added
parameters count as trained as soon as an optimizer that has them takes a step. Until then, an optimizer that trains the
layer without them would leave them at their initial values for ever:

* if it holds every trained parameter that the model had before the edit, its step raises. Where a second
  optimizer has the added parameters, that one must step first;
* if it holds only some of them, training is split between optimizers, and one that has not taken a step yet
  may have the added parameters: its second step raises.

The hook is registered while parameters wait. Torch iterates over its hooks during a step, so the hook cannot
remove itself there; the next edit or undo removes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gonio.errors import UntrainedParametersError

__all__ = ["await_optimizer", "parameter_ids"]


@dataclass(eq=False)
class _Waiting:
    """The parameters that an edit added to one layer, until an optimizer that has them takes a step.

    Attributes:
        added: by name.
        layer: the trained parameters that the layer had.
        model: the trained parameters that the model had.
        stepped: optimizers that trained the layer without the added parameters once.
    """

    verb: str
    added: dict[str, weakref.ref[nn.Parameter]]
    layer: list[weakref.ref[nn.Parameter]]
    model: list[weakref.ref[nn.Parameter]]
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)

    def observe(self, held: set[int]) -> None:
        """Forget the added parameters that an optimizer about to step holds, and those that are gone."""
        self.added = {name: ref for name, ref in self.added.items() if (p := ref()) is not None and id(p) not in held}

    def untrained(self) -> list[str]:
        """Names of the added parameters that should be trained and are in no optimizer that has stepped."""
        return [name for name, ref in self.added.items() if (p := ref()) is not None and p.requires_grad]

    def refuses(self, optimizer: Optimizer, held: set[int]) -> bool:
        """Whether a step of this optimizer must raise; see Note [Optimizers that were built before]."""
        if not self.untrained():
            return False
        if _holds(all, held, self.model):
            return True
        if not _holds(any, held, self.layer):
            return False
        again = optimizer in self.stepped
        self.stepped.add(optimizer)
        return again


_WAITING: list[_Waiting] = []
_HOOKS: list[RemovableHandle] = []


def await_optimizer(
    verb: str,
    path: str,
    layer: Iterable[nn.Parameter],
    added: Mapping[str, nn.Parameter],
    model: Iterable[nn.Parameter],
) -> Callable[[], None]:
    """Make steps raise that train the layer without the added parameters; see the Note.

    `layer` and `model` are the parameters before the edit. The returned function ends the waiting.
    """
    waiting = _Waiting(
        verb,
        {f"{path}.{name}" if path else name: weakref.ref(parameter) for name, parameter in added.items()},
        [weakref.ref(parameter) for parameter in layer if parameter.requires_grad],
        [weakref.ref(parameter) for parameter in model if parameter.requires_grad],
    )

    def end() -> None:
        if waiting in _WAITING:
            _WAITING.remove(waiting)
        _update_hook()

    _WAITING.append(waiting)
    _update_hook()
    return end


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """`id` of each Parameter in an optimizer's groups."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _holds(quantifier: Callable[[Iterable[bool]], bool], held: set[int], refs: list[weakref.ref[nn.Parameter]]) -> bool:
    """Whether an optimizer holds all, or any, of the parameters that still exist; False if none does."""
    there = [id(p) in held for ref in refs if (p := ref()) is not None]
    return bool(there) and quantifier(there)


def _update_hook() -> None:
    """Register the hook while any parameters wait, and remove it afterwards; never called during a step."""
    _WAITING[:] = [waiting for waiting in _WAITING if any(ref() is not None for ref in waiting.added.values())]
    if _WAITING and not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
    elif _HOOKS and not _WAITING:
        _HOOKS.pop().remove()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not _WAITING:
        return
    held = parameter_ids(optimizer)
    for waiting in _WAITING:
        waiting.observe(held)
    _WAITING[:] = [waiting for waiting in _WAITING if waiting.added]
    refusing = [waiting for waiting in _WAITING if waiting.refuses(optimizer, held)]
    if refusing:
        names = [name for waiting in refusing for name in waiting.untrained()]
        raise UntrainedParametersError(refusing[0].verb, names)
