"""The tensors of a model: its parameters and buffers, and the weights that its layers and adapters compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.editing.memory import memory_key
from gonio.errors import NotApplicableError, first_line
from gonio.execution import loaded
from gonio.geometry import Layout, layout_of
from gonio.measuring.reading.entry import (
    FACTOR,
    FEW_DIMENSIONS,
    STACKED,
    TensorEntry,
    header_of,
    infer,
    is_batched_kernel,
    says_tied,
)
from gonio.measuring.reading.experts import Stack, stacks_in, untold
from gonio.measuring.reading.peft_layers import AdaptedLayers, adapted_entries
from gonio.parametrizations.checkpoints import weights_of_hooks
from gonio.parametrizations.mechanism import parametrization_of, without_steps
from gonio.surgery import Site, sites
from gonio.surgery.facts import TABLES, facts_of

Read = Callable[[], Tensor]
_UNREAD = "not known to be a stack of filters"
_DYNAMIC = ("LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


def entries_of_model(model: nn.Module) -> list[TensorEntry]:
    """One entry per parameter and buffer, tied ones once, and one per weight that a layer or an adapter computes."""
    seen: dict[Hashable, str] = {}
    places: dict[str, int] = {}
    made: list[TensorEntry] = []
    everything = sites(model)
    trained = any(p.requires_grad for site in everything for p in site.module._parameters.values() if p is not None)
    adapted = AdaptedLayers(everything)
    for site in everything:
        computed = _computed(site.module)
        for name, tensor in (*_own(site.module), *((name, None) for name in computed)):
            path = f"{site.path}.{name}" if site.path else name
            first = path if tensor is None else seen.setdefault(memory_key(tensor), path)
            if first == path:
                places[path] = len(made)
                made.append(_entry_of(site, name, path, tensor, computed.get(name)))
            else:
                kind = type(site.module).__name__
                made.append(TensorEntry(path, kind, None, None, says_tied(first), tied=first))
            if name == "weight" and tensor is not None:
                made[places[first]] = _of_table(made[places[first]], site.module, tensor, trained)
    shapes = {entry.name: entry.shape for entry in made if entry.shape is not None}
    unread = [
        e.name for e in made if e.reason.startswith((_UNREAD, STACKED)) or (e.inferred and untold(e.name, shapes))
    ]
    stacks = stacks_in(shapes, unread)
    made = [stacks[entry.name].entry(entry) if entry.name in stacks else entry for entry in made]
    if not adapted.layers and not adapted.saved:
        return made
    return [*_placed(made, adapted), *_of_adapters(adapted, stacks)]


def _placed(entries: list[TensorEntry], adapted: AdaptedLayers) -> Iterator[TensorEntry]:
    """The entries with their names in the model without adapters."""
    for entry in entries:
        part, plain = adapted.role_of(entry.name)
        entry = replace(entry, role="adapter", kind=FACTOR) if part else entry
        yield replace(entry, weight_name="" if plain == entry.name else plain)


def _of_adapters(adapted: AdaptedLayers, stacks: Mapping[str, Stack]) -> Iterator[TensorEntry]:
    for path, layer in adapted.layers.items():
        base = layer.get_base_layer()  # type: ignore[operator]
        layout, reason = _layout(base, "weight", None)
        inner = path
        while inner in adapted.layers:  # adapters of several parameters lie inside of each other
            inner += ".base_layer"
        plain = adapted.role_of(f"{inner}.weight")[1].removesuffix("weight").removesuffix(".")
        held = {name: stacks[key] for name, _ in _own(base) if (key := f"{inner}.{name}") in stacks}
        yield from adapted_entries(path, layer, plain, layout, reason, held)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own tensors, by torch's methods whatever a class makes of them."""
    yield from nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)
    yield from nn.Module.named_buffers(module, recurse=False, remove_duplicate=False)


def _computed(module: nn.Module) -> dict[str, Read]:
    """The weights that a module computes, each with a function that reads it."""
    lists = _parametrizations(module)
    made: dict[str, Read] = {name: partial(_read, module, name) for name in lists or ()} | weights_of_hooks(module)
    weight = module.__dict__.get("weight")
    called = "weight" not in dict(_own(module)) and callable(getattr(type(module), "weight", None))
    if isinstance(weight, Tensor) or called:
        made.setdefault("weight", partial(_read, module, "weight"))
    for name in recurrent_weights(module):
        made.setdefault(name, partial(lambda of, key: recurrent_weights(of)[key], module, name))
    return made


def recurrent_weights(module: nn.Module) -> Mapping[str, Tensor]:
    """The weights of torch's dynamically quantised recurrent layers, which are neither parameters nor buffers."""
    kinds = loaded(*(f"torch.ao.nn.quantized.dynamic:{kind}" for kind in _DYNAMIC))
    return dict(module.get_weight()) if isinstance(module, kinds) else {}  # type: ignore[operator]


