"""The tables for a paper."""

from __future__ import annotations

from collections.abc import Sequence

from gonio.compare.results import Results
from gonio.escaping import tex_cell
from gonio.report.shown import Shown, tables
from gonio.report.words import headline

__all__ = ["tabular", "to_latex"]


def to_latex(results: Results) -> str:
    r"""The tables as LaTeX with booktabs; names are escaped, so that none is a command.

    Example:
        >>> print(gonio.report.to_latex(gonio.report.example()).splitlines()[6])
        orthogonal-init & $+$0.10 & $+$0.00 to $+$0.20 & 0.50 & no useful effect & $\times$1.03 & $\times$1.00 \\
    """
    made = [_lines(table) for table in tables(results)]
    notes = [f"% {tex_cell(note)}" for note in (headline(results), *results.notes)]
    return "\n".join([*(line for lines in made for line in lines), *notes]) + "\n"


def _lines(table: Shown) -> list[str]:
    title, *notes = [f"% {tex_cell(text)}" for text in (table.title, *table.notes)]
    return [title, *tabular(table.head, table.rows, numbers=table.numbers), *notes]


def tabular(head: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int]) -> list[str]:
    """The lines of a table; columns in `numbers` are right-aligned."""
    columns = "".join("r" if i in numbers else "l" for i in range(len(head)))
    first, *rest = [" & ".join(map(tex_cell, row)) + r" \\" for row in (head, *rows)]
    begin = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return [*begin, first, r"\midrule", *rest, r"\bottomrule", r"\end{tabular}"]
