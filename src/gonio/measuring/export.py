"""Measurements as CSV, as markdown and as a data frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gonio.errors import MissingExtraError
from gonio.escaping import csv_cell, markdown_cell
from gonio.measuring.columns import COLUMNS, Column
from gonio.measuring.tensor import TensorMeasurement

if TYPE_CHECKING:
    from gonio.measuring.measurements import Measurements

__all__ = ["csv_of", "frame_from", "frame_of", "markdown_of", "table_of"]

FIELDS = tuple(f.name for f in fields(TensorMeasurement) if f.name != "angle_histogram")


def csv_of(tensors: Sequence[Any], names: Sequence[str] = FIELDS) -> str:
    """One line per tensor with these attributes of it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([csv_cell(_flat(getattr(tensor, name))) for name in names] for tensor in tensors)
    return buffer.getvalue()


def frame_of(tensors: Sequence[Any], names: Sequence[str] = FIELDS) -> Any:
    """One row per tensor with these attributes of it.

    Raises:
        MissingExtraError: without pandas.
    """
    return frame_from([[getattr(tensor, name) for name in names] for tensor in tensors], list(names))


def frame_from(rows: Sequence[Any], columns: list[str]) -> Any:
    """A data frame of these rows.

    Raises:
        MissingExtraError: without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("to_frame()", "pandas", None) from error
    return pandas.DataFrame(rows, columns=columns)


def _flat(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, tuple) else value


def markdown_of(measured: Measurements) -> str:
    """Findings, the table of the layers, and the coverage."""
    lines = [f"**{markdown_cell(measured.source)}**", ""]
    lines += [
        f"- **{f.level} {f.code}** {markdown_cell(f.path) or 'the model'}: {markdown_cell(f.found)}"
        for f in measured.findings
    ]
    lines += [""] if measured.findings else []
    for sentence in measured.suppressed.sentences if measured.suppressed is not None else ():
        lines += [markdown_cell(sentence), ""]
    return (
        "\n".join([*lines, *table_of("layer", measured.layers, COLUMNS), "", markdown_cell(measured.coverage)]) + "\n"
    )


def table_of(name: str, tensors: Sequence[Any], columns: Sequence[Column[Any]]) -> Iterator[str]:
    """The lines of a markdown table: one per tensor."""
    yield _line([name, *(column.title for column in columns)])
    yield _line(["---"] * (len(columns) + 1))
    for tensor in tensors:
        yield _line([markdown_cell(cell) for cell in (tensor.path, *(column.cell(tensor) for column in columns))])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
