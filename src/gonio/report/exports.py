"""The results as JSON, CSV, markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from gonio.compare.judging.results import Ratio, Results, Robust
from gonio.compare.planning.plan import BASELINE
from gonio.escaping import csv_cell, markdown_cell, redact, tex_cell
from gonio.report.tables import ATTACKS, Table, tables
from gonio.report.wording import Scale, headline, partial

__all__ = ["csv_text", "latex_table", "markdown_table", "to_csv", "to_json", "to_latex", "to_markdown"]

SCHEMA = "gonio.results/1"


def to_json(results: Results) -> str:
    """The whole results as strict JSON: `schema` names the version, a non-finite number is null.

    Home directories and credentials in URLs are removed from every text, as on the page.

    Example:
        >>> import json
        >>> read = json.loads(gonio.report.to_json(gonio.report.example()))
        >>> read["schema"], read["effects"][1]["verdict"]
        ('gonio.results/1', 'helps')
    """
    content = {"schema": SCHEMA, "headline": headline(results), **results.to_dict()}
    return json.dumps(_safe(content), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _safe(item) for key, item in value.items()}
    return [_safe(item) for item in value] if isinstance(value, (list, tuple)) else value


COLUMNS = (
    "recipe", "verdict", "effect", "low", "high", "unit", "p", "p_holm", "pairs", "failed", "diverged",
    "mde", "rho", "improvement", "step_time", "step_time_low", "step_time_high",
    "memory", "memory_low", "memory_high", "reason", "changes",
    *(f"right_{name}{of}" for name in ATTACKS for of in ("", "_baseline")), "worst", "worst_low", "worst_high",
    "hidden_gradients",
)  # fmt: skip


def to_csv(results: Results) -> str:
    """One line per recipe; no cell runs as a formula in a spreadsheet.

    `right_pgd` is the recipe's accuracy under that attack and `right_pgd_baseline` the baseline's; `worst` is the
    paired difference in the worst case. All of these are empty if no model was attacked. If `changes` has more than
    one entry, the effect is confounded.

    Example:
        >>> lines = gonio.report.to_csv(gonio.report.example()).splitlines()
        >>> lines[2].split(",")[:2]
        ['decoupled-tanh', 'helps']
    """
    unit, attacked = Scale.of(results).unit, {robust.recipe: robust for robust in results.robustness}
    base, rows = attacked.get(BASELINE, Robust(BASELINE, {}, 0)), []
    for e in results.effects:
        ours = attacked.get(e.recipe, Robust(e.recipe, {}, 0))
        rights = [robust.means.get(name) for name in ATTACKS for robust in (ours, base)]
        signs = "; ".join(f"{sign} ({n})" for sign, n in ours.signs.items())
        rows.append([
            e.recipe, e.verdict, e.mean, e.low, e.high, unit, e.p, e.p_holm, e.n, e.failed, e.diverged,
            e.mde, e.rho, e.improvement, *_quartiles(e.step_time), *_quartiles(e.memory), e.reason,
            "; ".join(e.changes), *rights, ours.mean, ours.low, ours.high, signs,
        ])  # fmt: skip
    return csv_text(COLUMNS, rows)


def _quartiles(cost: Ratio | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if cost is None else (cost.median, cost.low, cost.high)


def csv_text(head: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    """Lines of CSV in which no cell is a formula."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([csv_cell(cell) for cell in row] for row in rows)
    return buffer.getvalue()


def to_markdown(results: Results) -> str:
    """The tables for an issue or a README; names are escaped and cannot act as markup.

    Example:
        >>> print(gonio.report.to_markdown(gonio.report.example()).splitlines()[0])
        **decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).**
    """
    lines = [f"**{markdown_cell(headline(results))}**", ""]
    if partial(results):
        lines += [markdown_cell(partial(results)), ""]
    for i, table in enumerate(tables(results)):
        lines += markdown_table(table)[0 if i else 2 :]
    lines += [f"- {markdown_cell(note)}" for note in results.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_table(table: Table) -> list[str]:
    """Title, table and notes."""
    rows = [map(markdown_cell, table.head), ["---"] * len(table.head), *(map(markdown_cell, row) for row in table.rows)]
    lines = [f"{markdown_cell(table.title)}:", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return [*lines, *(f"- {markdown_cell(note)}" for note in table.notes), ""] if table.notes else lines


def to_latex(results: Results) -> str:
    r"""The tables as LaTeX with booktabs; names are escaped and cannot act as commands.

    Example:
        >>> print(gonio.report.to_latex(gonio.report.example()).splitlines()[6])
        orthogonal-init & $+$0.10 & $+$0.00 to $+$0.20 & 0.50 & no useful effect & $\times$1.03 & $\times$1.00 \\
    """
    lines = [line for table in tables(results) for line in latex_table(table)]
    notes = [f"% {tex_cell(note)}" for note in (headline(results), *results.notes)]
    return "\n".join([*lines, *notes]) + "\n"


def latex_table(table: Table) -> list[str]:
    """Title, table and notes; columns of numbers are right-aligned."""
    columns = "".join("r" if i in table.numbers else "l" for i in range(len(table.head)))
    first, *rest = [" & ".join(map(tex_cell, row)) + r" \\" for row in (table.head, *table.rows)]
    begin = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
    title, *notes = [f"% {tex_cell(text)}" for text in (table.title, *table.notes)]
    return [title, *begin, *rest, r"\bottomrule", r"\end{tabular}", *notes]
