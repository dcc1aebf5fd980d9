"""Where the weights are in what a trainer saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gonio.errors import InvalidArgumentError, listing
from gonio.escaping import plain

__all__ = ["Found", "state_in"]

# Where trainers put the weights, in the order of trust; averages of the weights last.
_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights", "state")
_AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "params_ema", "ema", "shadow_params")
_DEPTH = 3


@dataclass(frozen=True)
class Found:
    """A state dict in a checkpoint.

    Attributes:
        key: where it was, with dots between; "" for the checkpoint itself.
        beside: the keys of other state dicts in it, which were not read.
    """

    state: Mapping[Any, Any]
    key: str
    beside: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader must know of the choice."""
        read = (f"read from {plain(self.key)!r} of the checkpoint",) if self.key else ()
        others = listing([plain(key) for key in self.beside], limit=4)
        return (*read, f"not read: {others}, of the same checkpoint") if self.beside else read


def state_in(content: Any, *, what: str) -> Found:
    """The state dict in a checkpoint: the nearest to its surface, and of several the most trusted key.

    Raises:
        InvalidArgumentError: if there are no named tensors in it.
    """
    if isinstance(content, Mapping):
        if _holds_tensors(content):
            return Found(content, "", ())
        places = list(_places(content, "", _DEPTH))
        if places:
            key, state = min(places, key=lambda place: place[0].count("."))  # the first of the least deep
            return Found(state, key, tuple(other for other, _ in places if other != key))
    held = f"a mapping with the keys {list(content)[:8]}" if isinstance(content, Mapping) else type(content).__name__
    raise InvalidArgumentError(
        f"measure() looks for named tensors in {what}",
        held,
        f"Pass the state dict itself, or store it under one of: {', '.join(_KEYS)}.",
    )


def _holds_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())


def _places(content: Mapping[Any, Any], at: str, depth: int) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Every state dict under the known keys, with its place."""
    for key in (*_KEYS, *_AVERAGES):
        inner = content.get(key)
        if not isinstance(inner, Mapping):
            continue
        if _holds_tensors(inner):
            yield f"{at}{key}", inner
        elif depth > 1:
            yield from _places(inner, f"{at}{key}.", depth - 1)
