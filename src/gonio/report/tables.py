"""The results as JSON, CSV and markdown."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

from gonio.compare.results import Effect, Ratio, Results
from gonio.foreign_text import csv_cell, markdown_cell, redact
from gonio.report.words import Scale, headline, p_value, partial, ratio

__all__ = ["to_csv", "to_json", "to_markdown"]

SCHEMA = "gonio.results/1"


def to_json(results: Results) -> str:
    """Everything in the results as strict JSON: `schema` names the version, a non-finite number is null.

    Home directories and credentials in URLs are left out of every text, as on the page.

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
    "memory", "memory_low", "memory_high", "reason",
)  # fmt: skip


def to_csv(results: Results) -> str:
    """One line per recipe; no cell runs as a formula in a spreadsheet.

    Example:
        >>> lines = gonio.report.to_csv(gonio.report.example()).splitlines()
        >>> lines[2].split(",")[:2]
        ['decoupled-tanh', 'helps']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    unit = Scale.of(results).unit
    for effect in results.effects:
        writer.writerow([csv_cell(cell) for cell in _cells(effect, unit)])
    return buffer.getvalue()


def _cells(e: Effect, unit: str) -> list[object]:
    return [
        e.recipe, e.verdict, e.mean, e.low, e.high, unit, e.p, e.p_holm, e.n, e.failed, e.diverged,
        e.mde, e.rho, e.improvement, *_three(e.step_time), *_three(e.memory), e.reason,
    ]  # fmt: skip


def _three(cost: Ratio | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if cost is None else (cost.median, cost.low, cost.high)


def to_markdown(results: Results) -> str:
    """The verdict table for an issue or a README; names are escaped, so that none is markup.

    Example:
        >>> print(gonio.report.to_markdown(gonio.report.example()).splitlines()[0])
        **decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).**
    """
    scale = Scale.of(results)
    head = ("recipe", f"effect in {scale.unit}", "95 % interval", "Holm p", "verdict", "step time", "memory")
    lines = [f"**{markdown_cell(headline(results))}**", ""]
    if partial(results):
        lines += [markdown_cell(partial(results)), ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for e in results.effects:
        cells = (e.recipe, scale.signed(e.mean), scale.interval(e.low, e.high), p_value(e.p_holm), e.verdict)
        lines.append(_line([markdown_cell(cell) for cell in (*cells, ratio(e.step_time), ratio(e.memory))]))
    lines += ["", *(f"- {markdown_cell(note)}" for note in results.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
