"""The results of one study as JSON, CSV, markdown and LaTeX; of several over their tasks also on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gonio.escaping import csv_table, json_data, markdown_cell, redact, tex_cell
from gonio.lab.judging.multi_task import PROFILE, Across, across
from gonio.lab.judging.results import Ratio, Results, Robust
from gonio.lab.showing.tables import ATTACKS, Scale, headline, partial, tables
from gonio.pages.tables import TextTable
from gonio.recipes import BASELINE

SCHEMA = "gonio.results/1"


def to_json(results: Results) -> str:
    """The whole results as strict JSON: `schema` names the version, a non-finite number is null.

    Home directories and credentials in URLs are removed from every text, as on the page.

    Example:
        >>> import json
        >>> read = json.loads(gonio.lab.showing.to_json(gonio.lab.showing.example()))
        >>> read["schema"], read["effects"][1]["verdict"]
        ('gonio.results/1', 'helps')
    """
    return _json_text({"schema": SCHEMA, "headline": headline(results), **results.to_dict()})


def _json_text(content: Any) -> str:
    return json.dumps(json_data(content, redact), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


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
        >>> lines = gonio.lab.showing.to_csv(gonio.lab.showing.example()).splitlines()
        >>> lines[2].split(",")[:2]
        ['decoupled-tanh', 'helps']
    """
    unit, attacked = Scale.of(results).unit, {robust.recipe: robust for robust in results.robustness}
    base, rows = attacked.get(BASELINE, Robust(BASELINE, {}, 0)), []
    for e in results.effects:
        ours = attacked.get(e.recipe, Robust(e.recipe, {}, 0))
        rights = [robust.means.get(name) for name in ATTACKS for robust in (ours, base)]
        signs = [f"{sign} ({n})" for sign, n in ours.signs.items()]
        rows.append([
            e.recipe, e.verdict, e.mean, e.low, e.high, unit, e.p, e.p_holm, e.n, e.failed, e.diverged,
            e.mde, e.rho, e.improvement, *_quartiles(e.step_time), *_quartiles(e.memory), e.reason,
            e.changes, *rights, ours.mean, ours.low, ours.high, signs,
        ])  # fmt: skip
    return csv_table(COLUMNS, rows)


def _quartiles(cost: Ratio | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if cost is None else (cost.median, cost.low, cost.high)


def to_markdown(results: Results) -> str:
    """The tables for an issue or a README; names are escaped and cannot act as markup.

    Example:
        >>> print(gonio.lab.showing.to_markdown(gonio.lab.showing.example()).splitlines()[0])
        **decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).**
    """
    lines = [f"**{markdown_cell(headline(results))}**", ""]
    if partial(results):
        lines += [markdown_cell(partial(results)), ""]
    for i, table in enumerate(tables(results)):
        lines += table.markdown()[0 if i else 2 :]
    lines += [f"- {markdown_cell(note)}" for note in results.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def to_latex(results: Results) -> str:
    r"""The tables as LaTeX with booktabs; names are escaped and cannot act as commands.

    Example:
        >>> print(gonio.lab.showing.to_latex(gonio.lab.showing.example()).splitlines()[6])
        orthogonal-init & $+$0.10 & $+$0.00 to $+$0.20 & 0.50 & no useful effect & $\times$1.03 & $\times$1.00 \\
    """
    lines = [line for table in tables(results) for line in table.latex()]
    notes = [f"% {tex_cell(note)}" for note in (headline(results), *results.notes)]
    return "\n".join([*lines, *notes]) + "\n"


# --- several tasks ---------------------------------------------------------------------------------------------------

_NOTE = (
    "Effects are paired differences divided by their task's smallest effect of interest; larger is better. IQM: "
    "interquartile mean over the pairs of all tasks. Intervals: stratified bootstrap; with fewer than 10 pairs per "
    "task they are too narrow."
)


def _multi_task_tables(found: Sequence[Across]) -> list[TextTable]:
    """Over all tasks, task by task, and the distribution of the pairs."""
    over_all = [
        (
            a.recipe, str(len(a.tasks)), str(sum(a.pairs)),
            f"{a.iqm:+.2f}", f"{a.iqm_low:+.2f} to {a.iqm_high:+.2f}",
            f"{a.improvement:.2f}", f"{a.improvement_low:.2f} to {a.improvement_high:.2f}",
        )
        for a in found
    ]  # fmt: skip
    single = [
        (a.recipe, task, str(pairs), f"{effect:+.2f}", verdict)
        for a in found
        for task, pairs, effect, verdict in zip(a.tasks, a.pairs, a.effects, a.verdicts, strict=True)
    ]
    profiles = [(a.recipe, *(f"{100 * share:.0f} %" for share in a.profile)) for a in found]
    head = ("recipe", "tasks", "pairs", "IQM", "95 % interval", "P(better)", "95 % interval")
    least = ("recipe", *(f"{value:+g}" for value in PROFILE))
    return [
        TextTable("Over all tasks", head, tuple(over_all), notes=(_NOTE,)),
        TextTable("Task by task", ("recipe", "task", "pairs", "effect", "verdict"), tuple(single), (0, 1, 4)),
        TextTable("Share of the pairs with an effect above", least, tuple(profiles)),
    ]


def multi_task_text(studies: Sequence[Results]) -> RenderableType:
    """The tables over several tasks for a terminal.

    Raises:
        InvalidArgumentError: see :func:`gonio.lab.across`.
    """
    parts: list[RenderableType] = []
    for table in _multi_task_tables(across(studies)):
        notes = [Text(note, style="dim") for note in table.notes]
        parts += [Text(table.title, style="bold"), table.rich(), *notes, Text("")]
    return Group(*parts[:-1])


MULTI_TASK_FORMATS: Mapping[str, Callable[[Sequence[Across]], str]] = {
    "json": lambda found: _json_text(
        {"schema": "gonio.across/1", "note": _NOTE, "profile": PROFILE, "recipes": [asdict(one) for one in found]}
    ),
    "csv": lambda found: csv_table(Across.__dataclass_fields__, (asdict(one).values() for one in found)),
    "md": lambda found: "\n".join(line for t in _multi_task_tables(found) for line in t.markdown()).rstrip("\n") + "\n",
    "tex": lambda found: "\n".join(line for t in _multi_task_tables(found) for line in t.latex()) + "\n",
}
