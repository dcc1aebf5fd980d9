"""A recorded change of a model: atomic, and exactly undoable."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gonio.editing.memory import is_inference, memory_key, overlapping, why_not_written
from gonio.editing.where import (
    Site,
    is_replicated,
    is_sharded,
    refuse_flat_shards,
    refuse_shards,
    require_model,
    reshard_,
    sites,
)
from gonio.errors import GonioWarning, NotApplicableError, UndoError, listing, with_article
from gonio.escaping import html_table
from gonio.execution import loaded
from gonio.messages import Message, counted, fixed, local, say


@dataclass(frozen=True)
class Change:
    """The change of one module, in words."""

    path: str
    what: str


class Edit:
    """The transaction in which a verb changes a model.

    Each primitive records its inverse before it acts. Leaving the `with` block by an exception, Ctrl-C included, runs
    the inverses in reverse order, so a verb that fails on the tenth layer leaves the first nine unchanged. An inverse
    sets what was recorded, so that it can run more than once.

    Args:
        once: whether the verb changes once what has several Parameters on the same entries in memory.

    Raises: NotApplicableError on entry for a model in FSDP 1; by the primitives that change more than values for a
        sharded model, by those that change values for a tensor that cannot be written to or shares its memory; on exit
        if parameters of a model in DDP were added or removed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with Edit(model, "demo_") as edit:
        ...     edit.replace_(gonio.surgery.sites(model)[1], nn.ReLU(), what="a ReLU instead")
        >>> type(model[0]).__name__
        'ReLU'
        >>> edit.done().undo_()
        >>> type(model[0]).__name__
        'Linear'
    """

    def __init__(self, model: nn.Module, verb: str, *, once: bool = False) -> None:
        require_model(model, verb)
        self.model = model
        self.verb = verb
        self._once = once
        self._sharing: dict[int, list[Tensor]] | None = None  # of the parameters before the edit
        self.present = list(model.parameters())  # before the edit
        self._modes = ExitStack()
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.acts_on: list[Any] = []  # optimizers: when they are gone, the edit is not in force any more
        self.changes_model = True  # otherwise it can be undone before and after any other
        self._inverses: list[Callable[[], None]] = []
        self.at_finish: list[Callable[[Refer], None]] = []  # called with the model as the edit leaves it
        self.at_end: list[Callable[[], str | None]] = []  # before an undo: what to warn of after it
        # What it changed: an undo first checks that this still is as the edit left it.
        self._classes: list[nn.Module] = []  # modules whose class or registries may have changed
        self._slots: list[tuple[nn.Module, str]] = []  # (parent, attribute) where another module was put
        self._replaced: list[Site] = []
        self._values: list[Tensor] = []  # overwritten tensors

    def __enter__(self) -> Edit:
        refuse_flat_shards(self.model, self.verb)
        reshard_(self.model)
        if torch.is_inference_mode_enabled() and not any(map(is_inference, self.model.parameters())):
            self._modes.enter_context(torch.inference_mode(False))  # what an edit adds is there to be trained
            self._modes.enter_context(torch.no_grad())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._modes:
            if error is not None:
                run_reversed(self._inverses)
                return
            try:
                self._finish()
            except BaseException:
                run_reversed(self._inverses)
                raise

    def _finish(self) -> None:
        """Tell those that follow overwritten values, which may refuse."""
        if is_replicated(self.model) and {id(p) for p in self.present} != {id(p) for p in self.model.parameters()}:
            why = "it adds or removes parameters, and DistributedDataParallel synchronises those it was given"
            raise NotApplicableError(self.verb, "", why, "Edit the model before it is wrapped.", action="change")
        for tensor in {id(tensor): tensor for tensor in self._values}.values():
            follower = _FOLLOWERS.get(id(tensor))
            if follower is not None and follower.parameter is tensor:
                follower.act(self)
        if self.at_finish:
            refer = referrer(self.model)
            for each in self.at_finish:
                each(refer)
            self.at_finish = []

    def note(self, text: str) -> None:
        """Add a remark on the whole edit."""
        self.notes.append(text)

    def note_stays(self, stay: Mapping[str, str]) -> None:
        """Note the layers that were left out, by path, with the reason; layers of one reason in one note."""
        reasons: dict[str, list[str]] = {}
        for path, why in stay.items():
            reasons.setdefault(why, []).append(path or "the model")
        for why, paths in reasons.items():
            s = "s" if len(paths) == 1 else ""
            self.note(say("{paths} stay{s}: {why}", paths=listing(paths), s=s, why=fixed(why)))

    def note_adapters(self) -> None:
        """Note the changed layers inside adapters of peft, which merges into the weight that a layer stores."""
        tuner = loaded("peft.tuners.tuners_utils:BaseTunerLayer")
        changed = {id(module) for module in self._classes} | {id(o._modules.get(name)) for o, name in self._slots}
        tuners = [site for site in sites(self.model) if isinstance(site.module, tuner)]
        found = [site.path for site in tuners if changed & set(map(id, site.module.children()))]
        if found:
            text = say(
                "merge and unmerge the adapters of {paths} before this edit or after its undo: peft adds them to the "
                "stored weight, which is not the one in use any more", paths=listing(found)
            )  # fmt: skip
            self.note(text)

    def changed(self, path: str, what: str) -> None:
        """Record a change of a module in words."""
        self.changes.append(Change(path, what))

    def on_undo(self, inverse: Callable[[], None]) -> None:
        """Record the inverse of a change; call it before the change is made."""
        self._inverses.append(inverse)

    def refuse_unwritable(self, tensor: Tensor) -> None:
        """Raise for a tensor that torch cannot write to, and for a Parameter that shares memory with another one."""
        if self._sharing is None:
            self._sharing = overlapping(self.present)
        others = self._sharing.get(id(tensor), [])
        if self._once:
            others = [other for other in others if memory_key(other) != memory_key(tensor)]
        why, do = why_not_written(tensor), "Give it"
        if others:
            why, do = say("it shares memory with {other}", other=self._name_of(others[0])), "Make them one, or give it"
        if why is not None:
            do += " memory of its own by .detach().clone()."
            raise NotApplicableError(self.verb, self._name_of(tensor), why, do)

    def _name_of(self, tensor: Tensor) -> str:
        """Of a Parameter or buffer of the model."""
        for site in sites(self.model):
            for name, own in (*site.module._parameters.items(), *site.module._buffers.items()):
                if own is tensor:
                    return f"{site.path}.{name}".removeprefix(".")
        return ""

    def set_data_(self, tensor: Tensor, value: Tensor, *, unless: Callable[[], bool] | None = None) -> None:
        """Overwrite a Parameter or an optimizer's tensor in place; the tensor object stays the same.

        Args:
            unless: asked by the undo: if it is true, the tensor keeps the value that it has then.
        """
        self.refuse_unwritable(tensor)
        before = tensor.detach().clone(memory_format=torch.preserve_format)
        self._values.append(tensor)
        self.on_undo(lambda: None if unless is not None and unless() else self.overwrite_(tensor, before))
        self.overwrite_(tensor, value)

    def set_buffer_(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Overwrite a buffer in place; the undo looks it up by name, because `model.to()` makes new buffers."""
        self.refuse_unwritable(module.get_buffer(name))
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
        """Copy a value into a tensor without a record; for inverses."""
        tensor.copy_(value)

    def snapshot_(self, module: nn.Module) -> None:
        """Record a module's class, Parameters and children, order included, before a change to them.

        The values of tensors are not recorded: see :meth:`set_data_`. Hooks and buffers registered later belong to
        others and stay.
        """
        refuse_shards(self.model, self.verb)
        kind = module.__class__
        registries = {name: vars(module)[name].copy() for name in ("_parameters", "_modules")}
        self._classes.append(module)

        def restore() -> None:
            module.__class__ = kind
            for name, before in registries.items():
                vars(module)[name].clear()
                vars(module)[name].update(before)

        self.on_undo(restore)

    def replace_(self, site: Site, module: nn.Module, *, what: str) -> None:
        """Put another module in the place of a site, under every name it has.

        Forward and backward hooks stay with the replaced module; a note names the layer if there were any.
        """
        refuse_shards(self.model, self.verb)
        old = site.module
        calls = (old._forward_hooks, old._forward_pre_hooks), (old._backward_hooks, old._backward_pre_hooks)
        for direction, hooks in zip(("forward", "backward"), calls, strict=True):
            if any(hooks):
                self.note(f"{site.path}: its {direction} hooks stayed with the replaced layer")
        self._replaced.append(site)
        for parent, name in site.owners:
            self._slots.append((parent, name))
            self.on_undo(partial(parent._modules.__setitem__, name, old))
            parent._modules[name] = module
        self.changed(site.path, what)

    def done(self) -> Edited:
        """The record that the verb returns; notes name plain attributes and lists that hold a replaced module."""
        gone = {id(site.module): site.path for site in self._replaced}
        for site in sites(self.model) if gone else ():
            for name, value in vars(site.module).items():
                items = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
                for path in [gone[id(item)] for item in (value, *items) if id(item) in gone and name != "_modules"]:
                    holder = f"{site.path}.{name}".removeprefix(".")
                    self.note(f"{holder} still holds the module that was {path}: no edit reaches it there")
        return Edited(self.verb, tuple(self.changes), tuple(self.notes), _Undo(self))