def _parametrizations(module: nn.Module) -> nn.ModuleDict | None:
    """Torch's container of a module's parametrizations; None for a child of another kind that has its name."""
    lists = dict(nn.Module.named_children(module)).get("parametrizations")
    if not isinstance(lists, nn.ModuleDict):
        return None
    return lists if all(isinstance(part, nn.utils.parametrize.ParametrizationList) for part in lists.values()) else None


def _entry_of(site: Site, name: str, path: str, tensor: Tensor | None, read: Read | None) -> TensorEntry:
    """The entry of a tensor; for one that cannot be inspected, an entry with the reason."""
    try:
        return _entry(site, name, path, tensor, read)
    except Exception as error:  # a tensor's subclass, or a property of the module, runs code of its own
        said = f"cannot be read: {first_line(error, 300)}"
        return TensorEntry(path, type(site.module).__name__, None, None, said)


def _of_table(entry: TensorEntry, module: nn.Module, table: Tensor, trained: bool) -> TensorEntry:
    """The entry of a table, or of what is tied to one, marked where rows are alike without having been learned."""
    if getattr(module, "padding_idx", None) is not None:
        entry = entry.marked("padding")
    if not isinstance(module, TABLES):
        return entry
    entry = replace(entry, table=True)
    if trained and isinstance(table, nn.Parameter) and not table.requires_grad:
        entry = entry.marked("fixed")
    if type(table) is not nn.Parameter or table.is_meta or table.dim() != 2 or len(table) < 2:
        return entry
    with suppress(NotImplementedError):  # of narrow types without a comparison
        if torch.equal(table[0], table[-1]) and bool(table[0].any()) and bool((table == table[:1]).all()):
            entry = entry.marked("constant")
    return entry


def _entry(site: Site, name: str, path: str, tensor: Tensor | None, read: Read | None) -> TensorEntry:
    module = site.module
    kind = type(module).__name__
    notes = tuple(f"also {alias}.{name}" for alias in site.aliases)
    if tensor is not None and is_lazy(tensor):
        return TensorEntry(path, kind, None, None, "a lazy layer that has seen no input yet", notes)
    if tensor is not None and _is_empty_range(module, name):
        return TensorEntry(path, kind, None, None, "the range of an observer that has seen no values yet", notes)
    load = read or partial(_read, module, name)
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return TensorEntry(path, kind, None, load, "a part of a parametrization", notes)
    parametrization = parametrization_of(module, name)
    if parametrization is not None:
        remarks = parametrization.remarks(load)
        notes = (*notes, f"the weight that {type(parametrization).__name__} computes", *remarks)
    elif tensor is None:
        notes = (*notes, "the weight that the layer computes")
    layout, reason = _layout(module, name, tensor)
    shape, dtype = (None, "") if tensor is None else header_of(tensor)
    made = TensorEntry(path, kind, layout, load, reason, notes, shape, dtype)
    try:
        layout_of(module, name)
    except NotApplicableError:
        made = replace(made, inferred=tensor is not None)
        if layout is not None and shape is not None and is_batched_kernel(shape):
            return replace(made, load=lambda: load()[0], shape=shape[1:], notes=(*notes, "of the shape (1, …)"))
    return made


def _is_empty_range(module: nn.Module, name: str) -> bool:
    """Whether it is a bound of an observer of torch's quantisation before its first batch: from ∞ to −∞."""
    if name not in ("min_val", "max_val") or not isinstance(module, loaded("torch.ao.quantization:ObserverBase")):
        return False
    low, high = (getattr(module, bound, None) for bound in ("min_val", "max_val"))
    if not isinstance(low, Tensor) or not isinstance(high, Tensor) or low.is_meta or not low.numel():
        return False
    return bool((low == inf).all()) and bool((high == -inf).all())


def _layout(module: nn.Module, name: str, tensor: Tensor | None) -> tuple[Layout | None, str]:
    """The layout of a module's tensor, or None and the reason."""
    with suppress(NotApplicableError):
        return layout_of(module, name), ""
    if tensor is None:
        found = recurrent_weights(module)
        if name in found:
            axes = infer(name, {key: tuple(value.shape) for key, value in found.items()})
            return axes.layout, axes.reason
        return (Layout(), "") if name == "weight" else (None, _UNREAD)
    if tensor.ndim > 1 and facts_of(module).removes_scale:
        return None, "gains and shifts, one per entry of the input"
    if not isinstance(tensor, nn.Parameter) and tensor.ndim > 1 and tensor.is_floating_point():
        return None, "a buffer: not trained"
    if name == "weight" and tensor.ndim >= 2:
        axes = infer(name, {name: tuple(tensor.shape)})
        return axes.layout, axes.reason
    return None, FEW_DIMENSIONS[tensor.ndim] if tensor.ndim < 2 else _UNREAD


def _read(module: nn.Module, name: str) -> Tensor:
    with without_steps(module):
        value: Any = getattr(module, name)
        if callable(value) and not isinstance(value, Tensor):  # torch's quantised layers: weight()
            value = value()
    return value
