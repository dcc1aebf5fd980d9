"""The tensors of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gonio.geometry import Layout
from gonio.measuring.adapters import Adapter, adapters_in
from gonio.measuring.entry import PART, Entry
from gonio.measuring.names import clean_names, infer
from gonio.measuring.quantised import Packed, packed_weights
from gonio.measuring.stored import Stored, in_memory

__all__ = ["Configs", "Contents", "entries_of_mapping", "entries_of_stored", "other_entries", "packed_linears"]


@dataclass(frozen=True)
class Configs:
    """What lies beside a file: how its weights were quantised, how its adapters are scaled."""

    quantization: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """A source's tensors and adapters, and notes on how it was read."""

    entries: list[Entry]
    adapters: list[Adapter]
    notes: tuple[str, ...] = ()


def entries_of_mapping(state: Mapping[Any, Any], notes: tuple[str, ...] = ()) -> Contents:
    """One entry per key: the tensors, and what is no tensor with the reason."""
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    found = entries_of_stored(in_memory({**tensors, **packed_linears(state)}), notes=notes)
    return Contents(found.entries + other_entries(state), found.adapters, notes)


def packed_linears(state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Torch's quantised linear layers keep (weight, bias) under one key."""
    return {
        f"{str(name).removesuffix('._packed_params').removesuffix('._packed_params')}.weight": value[0]
        for name, value in state.items()
        if _is_packed_linear(name, value)
    }


def _is_packed_linear(name: Any, value: Any) -> bool:
    return str(name).endswith("._packed_params") and isinstance(value, tuple) and isinstance(value[:1][0], Tensor)


def other_entries(state: Mapping[Any, Any]) -> list[Entry]:
    """A row for each value that is no tensor; None stands for nothing."""
    return [
        Entry(str(name), type(value).__name__, None, None, f"not a tensor but {type(value).__name__}")
        for name, value in state.items()
        if not isinstance(value, Tensor) and value is not None and not _is_packed_linear(name, value)
    ]


def entries_of_stored(
    stored: Mapping[str, Stored], *, configs: Configs | None = None, notes: tuple[str, ...] = ()
) -> Contents:
    """One entry per tensor, read only when it is measured, and one for each weight that several make up."""
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
    return Contents(made, adapters_in(stored, configs.adapter), notes)


def _unpacked(weight: Packed, cleaned: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Entry:
    """The entry of a weight that is computed from its parts; a stack of matrices is one of experts."""
    name = cleaned.get(weight.name, weight.name)
    layout, kind, reason, notes = infer(weight.name, {**shapes, weight.name: weight.stored.shape})
    if weight.matrices > 1 or layout is None:
        layout, kind, reason = Layout(blocks=weight.matrices), "linear", ""
    tensor = weight.stored
    return Entry(name, kind, layout, tensor.load, reason, (weight.note, *notes), tensor.shape, tensor.dtype)
