"""What recipes do over several tasks, as a table in any format."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gonio.compare.results import Results
from gonio.compare.several import Across, across
from gonio.foreign_text import csv_cell, markdown_cell, plain
from gonio.report.latex import tabular

__all__ = ["SEVERAL_FORMATS", "several_text"]

_HEAD = ("recipe", "tasks", "pairs", "IQM", "95 % interval", "P(better)", "95 % interval")
_NOTE = (
    "IQM: interquartile mean of the paired differences of all tasks, each in its task's smallest effect of interest; "
    "more is better. Intervals: stratified bootstrap; with fewer than 10 pairs per task they are too narrow."
)


def _rows(found: Sequence[Across]) -> list[tuple[str, ...]]:
    return [
        (
            a.recipe,
            str(len(a.tasks)),
            str(sum(a.pairs)),
            f"{a.iqm:+.2f}",
            f"{a.iqm_low:+.2f} to {a.iqm_high:+.2f}",
            f"{a.improvement:.2f}",
            f"{a.improvement_low:.2f} to {a.improvement_high:.2f}",
        )
        for a in found
    ]


def several_text(studies: Sequence[Results]) -> RenderableType:
    """The table over several tasks for a terminal.

    Raises:
        InvalidArgumentError: see :func:`gonio.compare.across`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(_HEAD):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in _rows(across(studies)):
        table.add_row(*(Text(plain(cell)) for cell in row))
    return Group(table, Text(""), Text(_NOTE, style="dim"))


def _json(found: Sequence[Across]) -> str:
    content = {"schema": "gonio.across/1", "note": _NOTE, "recipes": [asdict(one) for one in found]}
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _csv(found: Sequence[Across]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(Across.__dataclass_fields__)
    for one in found:
        row = {**asdict(one), "tasks": "; ".join(one.tasks), "pairs": "; ".join(map(str, one.pairs))}
        writer.writerow([csv_cell(cell) for cell in row.values()])
    return buffer.getvalue()


def _markdown(found: Sequence[Across]) -> str:
    rows = [_HEAD, ("---",) * len(_HEAD), *(tuple(map(markdown_cell, row)) for row in _rows(found))]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", f"- {_NOTE}"]) + "\n"


def _latex(found: Sequence[Across]) -> str:
    return "\n".join(tabular(_HEAD, _rows(found), numbers=range(1, len(_HEAD)))) + "\n"


SEVERAL_FORMATS: Mapping[str, Callable[[Sequence[Across]], str]] = {
    "json": _json,
    "csv": _csv,
    "md": _markdown,
    "tex": _latex,
}