class Undo(Protocol):
    """What an :class:`Edited` runs."""

    def run_(self) -> None:
        """Undo, or raise :class:`UndoError` and change nothing."""


@dataclass(frozen=True)
class Edited:
    """The changes that a verb made. `str()` is a table; `undo_()` restores the model exactly.

    A deep copy and a pickle, as of a module that has it as an attribute, keep the table, and cannot undo.

    Attributes:
        changes: one :class:`Change` per module, in model order.
        notes: remarks on the whole edit: assumptions, and layers that were left out, with the reason.
    """

    verb: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    _undo: Undo = field(repr=False, compare=False)

    def undo_(self) -> None:
        """Restore the model as it was before: same classes, same Parameter objects, same order.

        Edits of one model, or of parts of it, are undone latest first. Overwritten values come back; parameters that
        were only moved keep the values of later training. If the model was moved to another device or dtype since,
        so are the restored layers. After Ctrl-C or an exception during the call, another one finishes it.

        Raises: UndoError if it was undone before; if a later edit still is in force; if the model was changed by other
            means so that the old state cannot be restored. Nothing is changed then.
        """
        self._undo.run_()

    def __len__(self) -> int:
        """The number of changed modules."""
        return len(self.changes)

    def __bool__(self) -> bool:
        return True  # an edit without a change is an edit too

    @property
    def _head(self) -> Message:
        return say("{verb}: {modules}", verb=self.verb, modules=counted(len(self), "module"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} by {self._head}>"

    def _repr_html_(self) -> str:
        rows = [(change.path or local("(model)"), local(change.what)) for change in self.changes]
        return html_table(local(self._head), (local("layer"), local("change")), rows, [*map(local, self.notes)])

    def __str__(self) -> str:
        width = max((len(change.path) for change in self.changes), default=0)
        rows = [f"  {change.path or local('(model)'):<{width}}  {local(change.what)}" for change in self.changes]
        notes = (local(say("  note: {note}", note=fixed(note))) for note in self.notes)
        return "\n".join([local(self._head), *rows, *notes])


def run_reversed(inverses: Sequence[Callable[[], None]]) -> None:
    """Run the inverses latest first, each twice if it fails and then the others, and all once more after Ctrl-C.

    Each must be one that can run again. The first error, or the interruption, is raised in the end.
    """
    failure: BaseException | None = None
    grad = torch.is_grad_enabled()  # an interruption may skip the end of a `no_grad`
    while True:
        try:
            for inverse in reversed(inverses):
                for _ in range(2):  # an error that does not come again leaves the model as before, not between
                    try:
                        inverse()
                        break
                    except Exception as error:
                        failure = failure or error
            break
        except BaseException as error:
            failure = error
    torch.set_grad_enabled(grad)
    if failure is not None:
        raise failure


@dataclass(frozen=True, eq=False)
class Follower:
    """What is done at the end of each edit that overwrites a Parameter, as long as this is kept.

    `act` takes the edit, to which it may add inverses and notes. If it raises, the edit is rolled back.
    """

    parameter: Tensor
    act: Callable[[Edit], None]


# Parameters whose overwriting concerns others (a hold keeps their norms), by `id`.
_FOLLOWERS: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()


def follow_(parameter: Tensor, act: Callable[[Edit], None]) -> Follower:
    """Call a function at the end of each edit that overwrites a Parameter, as long as the result is kept."""
    follower = Follower(parameter, act)
    _FOLLOWERS[id(parameter)] = follower
    return follower


# --- weak references ----------------------------------------------------------------------------------

# Note [Weak references to Parameters]
# `Module.to()` exchanges the contents of tensors of a class of their own (shards, quantised weights; on request all),
# and torch refuses this for a tensor to which there is a weak reference. What does not keep a model alive therefore
# refers to its Parameters by their modules.


@dataclass(frozen=True)
class _Place:
    """A Parameter by its module and name, as long as it is there."""

    module: weakref.ref[nn.Module]
    name: str
    key: int  # its `id`

    def __call__(self) -> nn.Parameter | None:
        module = self.module()
        found = None if module is None else dict(module._parameters.items()).get(self.name)  # a scripted one has no get
        return found if id(found) == self.key else None


Ref = Callable[[], nn.Parameter | None]
Refer = Callable[[nn.Parameter], Ref]


def referrer(model: nn.Module) -> Refer:
    """What makes references to Parameters that neither keep these alive nor keep torch from moving the model.

    Example:
        >>> from gonio.editing.edit import referrer
        >>> layer = nn.Linear(2, 2)
        >>> ref = referrer(layer)(layer.weight)
        >>> ref() is layer.weight
        True
        >>> layer.weight = nn.Parameter(torch.zeros(2, 2))
        >>> ref() is None
        True
    """
    places = _places(model)
    return lambda parameter: places.get(id(parameter)) or weakref.ref(parameter)


def _places(model: nn.Module) -> dict[int, _Place]:
    found: dict[int, _Place] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), _Place(weakref.ref(module), name, id(parameter)))
    return found


