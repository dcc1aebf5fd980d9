"""One tensor of a model or file before it is measured: what it is called, how it is stored, how to get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gonio.geometry import Layout

__all__ = ["PADDING", "PART", "Entry"]

PART = "part"  # the kind of a tensor of which, with others, a quantised weight is made
PADDING = "one row is padding and stays 0"  # the note on an embedding that has such a row


@dataclass(frozen=True)
class Entry:
    """A tensor to measure.

    Attributes:
        name: its key in the state dict, without the names that wrappers add.
        kind: the layer's class, or what the shape suggests.
        layout: how it is stored; None for a tensor without filters.
        load: reads the tensor; called once, and the tensor is dropped before the next is read.
        reason: why it has no filters, or why it cannot be measured at all.
        notes: what the reader must know, for example that the layout was guessed.
        shape, dtype: as far as they are known without reading it; None and "" for a weight that is computed.
    """

    name: str
    kind: str
    layout: Layout | None
    load: Callable[[], Tensor] | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""

    @property
    def path(self) -> str:
        """The name by which a reader asks for it: the layer's path for its weight."""
        return self.name.removesuffix(".weight")
