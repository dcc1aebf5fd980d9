"""Run a model without touching it: on other modules that share its parameters.

A verb that only reads a model runs it in evaluation mode, with hooks, and under tracers that set attributes. On a twin
all of this happens beside the model: other threads may train it or serve it meanwhile, and an interruption leaves
nothing to restore.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import UninitializedBuffer, is_lazy

from gonio.editing.edit import run_reversed
from gonio.editing.memory import writes_taken_back
from gonio.editing.where import adds_no_name, holds_original, is_sharded, run_eagerly, unwrapped
from gonio.errors import InvalidArgumentError, NotApplicableError, first_line
from gonio.messages import say
from gonio.seeding import state_kept

_NESTED = 4  # levels of lists and dicts in an attribute in which modules are found
_MANY = 1000  # entries of a list or dict that a function refers to; longer ones are data


def twin_of(model: nn.Module) -> nn.Module:
    """A model of new modules with the same classes, parameters and hooks, copies of the buffers, and no compiled part.

    Modes, hooks, attributes, buffers and the entries of registries can be changed without effect on the model; a
    change of a parameter in place is one of the model. Attributes that refer to modules or buffers of the model (also
    in lists, tuples, dicts, bound methods, closures, defaults and global names of functions, partial functions, objects
    that can be called, and weak references) refer to their twins. Scripted and lazy modules are copied.

    Example:
        >>> from gonio.editing.twin import twin_of
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> twin = twin_of(model).eval()
        >>> twin[0].weight is model[0].weight, twin[1].training, model[1].training
        (True, False, True)
    """
    parts: list[nn.Module] = []
    held = [buffer for buffer in model.buffers() if not is_lazy(buffer)]  # no id is used again while they are here
    twins: dict[int, Any] = {id(buffer): buffer.clone() for buffer in held}
    for module in model.modules():
        if id(module) in twins:
            continue
        if isinstance(module, torch.jit.ScriptModule) or _is_lazy(module):
            whole = copy.deepcopy(module, _lazy_buffers(module))
            twins.update({id(a): b for a, b in zip(module.modules(), whole.modules(), strict=True)})
            twins[id(module)] = whole  # `modules()` of a scripted module wraps its children anew at each call
            continue
        parts.append(module)
        twins[id(module)] = object.__new__(type(module))
    references = _References(twins)
    for module in parts:
        vars(twins[id(module)]).update({name: references.attribute(value) for name, value in vars(module).items()})
        vars(twins[id(module)])["_compiled_call_impl"] = None
    compiled = {id(m): twins[id(m._modules["_orig_mod"])] for m in parts if holds_original(m)}
    if compiled:  # a compiled module calls the original one, whatever its child is
        plain = {id(twins[key]): inner for key, inner in compiled.items()}
        for twin in (twins[id(module)] for module in parts):
            twin._modules.update({n: plain[id(c)] for n, c in twin._modules.items() if id(c) in plain})
    return compiled.get(id(model), twins[id(model)])


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model inside its wrappers, and without those around its parts, so that names of modules are their paths.

    Where a part is wrapped, the modules around it are new ones with the same attributes; all others are the model's
    own. A wrapper with forward hooks stays.

    Example:
        >>> from gonio.editing.twin import without_wrappers
        >>> model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), nn.ReLU())
        >>> [name for name, _ in without_wrappers(model).named_parameters()], without_wrappers(model)[1] is model[1]
        (['0.weight', '0.bias'], True)
    """
    made: dict[int, nn.Module] = {}
    entered: set[int] = set()
    stack = [model := unwrapped(model)]
    while stack:  # children first, without recursion
        module = stack[-1]
        inside = _content(module)
        children = [inside] if inside is not None else _children(module).values()
        left = [child for child in children if id(child) not in made and id(child) not in entered]
        if left and id(module) not in entered:
            entered.add(id(module))
            stack += left
            continue
        stack.pop()
        if id(module) in made:
            continue
        if inside is not None:
            made[id(module)] = made.get(id(inside), inside)
            continue
        now = {name: made.get(id(child), child) for name, child in _children(module).items()}
        made[id(module)] = module
        if any(child is not module._modules[name] for name, child in now.items()):
            made[id(module)] = shell = object.__new__(type(module))
            vars(shell).update(vars(module))
            vars(shell)["_modules"] = {**module._modules, **now}
    return made[id(model)]


