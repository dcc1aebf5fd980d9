"""A recorded change to a model: all of it happens or none of it, and it can be taken back exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import NotApplicableError
from gonio.surgery.site import Site
from gonio.surgery.undo import Touched, Undo, UndoError, run_reversed
from gonio.surgery.wrapping import is_replicated, refuse_flat_shards, refuse_shards, reshard_

__all__ = ["Change", "Edit", "Edited", "UndoError"]

# What verbs change on a module that stays; hooks and buffers that others register meanwhile are not ours.
_REGISTRIES = ("_parameters", "_modules")


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

    Raises:
        NotApplicableError: on entry for a model in FSDP 1; by the primitives that change more than
            values for a sharded model; on exit if parameters of a model in DDP came or went.

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
        self._touched = Touched()
        self._replicated: set[int] | None = None
        self.changes: list[Change] = []
        self.notes: list[str] = []

    def __enter__(self) -> Edit:
        refuse_flat_shards(self.model, self.verb)
        reshard_(self.model)
        if is_replicated(self.model):
            self._replicated = {id(p) for p in self.model.parameters()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            run_reversed(self._inverses)
        elif self._replicated is not None and self._replicated != {id(p) for p in self.model.parameters()}:
            run_reversed(self._inverses)
            why = "it adds or removes parameters, and DistributedDataParallel synchronises those it was given"
            raise NotApplicableError(self.verb, "", why, "Edit the model before it is wrapped.")

    def note(self, text: str) -> None:
        """Say something about the edit as a whole, for its table."""
        self.notes.append(text)

    def changed(self, path: str, what: str) -> None:
        """Record in words what was done to a module."""
        self.changes.append(Change(path, what))

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Record the inverse of a change; call it before the change is made."""
        self._inverses.append(inverse)

    def set_data_(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a Parameter or an optimizer's tensor in place; the tensor object stays the same."""
        before = tensor.detach().clone(memory_format=torch.preserve_format)
        self._touched.values.append(tensor)
        self.on_undo(lambda: self.overwrite_(tensor, before))
        self.overwrite_(tensor, value)

    def set_buffer_(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Overwrite a buffer in place; found again by its name, because `model.to()` makes new buffers."""
        before = module.get_buffer(name).detach().clone(memory_format=torch.preserve_format)
        self.on_undo(lambda: self.overwrite_(module.get_buffer(name), before))
        self.overwrite_(module.get_buffer(name), value)

    def set_attribute_(self, module: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute that the module has; no tensor and no module."""
        before = vars(module)[name]
        self.on_undo(lambda: setattr(module, name, before))
        setattr(module, name, value)

    @staticmethod
    @torch.no_grad()
    def overwrite_(tensor: Tensor, value: Tensor) -> None:
        """Copy a value into a tensor without recording anything; for inverses."""
        tensor.copy_(value)

    def snapshot_(self, module: nn.Module) -> None:
        """Record a module's class, Parameters and children, order included, before a change to them.

        The values of tensors are not recorded: see :meth:`set_data_`.
        """
        refuse_shards(self.model, self.verb)
        kind = module.__class__
        registries = {name: module.__dict__[name].copy() for name in _REGISTRIES}
        self._touched.classes.append(module)

        def restore() -> None:
            module.__class__ = kind
            for name, before in registries.items():
                registry = module.__dict__[name]
                registry.clear()
                registry.update(before)

        self.on_undo(restore)

    def replace_(self, site: Site, module: nn.Module, *, what: str) -> None:
        """Put another module in the place of a site, under every name it has.

        Hooks stay with the replaced module; a note says where there were any.
        """
        refuse_shards(self.model, self.verb)
        old = site.module
        if old._forward_hooks or old._forward_pre_hooks:
            self.note(f"{site.path}: its forward hooks stayed with the replaced layer")
        self._touched.replaced.append(old)
        for parent, name in site.owners:
            self._touched.slots.append((parent, name))
            self.on_undo(_setter(parent, name, old))
            parent._modules[name] = module
        self.changed(site.path, what)

    def done(self) -> Edited:
        """The record that the verb returns."""
        undo = Undo(self.verb, self.model, self._inverses, self._touched)
        return Edited(self.verb, tuple(self.changes), tuple(self.notes), undo)


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
    _undo: Undo = field(repr=False, compare=False)

    def undo_(self) -> None:
        """Restore the model as it was before: same classes, same Parameter objects, same order.

        Edits of one model, or of parts of it, are undone latest first, because each stands on what the
        earlier ones left. Values that the edit overwrote come back; parameters that it only moved keep
        what training has made of them since. Where the model has been moved to another device or dtype
        since, what comes back follows it.

        Raises:
            UndoError: if it was undone before; if a later edit still is in force; if the model was changed
                by other means so that the old state cannot be restored. Nothing is changed then.
        """
        self._undo.run_()

    def __str__(self) -> str:
        width = max((len(change.path) for change in self.changes), default=0)
        head = f"{self.verb}: {len(self.changes)} module{'s' if len(self.changes) != 1 else ''}"
        rows = [f"  {change.path or '(model)':<{width}}  {change.what}" for change in self.changes]
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])


def _setter(parent: nn.Module, name: str, module: nn.Module) -> Callable[[], None]:
    def restore() -> None:
        parent._modules[name] = module

    return restore
