"""The tensors of a state dict: where a checkpoint holds it, and the meaning of its keys and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from gonio.errors import InvalidArgumentError, listing
from gonio.escaping import plain, shorten
from gonio.geometry import Layout
from gonio.measuring.reading.adapters import Adapter, adapters_in
from gonio.measuring.reading.entry import PART, Entry, Stored, in_memory
from gonio.measuring.reading.quantised import Packed, packed_weights
from gonio.measuring.reading.rotations import Rotation, rotations_in

# The keys under which trainers store the weights, most trusted first; averages of the weights last.
_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights", "state")
_AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "params_ema", "ema", "shadow_params")
_DEPTH = 3


@dataclass(frozen=True)
class Found:
    """A state dict in a checkpoint.

    Attributes:
        key: its place, with dots between keys; "" for the checkpoint itself.
        beside: the keys of other state dicts in the checkpoint, which were not read.
    """

    state: Mapping[Any, Any]
    key: str
    beside: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the choice."""
        read = (f"read from {plain(self.key)!r} of the checkpoint",) if self.key else ()
        others = listing([plain(key) for key in self.beside], limit=4)
        return (*read, f"not read: {others}, of the same checkpoint") if self.beside else read


def state_in(content: Any, *, what: str) -> Found:
    """The state dict in a checkpoint: the least deep one, and of several the one under the most trusted key.

    Args:
        what: the name of `content` in the error.

    Raises:
        InvalidArgumentError: if it holds no named tensors.
    """
    if isinstance(content, Mapping):
        if _holds_tensors(content):
            return Found(content, "", ())
        places = list(_places(content, "", _DEPTH))
        if places:
            key, state = min(places, key=lambda place: place[0].count("."))  # the first of the least deep
            return Found(state, key, tuple(other for other, _ in places if other != key))
    held = type(content).__name__
    if isinstance(content, Mapping):
        held = f"a mapping with the keys [{some(content, repr)}]"
    raise InvalidArgumentError(
        f"measure() looks for named tensors in {what}",
        held,
        f"Pass the state dict itself, or store it under one of: {', '.join(_KEYS)}.",
    )


def some(names: Collection[Any], form: Callable[[Any], str] = str) -> str:
    """The first names, shortened, and how many more there are; for errors, which stay short whatever the names are."""
    shown = ", ".join(shorten(form(name)[:200]) for name in islice(names, 8))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _holds_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())


