"""The steps of optimizers: the one registry of what happens around them, and what an edit does to an optimizer."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from types import FunctionType, MethodType
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gonio.editing.copies import holds_copies
from gonio.editing.edit import Edit, Ref, Refer
from gonio.editing.where import require_model
from gonio.editing.wrappers import innermost, is_transparent, parameter_ids, real_optimizers, with_inner
from gonio.errors import InvalidArgumentError, UntrainedParametersError
from gonio.execution import is_sharded
from gonio.messages import counted, say

Parameters = Sequence[nn.Parameter]

# --- the registry -----------------------------------------------------------------------------------------

# Note [One registry of steps]
# Torch calls global hooks around the step of every optimizer. Both are registered once and stay: torch iterates over
# its hooks during a step, in which another thread, or the collection of garbage, may end a watch. Watches of one
# optimizer are stored in a list on it, so that both are collected together; the list is replaced, never changed, which
# makes a reader in another thread see the old or the new one. Global hooks run around the hooks of the optimizer
# itself. Before a step refusals come first, then what measures, then what changes; afterwards in the opposite order,
# so that a step is measured with everything that is done to it.

Act = Callable[[Optimizer], object]
_WATCHES = "_gonio_watches"  # the attribute of an optimizer
_LOCK = threading.RLock()  # a finalizer may run while it is held
_OF_ALL: list[_Watch] = []
_HOOKS: list[object] = []
_DEPTHS: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # of a step that calls another
_WITH_CLOSURE: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose last step was given a closure


@dataclass(frozen=True, eq=False)
class _Watch:
    before: Act | None
    after: Act | None
    measures: bool
    failed: Act | None = None  # an exception has ended the step of a wrapper


class _Watches(list[_Watch]):
    """The watches of one optimizer; a copy of the optimizer has none."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (list, ())


