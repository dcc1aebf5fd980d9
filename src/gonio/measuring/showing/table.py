"""Tables of one row per tensor: found by path, printed, and exported as JSON, CSV, markdown and data frames."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gonio import escaping
from gonio.errors import UnknownNameError, import_extra, listing
from gonio.escaping import csv_table, display_width, plain, printed, shorten
from gonio.measuring.reading.order import pattern_of
from gonio.messages import LANGUAGES, Message, fixed, joined, local, say, tag
from gonio.pages import made_by
from gonio.pages.tables import bare_table, number

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Column(Generic[Subject]):
    """One column.

    Attributes:
        name: unique among the columns of a table; without `text`, the attribute of the subject that is shown.
        title: its heading; `explanation`: its meaning, and the value for random weights.
        width: in characters.
        text: the figure of a subject as text.
        spectral: whether a page shows it in the table of spectra.
        requested: whether it is left out of tables in which no subject has it.
    """

    name: str
    title: str
    explanation: str
    width: int
    text: Callable[[Subject], str] | None = None
    spectral: bool = False
    requested: bool = False

    def __post_init__(self) -> None:
        for name in ("title", "explanation"):
            object.__setattr__(self, name, fixed(getattr(self, name)))

    def cell(self, subject: Subject) -> str:
        """The figure of this subject as text."""
        return number(getattr(subject, self.name)) if self.text is None else self.text(subject)


def figures(form: str, *names: str) -> Callable[[Any], str]:
    """The text of a column: these attributes of the subject in this form; a dash if one is missing."""

    def text(subject: Any) -> str:
        values = [getattr(subject, name) for name in names]
        return "–" if None in values else form.format(*values)

    return text


class NamedRow(Protocol):
    """A row: a frozen dataclass with the tensor's name, and its path."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


Row = TypeVar("Row", bound=NamedRow)


