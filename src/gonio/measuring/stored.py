"""A tensor where it lies: what its header says of it, and how to read its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Stored", "dtype_named", "header_of", "in_memory", "small_json", "spelled"]

LARGEST_JSON = 1 << 20  # bytes, of a configuration; those of large models have some thousands


@dataclass(frozen=True)
class Stored:
    """A named tensor that is read only when it is measured.

    Attributes:
        dtype: torch's name for it, without `torch.`; another name for one that torch does not have.
        load: reads it.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]

    @property
    def entries(self) -> int:
        return prod(self.shape)


def spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of this name; None if torch has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def in_memory(tensors: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a mapping, as they are."""
    return {
        str(name): Stored(*header_of(value), partial(_same, value))
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }


def header_of(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype; nothing of a tensor that does not tell them, as some subclasses do not."""
    try:
        return tuple(int(n) for n in tensor.shape), spelled(tensor.dtype)
    except Exception:  # a tensor's subclass answers with code of its own
        return (), ""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def small_json(path: Any) -> dict[str, Any]:
    """The object in a small JSON file; an empty one where there is no such file, or something else in it."""
    import json

    try:
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
