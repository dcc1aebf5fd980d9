"""A recorded change to a model: all of it happens or none of it, and it can be taken back exactly."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor, nn

from gonio.errors import GonioError
from gonio.surgery.site import Site

__all__ = ["Change", "Edit", "Edited", "UndoError"]

_REGISTRIES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


class UndoError(GonioError, RuntimeError):
    """An edit was undone already, or a later edit stands on it."""

    def __init__(self, verb: str, found: str) -> None:
        super().__init__(f"undo_() of {verb} was asked for; {found}. Undo the latest edit first, each edit once.")


@dataclass(frozen=True)
class Change:
    """What happened to one module, in words."""

    path: str
    what: str


class Edit:
    """The transaction in which a verb changes a model.

    Each primitive records its inverse before it acts. Leaving the `with` block by an exception runs
    the inverses in reverse order, so a verb that fails on the tenth layer leaves the first nine as
    they were.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with Edit(model, "demo_") as edit:
        ...     edit.replace_(gonio.surgery.sites(model)[1], nn.ReLU(), what="a ReLU instead")
        >>> edited = edit.done()
        >>> type(model[0]).__name__
        'ReLU'
        >>> edited.undo_()
        >>> type(model[0]).__name__
        'Linear'
    """

    def __init__(self, model: nn.Module, verb: str) -> None:
        self.model = model
        self.verb = verb
        self._inverses: list[Callable[[], None]] = []
        self.changes: list[Change] = []
        self._notes: list[str] = []

    def __enter__(self) -> Edit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            _run_reversed(self._inverses)

    def note(self, text: str) -> None:
        """Say something about the edit as a whole, for its table."""
        self._notes.append(text)

    def changed(self, path: str, what: str) -> None:
        """Record in words what was done to a module."""
        self.changes.append(Change(path, what))

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Record the inverse of a change; call it before the change is made."""
        self._inverses.append(inverse)

    def set_data_(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a parameter or buffer in place; the tensor object stays the same."""
        before = tensor.detach().clone(memory_format=torch.preserve_format)
        self.on_undo(lambda: self.overwrite_(tensor, before))
        self.overwrite_(tensor, value)

    @staticmethod
    @torch.no_grad()
    def overwrite_(tensor: Tensor, value: Tensor) -> None:
        """Copy a value into a tensor without recording anything; for inverses."""
        tensor.copy_(value)

    def snapshot_(self, module: nn.Module) -> None:
        """Record a module's class and what is registered on it, order included, before a change to them.

        The values of tensors are not recorded: see :meth:`set_data_`.
        """
        kind = module.__class__
        registries = {name: module.__dict__[name].copy() for name in _REGISTRIES}

        def restore() -> None:
            module.__class__ = kind
            for name, before in registries.items():
                registry = module.__dict__[name]
                registry.clear()
                registry.update(before)

        self.on_undo(restore)

    def replace_(self, site: Site, module: nn.Module, *, what: str) -> None:
        """Put another module in the place of a site, under every name it has."""
        for parent, name in site.owners:
            self.on_undo(_setter(parent, name, site.module))
            parent._modules[name] = module
        self.changed(site.path, what)

    def done(self) -> Edited:
        """The record that the verb returns."""
        undo = _Undo(self.verb, self.model, self._inverses)
        return Edited(self.verb, tuple(self.changes), tuple(self._notes), undo)


@dataclass(frozen=True)
class Edited:
    """What a verb did. `str()` is a table; `undo_()` takes it back exactly.

    Attributes:
        verb: the verb's name.
        changes: one :class:`Change` per module, in model order.
        notes: remarks on the whole edit: assumptions, what was left alone and why.
    """

    verb: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    _undo: _Undo = field(repr=False, compare=False)

    def undo_(self) -> None:
        """Restore the model as it was before: same classes, same Parameter objects, same order.

        Edits of one model are undone latest first, because each stands on what the earlier ones left.
        Values that the edit overwrote come back; parameters that it only moved keep what training has
        made of them since.

        Raises:
            UndoError: if it was undone before, or if a later edit of the model still is in force.
        """
        self._undo.run_()

    def __str__(self) -> str:
        width = max((len(change.path) for change in self.changes), default=0)
        head = f"{self.verb}: {len(self.changes)} module{'s' if len(self.changes) != 1 else ''}"
        rows = [f"  {change.path or '(model)':<{width}}  {change.what}" for change in self.changes]
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])


# Edits in force by model, as numbers: the inverses hold the model, so the registry must not hold them.
_IN_FORCE: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, str]]] = weakref.WeakKeyDictionary()
_NUMBERS = itertools.count()


class _Undo:
    """The inverses of one edit, to be run once, when the edit is the latest in force on its model."""

    def __init__(self, verb: str, model: nn.Module, inverses: list[Callable[[], None]]) -> None:
        self.entry = (next(_NUMBERS), verb)
        self._model = weakref.ref(model)
        self._inverses = inverses
        _IN_FORCE.setdefault(model, []).append(self.entry)

    def run_(self) -> None:
        model = self._model()
        in_force = [] if model is None else _IN_FORCE.get(model, [])
        _, verb = self.entry
        if self.entry not in in_force:
            raise UndoError(verb, "it was undone before, or its model is gone")
        if self.entry != in_force[-1]:
            raise UndoError(verb, f"the later edit {in_force[-1][1]} still is in force")
        _run_reversed(self._inverses)
        in_force.pop()


def _run_reversed(inverses: list[Callable[[], None]]) -> None:
    while inverses:
        inverses.pop()()


def _setter(parent: nn.Module, name: str, module: nn.Module) -> Callable[[], None]:
    def restore() -> None:
        parent._modules[name] = module

    return restore