def _children(module: nn.Module) -> dict[str, nn.Module]:
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    return {name: child for name, child in module._modules.items() if child is not None}


def _content(wrapper: nn.Module) -> nn.Module | None:
    """What a wrapper without forward hooks calls; None for another module."""
    if wrapper._forward_hooks or wrapper._forward_pre_hooks:
        return None
    return next((child for name, child in _children(wrapper).items() if adds_no_name(wrapper, name)), None)


def _lazy_buffers(model: nn.Module) -> dict[int, Any]:
    """By their `id`, new buffers in the place of those without a shape, which torch refuses to copy."""
    lazy, new = [buffer for buffer in model.buffers() if is_lazy(buffer)], cast(Any, UninitializedBuffer)
    return {id(each): new(device=each.data.device, dtype=each.data.dtype) for each in lazy}


def _is_lazy(module: nn.Module) -> bool:
    """Whether the first forward sets the module's own tensors."""
    held = (*module._parameters.values(), *module._buffers.values())
    return any(is_lazy(tensor) for tensor in held if tensor is not None)


class _References:
    """Attributes with twins in the place of the modules and tensors to which they refer.

    Functions refer by their closures, defaults and global names, and so may methods, partial functions and objects that
    can be called. What refers to nothing of the model stays the same object.
    """

    def __init__(self, twins: Mapping[int, Any]) -> None:
        self._twins = twins
        self._made: dict[int, tuple[Any, Any]] = {}  # by the `id` of a function or object, which must not be used again
        self._spaces: dict[int, tuple[Any, dict[str, Any]]] = {}  # global names, by the `id` of those of the model

    def attribute(self, value: Any, depth: int = 0) -> Any:
        """An attribute of a twin, whose containers are its own."""
        kind = type(value)
        if kind in (dict, OrderedDict) and depth < _NESTED:
            return kind((self.of(k), self.attribute(v, depth + 1)) for k, v in value.items())
        if kind in (list, tuple, set) and depth < _NESTED:
            return kind(self.attribute(each, depth + 1) for each in value)
        return self.of(value, _NESTED)

    def of(self, value: Any, depth: int = 0) -> Any:
        """What stands in the place of a value; the value itself where it refers to nothing of the model."""
        kind: Any = type(value)
        if isinstance(value, (nn.Module, Tensor)):
            return self._twins.get(id(value), value)
        if kind in (dict, OrderedDict, list, tuple, set):
            return self._container(value, depth) if depth < _NESTED and len(value) <= _MANY else value
        if kind is weakref.ref:
            return weakref.ref(self._twins[id(value())]) if id(value()) in self._twins else value
        if kind is MethodType:
            owner = self.of(value.__self__) if isinstance(value.__self__, nn.Module) else self._object(value.__self__)
            function = self.of(value.__func__)
            same = owner is value.__self__ and function is value.__func__
            return value if same else MethodType(function, owner)
        if kind is FunctionType:
            return self._function(value)
        if kind is partial:
            parts: list[Any] = [self.of(value.func), *map(self.of, value.args)]
            options = {name: self.of(each) for name, each in value.keywords.items()}
            olds = [value.func, *value.args, *value.keywords.values()]
            return value if _are_same(olds, [*parts, *options.values()]) else partial(parts[0], *parts[1:], **options)
        return self._object(value) if callable(value) else value

    def rebind_(self, held: Any, depth: int = 0) -> None:
        """Put into containers what stands in the place of their entries."""
        for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if type(value) in (dict, OrderedDict, list) and depth < _NESTED:
                self.rebind_(value, depth + 1)
            elif (other := self.of(value)) is not value:
                held[key] = other

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            entries = {key: self.of(each, depth + 1) for key, each in value.items()}
            return value if _are_same(value.values(), entries.values()) else type(value)(entries)
        olds: list[Any] = list(value)
        news = [self.of(each, depth + 1) for each in olds]
        return value if _are_same(olds, news) else type(value)(news)

    def _function(self, value: FunctionType) -> FunctionType:
        if id(value) in self._made:
            return cast(FunctionType, self._made[id(value)][1])
        old, named = _read(value), value.__globals__
        cells = tuple(CellType() for _ in value.__closure__ or ())
        _, space = self._spaces.setdefault(id(named), (named, dict(named)))
        new = FunctionType(value.__code__, space, value.__name__, value.__defaults__, cells or None)
        self._made[id(value)] = value, new
        held = {name: named[name] for name in _global_names(value.__code__) if name in named}
        held = {n: each for n, each in held.items() if type(each) is not FunctionType or each.__globals__ is named}
        found = {name: self.of(each) for name, each in held.items()}
        closed, defaults = [self.of(each) for each in old], self.of(value.__defaults__)
        options = self.of(value.__kwdefaults__)
        olds = [*held.values(), *old, value.__defaults__, value.__kwdefaults__]
        if all(a is b or b is new for a, b in zip(olds, [*found.values(), *closed, defaults, options], strict=True)):
            self._made[id(value)] = value, value
            return value
        space.update(found)
        for cell, each in zip(cells, closed, strict=True):
            if each is not _EMPTY:
                cell.cell_contents = each
        new.__defaults__, new.__kwdefaults__ = defaults, options
        new.__dict__.update(value.__dict__)
        new.__qualname__, new.__module__, new.__doc__ = value.__qualname__, value.__module__, value.__doc__
        return new

    def _object(self, value: Any) -> Any:
        """An object that is called, or whose method is, as a shallow copy if it refers to the model."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        held = None if isinstance(value, type) else getattr(value, "__dict__", None)
        if type(held) is not dict or isinstance(value, (ModuleType, FunctionType)):
            return value
        self._made[id(value)] = value, value
        found = {name: self.of(each, 1) for name, each in held.items()}
        if _are_same(held.values(), found.values()):
            return value
        new = copy.copy(value)
        vars(new).update(found)
        self._made[id(value)] = value, new
        return new


_EMPTY = object()  # in the place of the content of a cell that has none yet


def _read(function: FunctionType) -> list[Any]:
    """What the cells of a function's closure hold."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(_EMPTY)
    return contents


