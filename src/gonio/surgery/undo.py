"""Taking an edit back: once, latest first, and only while the model is what the edit left."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gonio.errors import GonioError
from gonio.surgery.wrapping import is_sharded, reshard_

__all__ = ["Undo", "UndoError", "run_reversed"]


class UndoError(GonioError, RuntimeError):
    """An edit was undone already, or the model was changed since by something that stands on it."""

    def __init__(self, verb: str, found: str) -> None:
        super().__init__(f"undo_() of {verb} was asked for; {found}. Undo the latest change first, each edit once.")


def run_reversed(inverses: list[Callable[[], None]]) -> None:
    """Run the inverses latest first, each of them even if another one fails."""
    with ExitStack() as stack:
        for inverse in inverses:
            stack.callback(inverse)
        inverses.clear()


# Edits in force by model, as numbers: the inverses hold the model, so the registry must not hold them.
_IN_FORCE: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, str]]] = weakref.WeakKeyDictionary()
_NUMBERS = itertools.count()


@dataclass
class Touched:
    """What an edit laid hands on, so that an undo can see whether it still is as the edit left it.

    Attributes:
        classes: modules whose class or registries may have changed.
        slots: (parent, attribute) where another module was put.
        replaced: the modules that were there.
        values: Parameters of the model that were overwritten.
    """

    classes: list[nn.Module] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    replaced: list[nn.Module] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Undo:
    """The inverses of one edit, to be run once, when the edit is the latest in force on its model."""

    def __init__(self, verb: str, model: nn.Module, inverses: list[Callable[[], None]], touched: Touched) -> None:
        self.entry = (next(_NUMBERS), verb)
        self._model = weakref.ref(model)
        self._inverses = inverses
        self._left = _Left(model, touched)
        _IN_FORCE.setdefault(model, []).append(self.entry)

    def run_(self) -> None:
        """Undo, or raise :class:`UndoError` and change nothing."""
        model = self._model()
        in_force = [] if model is None else _IN_FORCE.get(model, [])
        _, verb = self.entry
        if model is None or self.entry not in in_force:
            raise UndoError(verb, "it was undone before, or its model is gone")
        later = _later_edit(model, self.entry)
        if later is not None:
            raise UndoError(verb, f"the later edit {later} still is in force")
        reshard_(model)
        why = self._left.changed_since(model)
        if why is not None:
            raise UndoError(verb, why)
        run_reversed(self._inverses)
        self._left.move_replaced_()
        in_force.remove(self.entry)


def _later_edit(model: nn.Module, entry: tuple[int, str]) -> str | None:
    """The latest edit in force on this model, on a part of it or on what it is a part of; None if it is `entry`."""
    mine = _parts(model)
    entries = [e for other, found in _IN_FORCE.items() if other is model or mine & _parts(other) for e in found]
    number, verb = max(entries)
    return None if number == entry[0] else verb


def _parts(model: nn.Module) -> set[int]:
    return {id(part) for part in (*model.modules(), *model.parameters())}


class _Left:
    """The model as an edit left it, as far as an undo depends on it."""

    def __init__(self, model: nn.Module, touched: Touched) -> None:
        self._sharded = is_sharded(model)
        self._classes = [(module, type(module)) for module in touched.classes]
        self._slots = [(parent, name, parent._modules.get(name)) for parent, name in touched.slots]
        here = {id(parameter) for parameter in model.parameters()}
        passed_on = [parameter for module in touched.replaced for parameter in module.parameters()]
        self._kept = [tensor for tensor in (*touched.values, *passed_on) if id(tensor) in here]
        self._replaced = touched.replaced
        # One Parameter per place and type that stays: where it goes, the replaced modules follow.
        self._witnesses: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for parameter in model.parameters() if touched.replaced else ():
            self._witnesses.setdefault((parameter.device, parameter.dtype), parameter)

    def changed_since(self, model: nn.Module) -> str | None:
        """Why the inverses would not restore the model; None if they will."""
        if is_sharded(model) and not self._sharded:
            return "the model was sharded since"
        for module, kind in self._classes:
            if type(module) is not kind:
                return f"a {kind.__name__} became a {type(module).__name__} since"
        for parent, name, child in self._slots:
            if parent._modules.get(name) is not child:
                return f"another module was put in the place of {name!r} of a {type(parent).__name__} since"
        here = {id(parameter) for parameter in model.parameters()}
        if any(id(tensor) not in here for tensor in self._kept):
            return "a Parameter of the layers it changed is another object now (load_state_dict with assign=True?)"
        return None

    @torch.no_grad()
    def move_replaced_(self) -> None:
        """Bring the replaced modules to the device and dtype that the model has been moved to since."""
        goes = {old: (new.device, new.dtype) for old, new in self._witnesses.items()}
        if all(old == new for old, new in goes.items()):
            return
        devices = {device: new for (device, _), (new, _) in goes.items()}
        for module in self._replaced:
            for tensors, name, tensor in _tensors(module):
                device, dtype = goes.get((tensor.device, tensor.dtype), (devices.get(tensor.device), tensor.dtype))
                moved = tensor.to(device=device, dtype=dtype)
                if isinstance(tensor, nn.Parameter):
                    tensor.data = moved
                else:
                    tensors[name] = moved


def _tensors(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    for part in module.modules():
        registries: tuple[dict[str, Tensor | None], ...] = (part._parameters, part._buffers)  # type: ignore[assignment]
        for registry in registries:
            for name, tensor in list(registry.items()):
                if tensor is not None:
                    yield registry, name, tensor
