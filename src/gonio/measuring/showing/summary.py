"""What is shown of a long table: a row for each group of layers whose names differ in numbers alone, and the layers
that stand out. Exports have every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from rich.table import Table as RichTable
from rich.text import Text

from gonio.escaping import plain
from gonio.measuring.reading.order import pattern_of
from gonio.measuring.showing.table import NamedRow
from gonio.messages import fixed, say
from gonio.pages.tables import bare_table, number


@dataclass(frozen=True)
class Medium:
    """Up to `longest` layers every layer has a row; of more layers the `most` that stand out have one."""

    longest: int
    most: int


TERMINAL, PAGE = Medium(250, 40), Medium(800, 200)  # so that no page is larger than 2 MB
GROUPS = 60  # that are shown, at most

Row = TypeVar("Row", bound=NamedRow)
Figure = Callable[[Any], float | None]


@dataclass(frozen=True)
class Grouped:
    """Figures of groups of layers: the titles with explanations, and for each group its pattern and its cells."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    omitted: int = 0

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(title for title, _ in self.columns)

    @property
    def explained(self) -> dict[str, str]:
        return dict(self.columns)

    def rich(self) -> RichTable:
        """The groups for a terminal."""
        table = bare_table("layers", self.titles, min_width=12)
        for path, cells in self.rows:
            table.add_row(Text(plain(path)), *map(Text, cells))
        return table


def grouped(tensors: Sequence[Any], figures: Sequence[tuple[str, str, Figure]]) -> Grouped:
    """The groups in the order of their first layers; of each figure the median over layers, and the range.

    Args:
        tensors: rows with a `path`. `figures`: title, explanation and value of each.
    """
    groups: dict[str, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(pattern_of(tensor.path), []).append(tensor)
    columns = (
        (say("number"), say("of layers")),
        *((fixed(title), say("{said}: median (smallest to largest)", said=fixed(said))) for title, said, _ in figures),
    )
    rows = [
        (path, (str(len(members)), *(_spread([value(t) for t in members]) for _, _, value in figures)))
        for path, members in groups.items()
    ]
    return Grouped(columns, tuple(rows[:GROUPS]), len(rows[GROUPS:]))


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    low, middle, high = (number(value, 2) for value in (min(known), median(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"


def rows_shown(
    ordered: Sequence[Row],
    on: Medium,
    *,
    first: Collection[str],
    score: Callable[[Row], float],
    figures: Sequence[tuple[str, str, Figure]],
    tensors: Sequence[Row] | None = None,
    noun: str,
    by: str,
) -> tuple[Grouped | None, Sequence[Row], str]:
    """The rows of a long table that are shown; where these are not all, groups of all, and a sentence.

    Args:
        ordered: all rows in the order in which they are shown. `tensors`: in that of the model, where it is another.
        first: paths of rows that are shown before others, then those with the largest `score`.
        figures: as :func:`grouped` takes them. `noun`, `by`: what the rows are, and what stands out in them.
    """
    if len(ordered) <= on.longest:
        return None, ordered, ""
    ranked = sorted(range(len(ordered)), key=lambda i: (ordered[i].path not in first, -score(ordered[i])))
    shown = [ordered[i] for i in sorted(ranked[: on.most])]
    said = say(
        "Of {count:,} {noun}, the {shown} that stand out: those with findings, then {by}. The CSV and JSON have all.",
        count=len(ordered),
        noun=fixed(noun),
        shown=len(shown),
        by=fixed(by),
    )
    return grouped(ordered if tensors is None else tensors, figures), shown, said
