"""Measurements as CSV and markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gonio.foreign_text import csv_cell, markdown_cell
from gonio.measuring.columns import COLUMNS
from gonio.measuring.tensor import TensorMeasurement

if TYPE_CHECKING:
    from gonio.measuring.measurements import Measurements

__all__ = ["csv_of", "markdown_of"]

_FIELDS = tuple(f.name for f in fields(TensorMeasurement) if f.name != "angle_histogram")


def csv_of(tensors: Sequence[TensorMeasurement]) -> str:
    """One line per tensor with every figure but the histogram."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_FIELDS)
    writer.writerows([csv_cell(_flat(getattr(tensor, name))) for name in _FIELDS] for tensor in tensors)
    return buffer.getvalue()


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
    lines += [_line(["layer", *(column.title for column in COLUMNS)]), _line(["---"] * (len(COLUMNS) + 1))]
    for tensor in measured.layers:
        cells = [tensor.path, *(column.cell(tensor) for column in COLUMNS)]
        lines.append(_line([markdown_cell(cell) for cell in cells]))
    return "\n".join([*lines, "", markdown_cell(measured.coverage)]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
