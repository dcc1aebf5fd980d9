"""The results as JSON, CSV and markdown."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gonio.compare.results import BASELINE, Effect, Ratio, Results, Robust
from gonio.escaping import csv_cell, markdown_cell, redact
from gonio.report.sections import ATTACK_NAMES
from gonio.report.shown import tables
from gonio.report.words import Scale, headline, partial

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
    "memory", "memory_low", "memory_high", "reason", "changes",
    *(f"right_{name}{of}" for name in ATTACK_NAMES for of in ("", "_baseline")), "worst", "worst_low", "worst_high",
    "hidden_gradients",
)  # fmt: skip


def to_csv(results: Results) -> str:
    """One line per recipe; no cell runs as a formula in a spreadsheet.

    `right_pgd` is the recipe's accuracy under that attack and `right_pgd_baseline` the baseline's; `worst` is the
    paired difference in the worst case. All of these are empty where no model was attacked. More than one entry in
    `changes`: the effect is confounded.

    Example:
        >>> lines = gonio.report.to_csv(gonio.report.example()).splitlines()
        >>> lines[2].split(",")[:2]
        ['decoupled-tanh', 'helps']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    unit = Scale.of(results).unit
    attacked = {robust.recipe: robust for robust in results.robustness}
    for effect in results.effects:
        cells = [*_cells(effect, unit), *_attacked(attacked, effect.recipe)]
        writer.writerow([csv_cell(cell) for cell in cells])
    return buffer.getvalue()


def _cells(e: Effect, unit: str) -> list[object]:
    return [
        e.recipe, e.verdict, e.mean, e.low, e.high, unit, e.p, e.p_holm, e.n, e.failed, e.diverged,
        e.mde, e.rho, e.improvement, *_three(e.step_time), *_three(e.memory), e.reason,
        "; ".join(e.changes),
    ]  # fmt: skip


def _attacked(found: Mapping[str, Robust], recipe: str) -> list[object]:
    """What the recipe and the baseline get right under each attack, and their difference in the worst."""
    ours, base = found.get(recipe, Robust(recipe, {}, 0)), found.get(BASELINE, Robust(BASELINE, {}, 0))
    rights = [robust.means.get(name) for name in ATTACK_NAMES for robust in (ours, base)]
    signs = "; ".join(f"{sign} ({n})" for sign, n in ours.signs.items())
    return [*rights, ours.mean, ours.low, ours.high, signs]


def _three(cost: Ratio | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if cost is None else (cost.median, cost.low, cost.high)


def to_markdown(results: Results) -> str:
    """The tables for an issue or a README; names are escaped, so that none is markup.

    Example:
        >>> print(gonio.report.to_markdown(gonio.report.example()).splitlines()[0])
        **decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).**
    """
    lines = [f"**{markdown_cell(headline(results))}**", ""]
    if partial(results):
        lines += [markdown_cell(partial(results)), ""]
    for i, table in enumerate(tables(results)):
        lines += [] if i == 0 else ["", f"{markdown_cell(table.title)}:", ""]
        lines += [_line(map(markdown_cell, table.head)), _line(["---"] * len(table.head))]
        lines += [_line(map(markdown_cell, row)) for row in table.rows]
        lines += ["", *(f"- {markdown_cell(note)}" for note in table.notes)] if table.notes else []
    lines += ["", *(f"- {markdown_cell(note)}" for note in results.notes)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