def _places(content: Mapping[Any, Any], at: str, depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """(place, state dict) for every state dict under the known keys."""
    for key in (*_KEYS, *_AVERAGES):
        inner = content.get(key)
        if not isinstance(inner, Mapping):
            continue
        if _holds_tensors(inner):
            yield f"{at}{key}", inner
        elif depth > 1:
            yield from _places(inner, f"{at}{key}.", depth - 1)


@dataclass(frozen=True)
class Configs:
    """The configurations beside a file: of its quantisation, and of its adapters."""

    quantization: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """A source's tensors and adapters, and notes on how it was read."""

    entries: list[Entry]
    adapters: list[Adapter]
    notes: tuple[str, ...] = ()
    rotations: list[Rotation] = field(default_factory=list)


def entries_of_mapping(state: Mapping[Any, Any], notes: tuple[str, ...] = ()) -> Contents:
    """One entry per key; a value that is no tensor has a reason."""
    found = entries_of_stored(in_memory({**state, **packed_linears(state)}), notes=notes)
    return Contents(found.entries + other_entries(state), found.adapters, notes, found.rotations)


def packed_linears(state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The weights of torch's quantised linear layers, which store (weight, bias) under one key."""
    return {
        f"{str(name).removesuffix('._packed_params').removesuffix('._packed_params')}.weight": value[0]
        for name, value in state.items()
        if _is_packed_linear(name, value)
    }


def _is_packed_linear(name: Any, value: Any) -> bool:
    return str(name).endswith("._packed_params") and isinstance(value, tuple) and isinstance(value[:1][0], Tensor)


def other_entries(state: Mapping[Any, Any]) -> list[Entry]:
    """One entry, with a reason, for each value that is no tensor and not None."""
    return [
        Entry(str(name), type(value).__name__, None, None, f"not a tensor but {type(value).__name__}")
        for name, value in state.items()
        if not isinstance(value, Tensor) and value is not None and not _is_packed_linear(name, value)
    ]


def entries_of_stored(
    stored: Mapping[str, Stored], *, configs: Configs | None = None, notes: tuple[str, ...] = ()
) -> Contents:
    """One entry per tensor; a quantised weight is the entry of its first part, computed from all of them."""
    configs = configs or Configs()
    packed = packed_weights(stored, configs.quantization)
    whole = {part: weight for weight in packed for part in weight.parts}
    cleaned = clean_names(stored)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    made = []
    for name, tensor in stored.items():
        weight = whole.get(name)
        if weight is not None and weight.parts[0] == name:
            made.append(_unpacked(weight, cleaned, shapes))
        elif weight is not None:
            reason = f"a part of the quantised {cleaned.get(weight.name, weight.name)}"
            made.append(Entry(cleaned[name], PART, None, tensor.load, reason, (), tensor.shape, tensor.dtype))
        else:
            layout, kind, reason, said = infer(name, shapes)
            made.append(Entry(cleaned[name], kind, layout, tensor.load, reason, said, tensor.shape, tensor.dtype))
    return Contents(made, adapters_in(stored, configs.adapter), notes, rotations_in(stored, configs.adapter))


def _unpacked(weight: Packed, cleaned: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Entry:
    """The entry of a weight computed from its parts; a stack of matrices is read as one of experts."""
    name = cleaned.get(weight.name, weight.name)
    layout, kind, reason, notes = infer(weight.name, {**shapes, weight.name: weight.stored.shape})
    if weight.matrices > 1 or layout is None:
        layout, kind, reason = Layout(blocks=weight.matrices), "linear", ""
    tensor = weight.stored
    return Entry(name, kind, layout, tensor.load, reason, (weight.note, *notes), tensor.shape, tensor.dtype)


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RECURRENT = re.compile(r"(.*?)weight_(ih|hh)(_l\d+(?:_reverse)?)?")
_KINDS = {2: "linear or embedding", 3: "1-d convolution", 4: "2-d convolution", 5: "3-d convolution"}
_RAW = "the tensor that a parametrization computes the weight from"


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each key without the names that wrappers add; `module.` is removed only if every key begins with it.

    Example:
        >>> from gonio.measuring.reading.state_dict import clean_names
        >>> clean_names(["module._orig_mod.fc.weight", "module.module.w"])
        {'module._orig_mod.fc.weight': 'fc.weight', 'module.module.w': 'module.w'}
    """
    names = list(names)
    shared = bool(names) and all(name.startswith("module.") for name in names)
    cleaned = {}
    for name in names:
        parts = (name.removeprefix("module.") if shared else name).split(".")
        cleaned[name] = ".".join(part for part in parts if part not in _WRAPPERS)
    unique = len(set(cleaned.values())) == len(cleaned)
    return cleaned if unique else {name: name for name in names}


def infer(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Layout | None, str, str, tuple[str, ...]]:
    """The layout of the tensor `name`, inferred from its key and shape.

    A tensor of two to five dimensions called a weight is a stack of filters on dim 0: a linear layer or an
    embedding (2), a convolution (3 to 5). The shape alone does not reveal whether a convolution is grouped or
    transposed; it is read as neither, and a note says so.

    Args:
        name: the key.
        shapes: of all tensors of the state dict; the blocks of recurrent weights follow from two of them.

    Returns:
        The layout, or None; the kind; the reason for a missing layout; notes.
    """
    shape = shapes[name]
    last = name.rsplit(".", 1)[-1]
    if len(shape) < 2:
        return None, f"{len(shape)}-d tensor", "a single number" if not shape else "a vector", ()
    if ".parametrizations." in f".{name}" and last.startswith("original"):
        return Layout(), "parametrization", "", (_RAW,)
    if ("weight" not in last and last not in ("kernel", "lora_A", "lora_B")) or len(shape) not in _KINDS:
        return None, f"{len(shape)}-d tensor", "not called a weight, so not read as filters", ()
    blocks, notes = _blocks(name, shapes)
    if len(shape) > 2:
        lone = shape[1] == 1 and shape[0] > 1
        notes = (*notes, "depthwise, or of one input channel" if lone else "groups unknown, read as 1")
    if f"{name}_parametrization._extra_state" in shapes:
        notes = (*notes, _RAW)
    return Layout(blocks=blocks), _KINDS[len(shape)], "", notes


def _blocks(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, tuple[str, ...]]:
    """The number of stacked matrices in packed attention and recurrent weights, and a note."""
    shape = shapes[name]
    if name.endswith("in_proj_weight") and shape[0] == 3 * shape[1]:
        return 3, ("packed attention: three matrices",)
    found = _RECURRENT.fullmatch(name)
    if found:
        hidden = shapes.get(f"{found[1]}weight_hh{found[3] or ''}", (0, 0))[-1]
        blocks = shape[0] // hidden if hidden and shape[0] % hidden == 0 else 1
        if blocks in (3, 4):
            return blocks, (f"{'LSTM' if blocks == 4 else 'GRU'}: {blocks} matrices",)
    return 1, ()