class Table(Mapping[str, Row], ABC):
    """A mapping from paths to rows, one per tensor; printing it gives a table as wide as the terminal."""

    tensors: tuple[Row, ...]

    def __getitem__(self, path: str) -> Row:
        """The row of this path; `conv1` and `conv1.weight` are the same.

        Raises:
            UnknownNameError: with the nearest paths.
        """
        if path in self:
            return self._by_name[path]
        raise UnknownNameError("tensor", str(path)[:80], [tensor.path[:80] for tensor in self.tensors])

    def __iter__(self) -> Iterator[str]:
        return (tensor.path for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and path in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        """The rows by path and by name; of two with the same one the first."""
        return {key: tensor for tensor in reversed(self.tensors) for key in (tensor.name, tensor.path)}

    def __str__(self) -> str:
        return printed(self)

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
        return csv_table(*self._exported())

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


class PagedTable(Table[Row]):
    """A table that is a page as well."""

    def to_html(self, *, command: str = "", date: str = "") -> str:
        """One self-contained page that loads nothing; its script sorts, filters and opens rows.

        Args:
            command, date: shown on the page, so that the same can be measured again.
        """
        return self._page(whole=True, made=made_by({}, command=command, date=date))

    def _repr_html_(self) -> str:
        return self._page(whole=False, made=())

    @abstractmethod
    def _page(self, *, whole: bool, made: tuple[tuple[str, str], ...]) -> str:
        """The page, or the part of it that a notebook shows."""


def reasons(tensors: Sequence[Any]) -> Message:
    """The number of these tensors, and the first five reasons, each with the first of its tensors."""
    if not tensors:
        return say("none")
    groups: dict[str, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.reason, []).append(tensor)
    named = [
        say(
            "{path}: {reason}",
            path=listing([plain(t.path, longest=200) for t in members], limit=3),
            reason=_cut(members[0].reason, longest=300),
        )
        for members in list(groups.values())[:5]
    ]
    shown, more = joined(named, "; "), sum(len(members) for members in list(groups.values())[5:])
    shown = say("{shown} and {more} more", shown=shown, more=more) if more else shown
    return say("{n} ({shown})", n=len(tensors), shown=shown)


def _cut(reason: str, *, longest: int) -> Message:
    """A reason from outside as plain text; one of ours can be translated."""
    said = plain(reason, longest=longest)
    if isinstance(reason, Message):
        return Message(said, reason.template, reason.values)
    said = said.removesuffix(".")
    return Message(said, said)


def frame_from(rows: Sequence[Any], columns: Sequence[str]) -> Any:
    """A data frame of these rows.

    Raises:
        MissingExtraError: without pandas.
    """
    pandas = import_extra("pandas", "to_frame()", package="pandas", extra=None)
    return pandas.DataFrame(rows, columns=list(columns))


def markdown_table(name: str, tensors: Sequence[Any], columns: Sequence[Column[Any]]) -> list[str]:
    """The lines of a markdown table: one per tensor."""
    rows = ((tensor.path, *(column.cell(tensor) for column in columns)) for tensor in tensors)
    return escaping.markdown_table([name, *(column.title for column in columns)], rows)


def _longest(tensors: Sequence[Any], width: int) -> int:
    """Characters that a table of this width has for a path."""
    return max(12, min(max(len(plain(t.path)) for t in tensors), max(16, width // 3)))


def fitting(
    tensors: Sequence[Any], columns: Sequence[Column[Any]], kept: Sequence[str], width: int
) -> list[Column[Any]]:
    """The columns that fit beside the paths: those that do in English, as far as titles in another language fit too.

    Args:
        kept: names of columns, most important first; all others follow in the order of `columns`.
    """
    room = width - _longest(tensors, width) - 2
    left, taken, names = room, 0, set()
    for column in sorted(columns, key=lambda c: kept.index(c.name) if c.name in kept else len(kept)):
        left -= max(column.width, display_width(column.title)) + 2
        taken += max(map(display_width, (local(column.title), *map(column.cell, tensors)))) + 2
        if left < 0 or (taken > room and tag() != LANGUAGES["en"]):
            break
        names.add(column.name)
    return [column for column in columns if column.name in names]


def tensor_table(
    first: str,
    tensors: Sequence[Any],
    columns: Sequence[Column[Any]],
    kept: Sequence[str],
    width: int,
    *,
    flagged: Collection[str] = (),
) -> RichTable:
    """One row per tensor in as many columns as fit, see :func:`fitting`.

    Args:
        first: the heading of the paths.
        flagged: paths to show in colour.
    """
    longest, shown = _longest(tensors, width), fitting(tensors, columns, kept, width)
    table = bare_table(first, [column.title for column in shown], min_width=min(longest, 12))
    names = [shorten(tensor.path, longest=longest) for tensor in tensors]
    if len(set(names)) < len({tensor.path for tensor in tensors}):  # what differs is in the middle: show the end
        names = [_ending(tensor.path, longest) for tensor in tensors]
    for tensor, short in zip(tensors, names, strict=True):
        name = Text(short, style="dark_orange3" if tensor.path in flagged else "")
        table.add_row(name, *(Text(column.cell(tensor)) for column in shown))
    return table


def _ending(path: str, longest: int) -> str:
    """The end of a path of more than `longest` characters, after …."""
    line = " ".join(plain(path).split())
    return line if len(line) <= longest else f"…{line[len(line) - longest + 1 :]}"


# --- long tables ------------------------------------------------------------------------------------------------------
#
# A row for each group of layers whose names differ in numbers alone, and the layers that stand out. Exports have all.


@dataclass(frozen=True)
class Medium:
    """Up to `longest` layers every layer has a row; of more layers the `most` that stand out have one."""

    longest: int
    most: int


TERMINAL, PAGE = Medium(250, 40), Medium(800, 200)  # so that no page is larger than 2 MB
GROUPS = 60  # that are shown, at most

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

    def rich(self, said: str) -> tuple[RichTable, Text, Text]:
        """The groups for a terminal, and below them a sentence on the rows that follow."""
        table = bare_table("layers", self.titles, min_width=12)
        for path, cells in self.rows:
            table.add_row(Text(plain(path)), *map(Text, cells))
        return table, Text(""), Text(local(said), style="dim")


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
