"""Tables of one row per tensor: found by path, printed, and exported as JSON, CSV, markdown and data frames."""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType

from gonio.errors import MissingExtraError, UnknownNameError
from gonio.escaping import csv_cell, markdown_cell, plain
from gonio.measuring.showing.columns import Column
from gonio.measuring.showing.terminal import as_text


class Named(Protocol):
    """A row: a frozen dataclass with the tensor's name, and its path."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


Row = TypeVar("Row", bound=Named)


class Table(Mapping[str, Row], ABC):
    """A mapping from paths to rows, one per tensor; printing it gives a table as wide as the terminal."""

    tensors: tuple[Row, ...]

    def __getitem__(self, path: str) -> Row:
        """The row of this path; `conv1` and `conv1.weight` are the same.

        Raises:
            UnknownNameError: with the nearest paths.
        """
        for tensor in self.tensors:
            if path in (tensor.path, tensor.name):
                return tensor
        raise UnknownNameError("tensor", str(path)[:80], [tensor.path[:80] for tensor in self.tensors])

    def __iter__(self) -> Iterator[str]:
        return (tensor.path for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, path: object) -> bool:
        return any(path in (tensor.path, tensor.name) for tensor in self.tensors)

    def __str__(self) -> str:
        return as_text(self)

    @abstractmethod
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]: ...

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""

    def to_json(self) -> str:
        """:meth:`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    def to_csv(self) -> str:
        """One line per tensor; no cell can run as a formula in a spreadsheet."""
        names, rows = self._exported()
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([csv_cell(_flat(value)) for value in row] for row in rows)
        return buffer.getvalue()

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` with one row per tensor and the columns of :meth:`to_csv`.

        Raises:
            MissingExtraError: without pandas.
        """
        names, rows = self._exported()
        return frame_from(rows, names)

    def _exported(self) -> tuple[list[str], list[list[Any]]]:
        """The columns of exports, and the values of each row: all fields but histograms."""
        kind: Any = type(self)
        names = [field.name for field in fields(kind.ROW) if not field.name.endswith("_histogram")]
        return names, [[getattr(tensor, name) for name in names] for tensor in self.tensors]


def reasons(tensors: Sequence[Any]) -> str:
    """The number of these tensors, and the reasons of the first five; empty if there is none."""
    said = [f"{plain(t.path, longest=200)}: {plain(t.reason, longest=300)}" for t in tensors[:5]]
    more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    return f"{len(tensors)} ({', '.join(said)}{more})" if tensors else ""


def _flat(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, tuple) else value


def frame_from(rows: Sequence[Any], columns: Sequence[str]) -> Any:
    """A data frame of these rows.

    Raises:
        MissingExtraError: without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("to_frame()", "pandas", None) from error
    return pandas.DataFrame(rows, columns=list(columns))


def markdown_table(name: str, tensors: Sequence[Any], columns: Sequence[Column[Any]]) -> Iterator[str]:
    """The lines of a markdown table: one per tensor."""
    yield _line([name, *(column.title for column in columns)])
    yield _line(["---"] * (len(columns) + 1))
    for tensor in tensors:
        yield _line([markdown_cell(cell) for cell in (tensor.path, *(column.cell(tensor) for column in columns))])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
