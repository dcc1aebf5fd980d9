"""Run a model without touching it: on other modules that share its parameters.

A verb that only reads a model runs it in evaluation mode, with hooks, and under tracers that set attributes. On a twin
all of this happens beside the model: other threads may train it or serve it meanwhile, and an interruption leaves
nothing to restore.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from gonio.editing.edit import run_reversed
from gonio.editing.where import adds_no_name, holds_original, is_sharded, run_eagerly, unwrapped
from gonio.seeding import state_kept

_NESTED = 4  # levels of lists and dicts in an attribute in which modules are found


def twin_of(model: nn.Module) -> nn.Module:
    """A model of new modules with the same classes, parameters and hooks, copies of the buffers, and no compiled part.

    Modes, hooks, attributes, buffers and the entries of registries can be changed without effect on the model; a
    change of a parameter in place is one of the model. Attributes that refer to modules or buffers of the model (also
    in lists, tuples, dicts, bound methods, closures, partial functions and weak references) refer to their twins.
    Scripted and lazy modules are copied.

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
    for module in parts:
        vars(twins[id(module)]).update({name: _mapped(value, twins) for name, value in vars(module).items()})
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


def _mapped(value: Any, twins: Mapping[int, Any], depth: int = 0) -> Any:
    """An attribute with twins in the place of modules, and copies in the place of buffers."""
    kind = type(value)
    if isinstance(value, (nn.Module, Tensor)):
        return twins.get(id(value), value)
    if kind in (dict, OrderedDict) and depth < _NESTED:
        return kind((_mapped(k, twins, _NESTED), _mapped(v, twins, depth + 1)) for k, v in value.items())
    if kind in (list, tuple, set) and depth < _NESTED:
        return kind(_mapped(each, twins, depth + 1) for each in value)
    if kind is weakref.ref:
        return weakref.ref(twins[id(value())]) if id(value()) in twins else value
    if kind is MethodType and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if kind is FunctionType and value.__closure__:
        cells = [_mapped(cell.cell_contents, twins, _NESTED) for cell in value.__closure__]
        if any(a is not b.cell_contents for a, b in zip(cells, value.__closure__, strict=True)):
            closure = tuple(CellType(each) for each in cells)
            return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    if kind is partial:
        arguments = [_mapped(each, twins, depth + 1) for each in value.args]
        options = {name: _mapped(each, twins, depth + 1) for name, each in value.keywords.items()}
        return partial(_mapped(value.func, twins, depth + 1), *arguments, **options)
    return value


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model with computed tensors as attributes or lazy buffers, which torch refuses to copy.

    Hooks of pruning and of old weight and spectral norms leave such a tensor, and a forward may store one. The copy has
    its values without the graph.

    Example:
        >>> from torch.nn.utils import prune
        >>> from gonio.editing.twin import copy_of
        >>> layer = prune.l1_unstructured(nn.Linear(2, 2), "weight", 1)
        >>> torch.equal(copy_of(layer).weight, layer.weight)
        True
    """
    tensors = (tensor for module in model.modules() for tensor in _tensors(vars(module)))
    computed = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
    return copy.deepcopy(model, computed | _lazy_buffers(model))


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)) and depth < _NESTED:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth + 1)


def _named_globally(model: nn.Module) -> bool:
    """Whether a function set as an attribute refers to a module of the model by a global name."""
    parts = list(model.modules())
    functions = [value for part in parts for value in vars(part).values() if type(value) is FunctionType]
    named = {id(each.__globals__.get(name)) for each in functions for name in each.__code__.co_names}
    return any(id(part) in named for part in parts)


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

    A sharded model runs itself, because the hooks that gather its shards refer to its own modules, and so does one
    with a function that refers to its modules by a global name; every module gets its own mode and buffers back. What
    the forward draws leaves torch's global generators, of the CPU and of the model's GPUs, as they were.
    """
    inner = unwrapped(model)
    devices = sorted({p.device.index for p in inner.parameters() if p.device.type == "cuda"})
    with state_kept(devices):
        if not is_sharded(inner) and not _named_globally(inner):
            yield without_wrappers(in_mode(twin_of(inner), training=False))
        else:
            with _evaluating_itself(inner):
                yield inner


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