# --- undo ---------------------------------------------------------------------------------------------


class _InForce(NamedTuple):
    """An edit in force, until what it acts on is gone; without its inverses, because they hold the model."""

    number: int
    verb: str
    parts: Mapping[int, Callable[[], Any]]  # of the model after the edit: by now another thread may be changing it
    acts_on: tuple[weakref.ref[Any], ...]  # optimizers


_IN_FORCE: weakref.WeakKeyDictionary[nn.Module, list[_InForce]] = weakref.WeakKeyDictionary()
_NUMBERS = itertools.count()
_REGISTERING = threading.Lock()  # other threads may edit other models while the registry is read


def _parts(module: nn.Module) -> dict[int, Any]:
    return {id(part): part for part in (*module.modules(), *module.parameters())}


@dataclass(frozen=True)
class _OfACopy:
    """The undo of a copy or a pickle of an :class:`Edited`, which says what was changed and has no model to restore."""

    verb: str

    def run_(self) -> None:
        raise UndoError(self.verb, "this is a copy of its record")


class _Undo:
    """The inverses of one edit, to be run while it is the latest in force, and the state that they depend on."""

    def __init__(self, edit: Edit) -> None:
        model, self._inverses, self._at_end = edit.model, edit._inverses, edit.at_end
        parts: dict[int, Callable[[], Any]] = {}
        if edit.changes_model:
            parts = {**{id(module): weakref.ref(module) for module in model.modules()}, **_places(model)}
        self._edit = _InForce(next(_NUMBERS), edit.verb, parts, tuple(map(weakref.ref, edit.acts_on)))
        edit.acts_on = []  # inverses may refer to the edit
        self._started = False
        self._model = weakref.ref(model)
        self._sharded = is_sharded(model)
        self._classes = [(module, type(module)) for module in edit._classes]
        self._slots = [(parent, name, parent._modules.get(name)) for parent, name in edit._slots]
        self._replaced = [site.module for site in edit._replaced]
        handed_on = [parameter for module in self._replaced for parameter in module.parameters()]
        here = {id(parameter) for parameter in model.parameters()}
        moved = [p for module in edit._classes for p in module._parameters.values() if p is not None]
        self._parameters = [tensor for tensor in (*edit._values, *moved, *handed_on) if id(tensor) in here]
        self._shapes = [(tensor, tensor.shape) for tensor in edit._values]
        # One Parameter per device and dtype that stays in the model: the replaced modules follow it.
        self._followed: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for parameter in model.parameters() if self._replaced else ():
            self._followed.setdefault((parameter.device, parameter.dtype), parameter)
        with _REGISTERING:
            _IN_FORCE.setdefault(model, []).append(self._edit)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfACopy, (self._edit.verb,)

    def run_(self) -> None:
        """Undo, or raise :class:`UndoError` and change nothing."""
        model = self._model()
        edit, verb = self._edit, self._edit.verb
        if model is None or all(other is not edit for other in _IN_FORCE[model]):
            raise UndoError(verb, "it was undone before, or its model is gone")
        if edit.parts and (latest := _latest_edit(model, edit)) is not edit:
            raise UndoError(verb, f"the later edit {latest.verb} still is in force")
        reshard_(model)
        if not self._started and (why := self._changed_since(model)) is not None:
            raise UndoError(verb, why)
        said = [] if self._started else [text for text in (each() for each in self._at_end) if text is not None]
        self._started = True  # after an interruption the model is as neither before nor after
        run_reversed([self._move_replaced_, *self._inverses])
        with _REGISTERING:
            _IN_FORCE[model] = [other for other in _IN_FORCE[model] if other is not edit]
        self._inverses, self._at_end = [], []
        for text in said:
            warnings.warn(text, GonioWarning, stacklevel=3)

    def _changed_since(self, model: nn.Module) -> str | None:
        """Why the inverses would not restore the model; None if they will."""
        if is_sharded(model) and not self._sharded:
            return "the model was sharded since"
        for module, kind in self._classes:
            if type(module) is not kind:
                return f"{with_article(kind.__name__)} became {with_article(type(module).__name__)} since"
        for parent, name, child in self._slots:
            if parent._modules.get(name) is not child:
                return f"another module was put in the place of {name!r} of {with_article(type(parent).__name__)} since"
        here = {id(parameter) for parameter in model.parameters()}
        if any(id(tensor) not in here for tensor in self._parameters):
            return "a Parameter of the layers it changed is another object now (load_state_dict with assign=True?)"
        if any(tensor.shape != shape for tensor, shape in self._shapes):
            return "a tensor that it changed has another shape now"
        return None

    @torch.no_grad()
    def _move_replaced_(self) -> None:
        """Move the replaced modules to the device and dtype that the model has been moved to since."""
        goes = {old: (new.device, new.dtype) for old, new in self._followed.items()}
        if all(old == new for old, new in goes.items()):
            return
        devices = {device: new for (device, _), (new, _) in goes.items()}
        for module in (part for replaced in self._replaced for part in replaced.modules()):
            for registry in (module._parameters, module._buffers):
                for name, tensor in [(name, tensor) for name, tensor in registry.items() if tensor is not None]:
                    place = (devices.get(tensor.device), tensor.dtype)
                    device, dtype = goes.get((tensor.device, tensor.dtype), place)
                    moved = tensor.to(device=device, dtype=dtype)
                    if isinstance(tensor, nn.Parameter):
                        tensor.data = moved
                    else:
                        registry[name] = moved  # type: ignore[assignment]


def _latest_edit(model: nn.Module, own: _InForce) -> _InForce:
    """The latest edit in force on this model, on a part of it or on a model that it is a part of."""
    mine = _parts(model)

    def concerns(edit: _InForce) -> bool:
        if edit is own:
            return True
        if edit.acts_on and all(ref() is None for ref in edit.acts_on):
            return False
        return any(mine[key] is edit.parts[key]() for key in mine.keys() & edit.parts.keys())

    with _REGISTERING:
        edits = [edit for found in _IN_FORCE.values() for edit in found]
    return max(filter(concerns, edits), key=lambda edit: edit.number)
