"""Tables of texts: one set of rows for the terminal, the page, markdown and LaTeX; how a number is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gonio.escaping import markdown_cell, markdown_table, plain, tex_cell
from gonio.messages import Message, local

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text


def number(value: float | None, digits: int = 3) -> str:
    """A figure with `digits` significant digits, two below 1; a dash for None."""
    if value is None:
        return "–"
    size = abs(value)
    if value == 0:
        text = "0"
    elif not 1e-3 <= size < 1e5:
        text = f"{value:.1e}"
    elif size < 1:
        text = f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"
    else:
        text = f"{value:.{max(0, digits - len(str(int(size))))}f}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    """A figure with its sign, and with one decimal below 100."""
    return f"{value:+.{1 if abs(value) < 100 else 0}f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds, or minutes from two on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def file_size(count: int) -> str:
    """Bytes in the largest unit that gives at least 1."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def unit_of_difference(unit: str) -> str:
    """The unit of a difference: of percentages, points."""
    return "points" if unit in ("percent", "%", "points", "% of runs") else unit


@dataclass(frozen=True)
class TextTable:
    """A table of texts.

    Attributes:
        texts: columns of words; the others are numbers.
        notes: remarks that a reader needs.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Columns of numbers."""
        return tuple(i for i in range(len(self.head)) if i not in self.texts)

    def markdown(self) -> list[str]:
        """Title, table and notes as lines of markdown."""
        lines = [f"{markdown_cell(self.title)}:", "", *markdown_table(self.head, self.rows), ""]
        return [*lines, *(f"- {markdown_cell(note)}" for note in self.notes), ""] if self.notes else lines

    def latex(self) -> list[str]:
        """Title, table and notes as lines of LaTeX with booktabs; columns of numbers are right-aligned."""
        columns = "".join("r" if i in self.numbers else "l" for i in range(len(self.head)))
        first, *rest = [" & ".join(map(tex_cell, row)) + r" \\" for row in (self.head, *self.rows)]
        begin = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
        title, *notes = [f"% {tex_cell(text)}" for text in (self.title, *self.notes)]
        return [title, *begin, *rest, r"\bottomrule", r"\end{tabular}", *notes]

    def rich(self, *, head: Sequence[str] = (), verdicts: Sequence[Text] = ()) -> RichTable:
        """The table for a rich Console.

        Args:
            head: other titles of the columns.
            verdicts: coloured cells of the column `verdict`, by row.
        """
        from rich.text import Text

        made = bare_table()
        for i, title in enumerate(head or self.head):
            number_ = i in self.numbers
            made.add_column(
                local(title), justify="right" if number_ else "left", overflow="fold", no_wrap=number_ and bool(head)
            )
        for at, row in enumerate(self.rows):
            cells = [Text(plain(local(cell) if isinstance(cell, Message) else cell)) for cell in row]
            if verdicts:
                cells[self.head.index("verdict")] = verdicts[at]
            made.add_row(*cells)
        return made


def bare_table(first: str = "", titles: Sequence[str] = (), **options: Any) -> RichTable:
    """An empty table without borders: names on the left, figures on the right; titles in the reader's language."""
    from rich.table import Table as RichTable

    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    if first:
        table.add_column(local(first), no_wrap=True, **options)
    for title in titles:
        table.add_column(local(title), justify="right", no_wrap=True)
    return table