def _global_names(code: CodeType) -> set[str]:
    """The names that a function, and those that are defined in it, may look up globally."""
    names, pending = set[str](), [code]
    while pending:
        each = pending.pop()
        names.update(each.co_names)
        pending += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
    return names


def _are_same(olds: Iterable[Any], news: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(olds, news, strict=True))


def copy_of(model: nn.Module, *, instead: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A deep copy, also of a model with computed tensors as attributes or lazy buffers, which torch refuses to copy.

    Hooks of pruning and of old weight and spectral norms leave such a tensor, and a forward may store one. The copy has
    its values without the graph. Functions that refer to the model's modules refer to those of the copy, as in a twin.
    An attribute that Python cannot copy, as a lock or an open file, is that of the model.

    Args:
        instead: by their `id`, tensors that are not copied, and what the copy has in their place.

    Raises: InvalidArgumentError for a model with tensors or modules that cannot be copied.

    Example:
        >>> from torch.nn.utils import prune
        >>> from gonio.editing.twin import copy_of
        >>> layer = prune.l1_unstructured(nn.Linear(2, 2), "weight", 1)
        >>> torch.equal(copy_of(layer).weight, layer.weight)
        True
    """
    tensors = (tensor for module in model.modules() for tensor in _tensors(vars(module)))
    computed = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
    memo = computed | _lazy_buffers(model) | dict(instead or {})
    try:
        made = copy.deepcopy(model, copied := dict(memo))
    except Exception as error:  # whatever an attribute or a tensor of a class of its own raises
        try:
            made = copy.deepcopy(model, copied := memo | _not_copied(model))
        except Exception:
            found = f"it cannot be copied ({first_line(error, kind=True)})"
            do = "Fold its weights, or copy it yourself."
            raise InvalidArgumentError("a copy of the model is needed", found, do) from error
    held = [*model.modules(), *model.parameters(), *model.buffers()]
    references = _References({id(each): copied[id(each)] for each in held if id(each) in copied})
    for module in model.modules():
        if id(module) in copied and not isinstance(module, torch.jit.ScriptModule):
            references.rebind_(vars(copied[id(module)]))
    return made


def _not_copied(model: nn.Module) -> dict[int, Any]:
    """By their `id`, attributes that Python cannot copy, as locks, open files and connections."""
    parts = list(model.modules())
    known = {id(each): each for each in (*parts, *model.parameters(), *model.buffers())}
    found = dict[int, Any]()
    for value in (value for part in parts for value in vars(part).values()):
        try:
            copy.deepcopy(value, dict(known))
        except Exception:  # whatever the object raises
            found[id(value)] = value
    return found


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)) and depth < _NESTED:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth + 1)


def set_tensors_(twin: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of a twin's parameters and buffers, by their `id`; the model keeps its own."""
    for module in twin.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and id(tensor) in tensors:
                    registry[name] = tensors[id(tensor)]  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):  # it keeps a list of its weights
            module._flat_weights = [tensors.get(id(each), each) for each in module._flat_weights]


