"""Checkpoints of HQQ (`qmodel.pt`): a mapping of layers, whose codes stand beside a mapping of what they mean.

They become the tensors that HQQ writes into safetensors: numbers, words and shapes as tensors too.

References: mobiusml/hqq, `hqq/models/base.py`, `hqq/core/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gonio.measuring.reading.entry import StoredTensor, TensorEntry
from gonio.measuring.reading.opened import Opened

_CODES, _ABOUT, _NAMED = "W_q", "meta", "packing"
_DEPTH = 2  # of mappings in a layer: what its codes mean, and what those of its scales do
_LARGEST = 64  # numbers of a shape, or letters of a word


def open_layers(content: Any, read: Callable[[tuple[Any, ...]], Tensor] | None = None) -> Opened | None:
    """The tensors of a checkpoint of HQQ; None for other content.

    Args:
        read: returns the tensor at these keys when it is measured; by default tensors are kept in memory.
    """
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return None
    layers = [layer for layer in content.values() if isinstance(layer, Mapping)]
    plain = sum(isinstance(one, Tensor) for one in content.values())  # that belong to no layer
    if len(layers) + plain < len(content) or not any(_is_packed(layer) for layer in layers):
        return None
    stored: dict[str, StoredTensor] = {}
    others = []
    for key, at, value in _parts(content, "", (), _DEPTH + 1):
        if isinstance(value, Tensor):
            stored[key] = StoredTensor.of(value, read and partial(read, at))
        elif (fact := _as_tensor(value)) is not None:
            stored[key] = StoredTensor.of(fact)
        elif value is not None:
            kind = type(value).__name__
            others.append(TensorEntry(key, kind, None, None, f"not a tensor but {kind}"))
    return Opened(stored, tuple(others))


def _is_packed(layer: Mapping[Any, Any]) -> bool:
    """Whether a layer has codes, and says how they are packed."""
    about = layer.get(_ABOUT, layer)
    return isinstance(layer.get(_CODES), Tensor) and isinstance(about, Mapping) and _NAMED in about


def _parts(
    held: Mapping[Any, Any], name: str, at: tuple[Any, ...], depth: int
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """(name, keys, value) of everything in a layer; what its codes mean has no name of its own."""
    for key, value in held.items():
        inner = name if key == _ABOUT and len(at) == 1 else f"{name}.{key}".removeprefix(".")
        if isinstance(value, Mapping) and depth:
            yield from _parts(value, inner, (*at, key), depth - 1)
        else:
            yield inner, (*at, key), value


def _as_tensor(value: Any) -> Tensor | None:
    """A number, a word, a dtype or a shape as HQQ stores it in a tensor; None for anything else."""
    if isinstance(value, (str, torch.dtype)):
        return torch.tensor([ord(letter) % 256 for letter in str(value)[:_LARGEST]], dtype=torch.uint8, device="cpu")
    if not isinstance(value, (bool, int, float, tuple, list)) or (isinstance(value, (tuple, list)) and not value):
        return None
    numbers = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(numbers) > _LARGEST or not all(isinstance(number, (bool, int, float)) for number in numbers):
        return None
    try:
        return torch.tensor(numbers if isinstance(value, (tuple, list)) else value, device="cpu")
    except (OverflowError, RuntimeError, ValueError):
        return None