def _observed_step(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of a wrapper's `step`: reports it where torch does not, and its end by an exception.

    Whether torch does is noted on the replaced function: `zero_grad` patches the class of a wrapper that did not call
    `Optimizer.__init__`, and so only what is called through the class.
    """
    plain = vars(wrapper)[_PLAIN_STEP]
    reported = isinstance(wrapper, Optimizer) and getattr(plain, "hooked", False)
    for each in () if reported else _get(wrapper):
        if each.before is not None:
            each.before(wrapper)
    try:
        result = plain(*args, **kwargs)
    except BaseException:
        for each in _get(wrapper):
            if each.failed is not None:
                each.failed(wrapper)
        raise
    if not reported:
        _after_step(wrapper)
    return result


_PLAIN_STEP = "_gonio_plain_step"  # the attribute of a wrapper


def _replace_step_(optimizer: Any, step: Any, plain: str) -> None:
    """Put a function in the place of an optimizer's `step`, which is stored under another name.

    It is a method, so that a copy of the optimizer steps the copy; a method is pickled by the name of its function. It
    has what others have noted on the replaced one: a schedule of torch would warn that its mark is gone.
    """
    if plain in vars(optimizer):
        return
    vars(optimizer)[plain] = replaced = optimizer.step
    function = FunctionType(step.__code__, step.__globals__, "step")
    noted = getattr(replaced, "__dict__", {})
    vars(function).update({name: value for name, value in noted.items() if name != "__wrapped__"})
    optimizer.step = MethodType(function, optimizer)


def _restore_step_(optimizer: Any, step: Any, plain: str) -> None:
    """Take a function out of the place of an optimizer's `step`, if it is there."""
    function = getattr(vars(optimizer).get("step"), "__func__", None)
    if getattr(function, "__code__", None) is not step.__code__:
        return
    del optimizer.step
    replaced = vars(optimizer).pop(plain)
    if optimizer.step != replaced:  # it had a `step` of its own
        optimizer.step = replaced


def watch(
    optimizer: Any,
    *,
    before: Act | None = None,
    after: Act | None = None,
    settled: Act | None = None,
    whole: tuple[Act, Act] | None = None,
    measures: bool = False,
    verb: str = "watch",
) -> Callable[[], None]:
    """Call functions around each step of an optimizer, in a wrapper or not; returns a function that ends it.

    Args:
        optimizer: None for all.
        before, after: are called with the optimizer that changes the parameters. An exception ends the step.
        settled: is called with it after the step of a wrapper around it, which may have changed weights once more.
        whole: are called with it before and after the step of the outermost wrapper around it, in which it stepped, or
            of itself where that is called alone.
        measures: whether it only measures: it then sees the step with everything that others do to it.
        verb: named by errors.

    Raises: InvalidArgumentError as :func:`real_optimizers`. Nothing is registered then.

    Example:
        >>> from gonio.editing.steps import watch
        >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        >>> end = watch(optimizer, after=lambda optimizer: print(type(optimizer).__name__))
        >>> optimizer.step(); end(); optimizer.step()
        SGD
    """
    found = _Watch(before, after, measures)
    if optimizer is None:
        pairs: list[tuple[Any, _Watch]] = [(None, found)]
    else:
        real = real_optimizers(optimizer, verb=verb)
        outer = [each for each in with_inner(optimizer) if all(each is not inner for inner in real)]
        pairs = [(each, found) for each in real]
        if whole is not None:
            seen = [each for each in (*outer, *real) if each in real or _observable(each)]
            opens, closes, failed = _Whole(*whole, seen).acts
            around = _Watch(opens, closes, measures, failed)
            inside = _Watch(_all(opens, before), _all(after, closes), measures)
            pairs = [(each, inside if each in real else around) for each in seen]
        if settled is not None:
            ending = _Watch(None, partial(_settle, settled, tuple(map(weakref.ref, real))), measures)
            pairs += [(each, ending) for each in outer if _observable(each)]
    with _LOCK:
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
            _HOOKS.append(register_optimizer_step_post_hook(_after_step))
        for each, mine in pairs:
            _set(each, [*_get(each), mine])

    # weak, so that what keeps this function does not keep the optimizer
    ends = [(None if each is None else weakref.ref(each), mine) for each, mine in pairs]

    def end() -> None:
        with _LOCK:
            for ref, mine in ends:
                each = None if ref is None else ref()
                if ref is None or each is not None:
                    _set(each, [other for other in _get(each) if other is not mine])

    return end


def expect_steps_(edit: Edit, optimizer: Any, weights: Mapping[str, Tensor]) -> None:
    """Make the undo of an edit that acts in steps warn if weights have changed, but no step was observed.

    Then another optimizer than the given one trained the model, or something that does not call its `step()`.

    Args:
        weights: by label, those that the steps change, as the edit leaves them.
    """
    steps, before = [0], {label: (weight, sum_of(weight)) for label, weight in weights.items()}
    verb, name = edit.verb, type(optimizer).__name__

    def count(_: Optimizer) -> None:
        steps[0] += 1

    def idle() -> str | None:
        pairs = [(label, sum_of(weight), was) for label, (weight, was) in before.items()]
        changed = [label for label, now, was in pairs if differ(was, now)]
        if steps[0] or not changed:
            return None
        return (
            f"{verb} had no effect: no step of the {name} was observed, although {changed[0]} has changed. "
            "Pass the optimizer whose step() trains the model."
        )

    edit.on_undo(watch(optimizer, after=count, measures=True, verb=verb))
    edit.at_end.append(idle)


Sum = tuple[torch.dtype, torch.device, str]


def sum_of(weight: Tensor) -> Sum:
    """The sum of the entries that are in this process, in float64, also of NaN; with dtype and device.

    It tells changes that torch does not count, as those through `.data`.
    """
    mine: Any = weight
    mine = mine.to_local() if is_sharded(weight) else weight
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return mine.dtype, mine.device, "" if mine.is_meta else repr(mine.detach().sum(dtype=wide).item())


def differ(was: Sum, now: Sum) -> bool:
    """Whether a weight has other entries; not of one that was moved or cast."""
    return now[:2] == was[:2] and now != was


def _all(*acts: Act | None) -> Act:
    def act(optimizer: Optimizer) -> None:
        for each in acts:
            if each is not None:
                each(optimizer)

    return act


class _Whole:
    """Acts around the step of a wrapper, or of an optimizer in it that is stepped alone, once for each optimizer."""

    def __init__(self, begin: Act, end: Act, seen: Sequence[Any]) -> None:
        self._begin, self._end = begin, end
        self._real = {id(each): [weakref.ref(real) for real in innermost(each)] for each in seen}
        self._inside = {id(each): set(map(id, with_inner(each))) for each in seen}
        self._outermost: int | None = None
        self._stepped: dict[int, Optimizer] = {}

    @property
    def acts(self) -> tuple[Act, Act, Act]:
        return self._open, self._close, self._fail

    def _open(self, each: Any) -> None:
        # of itself or of one in it, an exception has ended the last step
        if self._outermost is not None and self._outermost not in self._inside[id(each)]:
            return
        self._outermost, self._stepped = id(each), {}
        for ref in self._real[id(each)]:
            if (real := ref()) is not None:
                self._begin(real)

    def _close(self, each: Any) -> None:
        if any(ref() is each for ref in self._real[id(each)]):
            self._stepped[id(each)] = each
        if self._outermost == id(each):
            stepped, self._outermost, self._stepped = self._stepped, None, {}
            for real in stepped.values():
                self._end(real)

    def _fail(self, each: Any) -> None:
        if self._outermost == id(each):
            self._outermost, self._stepped = None, {}


def _settle(settled: Act, real: Sequence[weakref.ref[Optimizer]], _: Optimizer) -> None:
    for ref in real:
        if (each := ref()) is not None:
            settled(each)


def _observable(wrapper: Any) -> bool:
    """Whether a wrapper's step is to be observed, which this makes possible."""
    if is_transparent(wrapper):
        return False
    _replace_step_(wrapper, _observed_step, _PLAIN_STEP)
    return True


def _get(optimizer: Any) -> list[_Watch]:
    return _OF_ALL if optimizer is None else vars(optimizer).get(_WATCHES, [])


def _set(optimizer: Any, watches: list[_Watch]) -> None:
    global _OF_ALL  # replaced, never changed: see the note
    if optimizer is None:
        _OF_ALL = watches
    elif watches:
        vars(optimizer)[_WATCHES] = _Watches(sorted(watches, key=lambda each: not each.measures))
    else:
        vars(optimizer).pop(_WATCHES, None)
        _restore_step_(optimizer, _whole_step, _PARTS_STEP)  # the outer one of the two
        _restore_step_(optimizer, _observed_step, _PLAIN_STEP)


def computes_gradients(optimizer: Optimizer) -> bool:
    """Whether the optimizer's present or last step was given a closure, which computes the gradients in the step."""
    return optimizer in _WITH_CLOSURE


def _before_step(optimizer: Optimizer, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    if not torch.compiler.is_compiling():  # it follows neither caches nor weak references
        if _is_counted(optimizer) and _may_nest(type(optimizer)):  # type: ignore[arg-type]
            _replace_step_(optimizer, _whole_step, _PARTS_STEP)
            _DEPTHS[optimizer] = _DEPTHS.get(optimizer, 0) + 1
            if _DEPTHS[optimizer] > 1:
                return
        closes = any(map(callable, (*given[1:], *named.values())))  # torch gives the optimizer itself first
        (_WITH_CLOSURE.add if closes else _WITH_CLOSURE.discard)(optimizer)
    for each in (*_OF_ALL, *_get(optimizer)):
        if each.before is not None:
            each.before(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling() and optimizer in _DEPTHS:
        _DEPTHS[optimizer] -= 1
        if _DEPTHS[optimizer] > 0:
            return
    for each in (*_OF_ALL, *_get(optimizer))[::-1]:
        if each.after is not None:
            each.after(optimizer)


def _is_counted(optimizer: Optimizer) -> bool:
    """Whether a watch acts at the ends of this optimizer's steps, or is of it alone; others may act twice in a step."""
    return bool(_get(optimizer)) or any(each.after is not None for each in _OF_ALL)


@functools.cache
def _may_nest(kind: type) -> bool:
    """Whether the step of a class may call that of a base class, around which torch calls the hooks once more."""
    steps = [vars(each)["step"] for each in kind.__mro__ if each is not Optimizer and "step" in vars(each)]
    return len({inspect.unwrap(step) for step in steps}) > 1


def _whole_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """In the place of a `step` that calls another: forgets the depth at its end, also without hooks by an exception."""
    _DEPTHS.pop(optimizer, None)
    try:
        return vars(optimizer)[_PARTS_STEP](*args, **kwargs)
    finally:
        _DEPTHS.pop(optimizer, None)
        if not _is_counted(optimizer):
            _restore_step_(optimizer, _whole_step, _PARTS_STEP)


_PARTS_STEP = "_gonio_parts_step"  # the attribute of an optimizer


# --- parameters that an edit adds or removes --------------------------------------------------------------


def check_optimizer(optimizer: Optimizer | None, model: nn.Module, verb: str) -> None:
    """Raise unless the model is one, and the optimizer holds parameters of it."""
    require_model(model, verb)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        asked, found = say("{verb} needs an optimizer", verb=verb), shorten(repr(optimizer), 80, placeholder="…")
        raise InvalidArgumentError(asked, found, "Pass the optimizer built from this model's parameters.")
    if optimizer is not None and not parameter_ids(optimizer) & {id(p) for p in model.parameters()}:
        raise _holds_copies() if holds_copies(optimizer, model.parameters()) else _holds_none()


def update_optimizer_(
    edit: Edit, path: str, optimizer: Optimizer | None, before: Parameters, after: Mapping[str, nn.Parameter]
) -> None:
    """Give a layer's new parameters to the given optimizer; without one, guard against a step that omits them.

    With an optimizer, new parameters join the group of the layer's old ones, and removed ones leave it with
    their state. A Parameter that the model still uses elsewhere is not removed, and one that the optimizer has
    already is not new. The edit's undo restores groups and state. `before` and `after` are the layer's parameters.
    """
    if optimizer is None:
        known = {id(parameter) for parameter in edit.present}
        added = {f"{path}.{name}".removeprefix("."): p for name, p in after.items() if id(p) not in known}
        if added:
            waiting = _Waiting(edit.verb)
            edit.on_undo(waiting.end)
            edit.at_finish.append(partial(waiting.begin, added, before, edit.present))
        return
    held = parameter_ids(optimizer)
    used = {id(p) for p in edit.model.parameters()}
    new = [p for p in dict.fromkeys(after.values()) if id(p) not in held and not any(p is b for b in before)]
    gone = {id(p) for p in before} - used
    trained = any(id(p) in held for p in before) or any(p.requires_grad for p in new)
    if not (new or gone) or not trained:  # the same parameters, or a frozen layer
        return
    home, group = _group_of(optimizer, before, used)
    for each in innermost(optimizer):
        refuse_kept_list(each, edit.verb)
        edit.on_undo(_restorer(each))
        for other in each.param_groups:
            take_out_(each, other, gone)
        for parameter in before:
            if id(parameter) in gone:
                each.state.pop(parameter, None)
    for name, values in per_parameter(home, group).items():
        group[name] = [*values, *(new if name == "params" else [None] * len(new))]


def refuse_kept_list(optimizer: Optimizer, verb: str) -> None:
    """Raise for an optimizer that reads a list of its Parameters which it made when it was built, such as LBFGS."""
    lists = [group["params"] for group in optimizer.param_groups]
    if any(value is each for value in vars(optimizer).values() for each in lists):
        raise InvalidArgumentError(
            f"{verb} needs an optimizer that reads its parameter groups in each step, because parameters come or go",
            f"{type(optimizer).__name__}, which keeps a list of the parameters from when it was built",
            "Build it after this edit, or use another one.",
        )


def per_parameter(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The options of a group that have one value per parameter: `params`, torch's `param_names`, those of its class."""
    names = ("params", "param_names", *getattr(type(optimizer), "per_parameter", ()))
    return {name: list(group[name]) for name in names if isinstance(group.get(name), list)}


def take_out_(optimizer: Optimizer, group: dict[str, Any], ids: set[int]) -> dict[str, list[Any]]:
    """Remove parameters from a group; returns their values of its options that have one per parameter."""
    kept, taken = dict[str, list[Any]](), dict[str, list[Any]]()
    for name, values in per_parameter(optimizer, group).items():
        pairs = list(zip(group["params"], values, strict=True))
        kept[name] = [value for p, value in pairs if id(p) not in ids]
        taken[name] = [value for p, value in pairs if id(p) in ids]
    group.update(kept)
    return taken


def note_added(edit: Edit) -> None:
    """Note how many parameters the model has that it had not; an optimizer does not find them by itself."""
    known = {id(parameter) for parameter in edit.present}
    count = sum(id(p) not in known for p in edit.model.parameters())
    if count:
        new = counted(count, "new parameter")
        edit.note(say("{new}: build the optimizer after this edit, or pass optimizer=", new=new))


def _group_of(optimizer: Any, layer: Sequence[nn.Parameter], model: set[int]) -> tuple[Optimizer, dict[str, Any]]:
    """The group of the layer's parameters, and its optimizer; of any of the model's for a layer that had none."""
    wanted = {id(p) for p in layer} or model
    for each in innermost(optimizer):
        for group in each.param_groups:
            if any(id(p) in wanted for p in group["params"]):
                return each, group
    raise _holds_none()


def _holds_none() -> InvalidArgumentError:
    return InvalidArgumentError(
        "optimizer= must hold the parameters of the layers that change",
        "an optimizer that holds none of them",
        "Pass the optimizer built from this model's parameters.",
    )


def _holds_copies() -> InvalidArgumentError:
    return InvalidArgumentError(
        "optimizer= must hold the parameters of the layers that change",
        "an optimizer that trains copies of them, as in half precision by apex or DeepSpeed, or a second model of the "
        "same values",
        "Pass the optimizer of this model. Call the verb before copies are made if it changes the model once; what "
        "acts at each step needs an optimizer of the parameters themselves, as a model in float32 under "
        "torch.autocast has it.",
    )


def _restorer(optimizer: Optimizer) -> Callable[[], None]:
    groups = [per_parameter(optimizer, group) for group in optimizer.param_groups]
    state = dict(optimizer.state)

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=False):  # groups added since stay
            group.update(before)
        for parameter, value in state.items():
            optimizer.state.setdefault(parameter, value)
        known = parameter_ids(optimizer)
        for parameter in [p for p in optimizer.state if id(p) not in known]:
            del optimizer.state[parameter]

    return restore


# --- parameters that no optimizer has yet -------------------------------------------------------------

# Note [Optimizers that were built before]
# An edit without `optimizer=` cannot know whether an optimizer exists or will be built; torch keeps no list of them,
# but a hook is called with each optimizer that takes a step. Added parameters count as trained as soon as an optimizer
# that has them takes a step. Until then, an optimizer that trains the layer without them would leave them at their
# initial values:
#
# * if it holds every trained parameter that the model had before the edit, its step raises. Where a second optimizer
#   has the added parameters, that one must step first;
# * if it holds only some of them, training is split between optimizers, and one that has not taken a step yet may
#   have the added parameters: its second step raises.
#
# The watch is registered when parameters wait for the first time, and stays.


@dataclass(eq=False)
class _Waiting:
    """The parameters that an edit added to one layer, until an optimizer that has them takes a step."""

    verb: str
    added: dict[str, Ref] = field(default_factory=dict)  # by name
    layer: list[Ref] = field(default_factory=list)  # the trained parameters that the layer had
    model: list[Ref] = field(default_factory=list)  # and that the model had
    # optimizers that trained the layer without the added parameters once
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)

    def begin(self, added: Mapping[str, nn.Parameter], layer: Parameters, model: Parameters, refer: Refer) -> None:
        """Wait from now on."""
        self.added = {name: refer(parameter) for name, parameter in added.items()}
        self.layer = [refer(parameter) for parameter in layer if parameter.requires_grad]
        self.model = [refer(parameter) for parameter in model if parameter.requires_grad]
        _set_waiting(self)

    def observe(self, held: set[int]) -> None:
        """Drop the added parameters that an optimizer about to step holds, and those that no longer exist."""
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

    def end(self) -> None:
        """Wait no longer."""
        _set_waiting(ended=self)


_WAITING: list[_Waiting] = []
_WAITS: list[Callable[[], None]] = []


def _holds(quantifier: Callable[[Iterable[bool]], bool], held: set[int], refs: list[Ref]) -> bool:
    """Whether an optimizer holds all, or any, of the parameters that still exist; False if none does."""
    there = [id(p) in held for ref in refs if (p := ref()) is not None]
    return bool(there) and quantifier(there)


def _set_waiting(added: _Waiting | None = None, *, ended: _Waiting | None = None) -> None:
    """Add or remove one, and drop those whose parameters are gone or trained; the list is replaced, never changed."""
    global _WAITING
    with _LOCK:
        kept = [w for w in _WAITING if w is not ended and any(ref() is not None for ref in w.added.values())]
        _WAITING = kept if added is None else [*kept, added]
        if _WAITING and not _WAITS:
            _WAITS.append(watch(None, before=_refuse_untrained))


def _refuse_untrained(optimizer: Optimizer) -> None:
    if not _WAITING:
        return
    held = parameter_ids(optimizer)
    for waiting in _WAITING:
        waiting.observe(held)
    _set_waiting()
    refusing = [waiting for waiting in _WAITING if waiting.refuses(optimizer, held)]
    if refusing:
        names = [name for waiting in refusing for name in waiting.untrained()]
        raise UntrainedParametersError(refusing[0].verb, names)