def in_mode(model: nn.Module, *, training: bool) -> nn.Module:
    """The model, in this mode; one of torch.export refuses, and stays in the mode in which it was exported.

    Example:
        >>> from gonio.editing.twin import in_mode
        >>> in_mode(nn.ReLU(), training=False).training
        False
    """
    try:
        return model.train(training)
    except NotImplementedError:
        return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Gives a twin of the model without its wrappers, in evaluation mode.

    A sharded model runs itself, because the hooks that gather its shards refer to its own modules; every module gets
    its own mode and buffers back. Parameters that the twin's forward writes to get their values back. Torch's global
    generators, of the CPU and of the model's GPUs, begin with the same numbers each time, and are afterwards as they
    were. Under autocast no cast weight is kept, because verbs change weights between two runs.

    Raises:
        NotApplicableError: where the forward of the twin calls a module of the model itself, which the twin's cannot
            stand for.
    """
    inner = unwrapped(model)
    devices = sorted({p.device.index for p in inner.parameters() if p.device.type == "cuda"})
    with state_kept(devices), _without_cached_casts():
        for each in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
            each.manual_seed(0)
        if not is_sharded(inner):
            twin = without_wrappers(in_mode(twin_of(inner), training=False))
            with left_alone(inner, twin), writes_taken_back(twin):
                yield twin
        else:
            with _evaluating_itself(inner):
                yield inner


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def left_alone(model: nn.Module, twin: nn.Module | None = None) -> Iterator[None]:
    """Refuse calls of the model's own modules in this thread: in training mode they would change its buffers.

    A twin or a copy whose forward calls them refers to them in a way that is not known here.

    Args:
        twin: refuse them while one of its modules runs; None for always.

    Raises: NotApplicableError before such a module runs.
    """
    twins = {} if twin is None else {id(module): module for module in twin.modules()}
    own = {id(m): (m, path) for path, m in model.named_modules(remove_duplicate=False) if id(m) not in twins}
    thread, running = threading.get_ident(), 0 if twins else 1

    def before(module: nn.Module, _: Any) -> None:
        nonlocal running
        if threading.get_ident() != thread:
            return
        running += id(module) in twins
        if running and id(module) in own:
            why = say("a forward or a hook of the model calls it in a way that a copy of the model cannot take over")
            do = say("Let it refer to the layer by an attribute, a closure or an argument.")
            path, kind = own[id(module)][1], type(module).__name__
            told = {"action": say("leave alone"), "kind": kind}
            raise NotApplicableError(say("a run beside the model"), path, why, do, **told)

    def after(module: nn.Module, *_: Any) -> None:
        nonlocal running
        running -= threading.get_ident() == thread and id(module) in twins

    with ExitStack() as ends:
        ends.enter_context(register_module_forward_pre_hook(before))
        ends.enter_context(register_module_forward_hook(after, always_call=True))
        yield


@contextmanager
def _evaluating_itself(inner: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in inner.modules()]
    buffers = [(module, dict(module._buffers)) for module in inner.modules()]
    values = [(buffer, buffer.clone()) for buffer in inner.buffers()]
    try:
        with run_eagerly(in_mode(inner, training=False)):
            yield
    finally:  # also if Ctrl-C comes here
        own = [partial(module._buffers.update, before) for module, before in buffers]
        own += [partial(_set_back_, buffer, value) for buffer, value in values]
        run_reversed([*own, *(partial(setattr, module, "training", training) for module, training in modes)])


def _set_back_(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(buffer, value.to(buffer)):
            buffer.copy_(value)
