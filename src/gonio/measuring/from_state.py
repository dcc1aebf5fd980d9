"""The tensors of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry import Layout
from gonio.measuring.entry import Entry
from gonio.measuring.names import clean_names, infer

__all__ = ["entries_of_shapes", "entries_of_state", "state_in"]

# Where trainers put the weights, in the order of trust.
_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")


def state_in(content: Any, *, what: str) -> tuple[Mapping[str, Any], str]:
    """The state dict in a checkpoint, and the key under which it was ("" for the checkpoint itself).

    Raises:
        InvalidArgumentError: if there are no named tensors in it.
    """
    if isinstance(content, Mapping):
        if any(isinstance(value, Tensor) for value in content.values()):
            return content, ""
        for key in _KEYS:
            inner = content.get(key)
            if isinstance(inner, Mapping) and any(isinstance(value, Tensor) for value in inner.values()):
                return inner, key
    held = f"a mapping with the keys {list(content)[:8]}" if isinstance(content, Mapping) else type(content).__name__
    raise InvalidArgumentError(
        f"measure() looks for named tensors in {what}",
        held,
        f"Pass the state dict itself, or store it under one of: {', '.join(_KEYS)}.",
    )


def entries_of_state(state: Mapping[str, Any]) -> list[Entry]:
    """One entry per key: the tensors, and what is no tensor with the reason."""
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    entries = entries_of_shapes(shapes, {name: partial(_same, value) for name, value in tensors.items()})
    entries += _low_rank(shapes, tensors)
    others = [(str(name), value) for name, value in state.items() if not isinstance(value, Tensor)]
    return entries + [
        Entry(name, type(value).__name__, None, None, f"not a tensor but {type(value).__name__}")
        for name, value in others
        if value is not None
    ]


def entries_of_shapes(shapes: Mapping[str, tuple[int, ...]], loads: Mapping[str, Callable[[], Tensor]]) -> list[Entry]:
    """One entry per tensor, read only when it is measured."""
    cleaned = clean_names(shapes)
    made = []
    for name in shapes:
        layout, kind, reason, notes = infer(name, shapes)
        made.append(Entry(cleaned[name], kind, layout, loads[name], reason, notes))
    return made


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _low_rank(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> list[Entry]:
    """For each pair of adapter matrices A and B their product, which is what the adapter adds to the weight."""
    made = []
    for name, shape in shapes.items():
        if ".lora_A" not in name:
            continue
        other = name.replace(".lora_A", ".lora_B")
        if other in shapes and len(shape) == 2 and len(shapes[other]) == 2 and shapes[other][1] == shape[0]:
            path = name.split(".lora_A")[0]
            load = partial(_product, tensors[other], tensors[name])
            note = "the product of the adapter's B and A, without its scale, which the file does not hold"
            made.append(Entry(f"{path}.lora_BA", "low-rank product", Layout(), load, notes=(note,)))
    return made


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(left.float(), right.float())
