"""Tables as CSV, markdown and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gonio.errors import MissingExtraError
from gonio.escaping import csv_cell, markdown_cell
from gonio.measuring.showing.columns import Column

__all__ = ["csv_of", "frame_from", "frame_of", "markdown_table"]


def csv_of(tensors: Sequence[Any], names: Sequence[str]) -> str:
    """One line per tensor with these attributes of it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([csv_cell(_flat(getattr(tensor, name))) for name in names] for tensor in tensors)
    return buffer.getvalue()


def _flat(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, tuple) else value


def frame_of(tensors: Sequence[Any], names: Sequence[str]) -> Any:
    """One row per tensor with these attributes of it.

    Raises:
        MissingExtraError: without pandas.
    """
    return frame_from([[getattr(tensor, name) for name in names] for tensor in tensors], names)


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
