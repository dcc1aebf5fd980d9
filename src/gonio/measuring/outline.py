"""`outline`: names, shapes, dtypes and sizes of all tensors, from headers alone, so that no values are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from gonio.errors import GonioError
from gonio.escaping import json_data, plain, shorten
from gonio.geometry.views import view_shape
from gonio.measuring.reading.entry import TensorEntry, dtype_named
from gonio.measuring.reading.source import Source, contents_of, name_of
from gonio.measuring.showing.table import Table
from gonio.messages import Message, counted, joined, local
from gonio.pages.tables import bare_table, file_size

SCHEMA = "gonio.outline/1"


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """The header of a tensor.

    Attributes:
        shape: None for a weight that its layer computes, and for a missing one.
        entries, bytes: number of entries, and their size as `dtype`; None if not known.
        groups, filters, dim: as in :class:`TensorMeasurement`; None for a tensor without filters.
        reason: why it has no filters, or why it cannot be read.
    """

    name: str
    path: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    entries: int | None
    bytes: int | None
    groups: int | None = None
    filters: int | None = None
    dim: int | None = None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Outline(Table[TensorHeader]):
    """Every tensor of a model or file with its shape, dtype and size: a mapping by path that prints as a table.

    Attributes:
        source: the name of the model or file. `notes`: how it was read.

    Example:
        >>> found = gonio.measuring.outline({"a.weight": torch.zeros(2, 3)})
        >>> found, found["a"].shape
        (<Outline of state dict: 1 tensor, 6 numbers>, (2, 3))
    """

    ROW: ClassVar = TensorHeader

    source: str
    tensors: tuple[TensorHeader, ...]
    notes: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        """Number of entries of all tensors, as far as known."""
        return sum(tensor.entries or 0 for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Their size, as far as known."""
        return sum(tensor.bytes or 0 for tensor in self.tensors)

    @property
    def _size(self) -> Message:
        return joined([counted(len(self.tensors), "tensor"), counted(self.entries, "number")])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "notes": json_data(self.notes),
            "entries": self.entries,
            "bytes": self.bytes,
            "tensors": json_data(self.tensors),
        }

    def __repr__(self) -> str:
        return f"<Outline of {plain(self.source)}: {self._size}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        said = joined([self._size, file_size(self.bytes)])
        yield Text(f"{plain(self.source)}: {local(said)}", style="bold")
        for note in self.notes:
            yield Text(plain(local(note)), style="dim")
        kinds = Counter(tensor.dtype for tensor in self.tensors if tensor.dtype)
        yield Text(", ".join(f"{n} {plain(dtype)}" for dtype, n in kinds.most_common()), style="dim")
        yield Text("")
        table = bare_table("tensor", ("shape", "dtype", "numbers", "size"))
        for t in self.tensors:
            cells = ["–"] * 4
            if t.shape is not None:
                size = "–" if t.bytes is None else file_size(t.bytes)
                cells = ["×".join(map(str, t.shape)) or local("one number"), plain(t.dtype), f"{t.entries:,}", size]
            table.add_row(Text(shorten(t.name, longest=max(12, options.max_width // 2))), *cells)
        yield table
        for t in self.tensors:
            if t.shape is None:
                yield Text(f"{plain(t.name)}: {plain(local(t.reason)) or local('computed')}", style="dim")


def outline(source: Source) -> Outline:
    """Names, shapes, dtypes and sizes of all tensors, without reading values.

    Args:
        source: as for :func:`gonio.measure`. Only the header of a safetensors file is read, and the directory of a
            torch archive.

    Returns:
        :class:`Outline`: printable, a mapping from paths, exportable.

    Raises:
        InvalidArgumentError, UnreadableFileError: as :func:`gonio.measure`.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(50_000, 50_000), nn.ReLU())
        >>> found = gonio.measuring.outline(model)
        >>> found["0"].shape, found["0"].bytes, found.entries
        ((50000, 50000), 10000000000, 2500050000)
    """
    contents = contents_of(source)
    return Outline(name_of(source), tuple(_header(entry) for entry in contents.entries), contents.notes)


def _header(entry: TensorEntry) -> TensorHeader:
    known = {name: getattr(entry, name) for name in ("name", "path", "kind", "shape", "dtype", "reason")}
    if entry.shape is None:
        return TensorHeader(**known, entries=None, bytes=None)
    dtype, entries = dtype_named(entry.dtype), prod(entry.shape)
    if entry.layout is not None and len(entry.shape) > 1:
        with suppress(GonioError, RuntimeError):  # a shape that does not fit its layer, or one beyond all memory
            view = view_shape(entry.shape, entry.layout)
            known |= zip(("groups", "filters", "dim"), view, strict=True)
    return TensorHeader(**known, entries=entries, bytes=None if dtype is None else entries * dtype.itemsize)
