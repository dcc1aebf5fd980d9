"""The effects of recipes over several tasks, as tables in any format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.text import Text

from gonio.compare.judging.multi_task import PROFILE, Across, across
from gonio.compare.judging.results import Results
from gonio.report.exports import csv_text, latex_table, markdown_table
from gonio.report.tables import Table
from gonio.report.terminal import rich_table

__all__ = ["MULTI_TASK_FORMATS", "multi_task_text"]

_NOTE = (
    "Effects are paired differences divided by their task's smallest effect of interest; larger is better. IQM: "
    "interquartile mean over the pairs of all tasks. Intervals: stratified bootstrap; with fewer than 10 pairs per "
    "task they are too narrow."
)


def _tables(found: Sequence[Across]) -> list[Table]:
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
        Table("Over all tasks", head, tuple(over_all), notes=(_NOTE,)),
        Table("Task by task", ("recipe", "task", "pairs", "effect", "verdict"), tuple(single), (0, 1, 4)),
        Table("Share of the pairs with an effect above", least, tuple(profiles)),
    ]


def multi_task_text(studies: Sequence[Results]) -> RenderableType:
    """The tables over several tasks for a terminal.

    Raises:
        InvalidArgumentError: see :func:`gonio.compare.across`.
    """
    parts: list[RenderableType] = []
    for table in _tables(across(studies)):
        notes = [Text(note, style="dim") for note in table.notes]
        parts += [Text(table.title, style="bold"), rich_table(table), *notes, Text("")]
    return Group(*parts[:-1])


def _json(found: Sequence[Across]) -> str:
    content = {"schema": "gonio.across/1", "note": _NOTE, "profile": PROFILE, "recipes": [asdict(one) for one in found]}
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _csv(found: Sequence[Across]) -> str:
    def cells(one: Across) -> list[object]:
        return ["; ".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in asdict(one).values()]

    return csv_text(Across.__dataclass_fields__, map(cells, found))


def _markdown(found: Sequence[Across]) -> str:
    return "\n".join(line for table in _tables(found) for line in markdown_table(table)).rstrip("\n") + "\n"


def _latex(found: Sequence[Across]) -> str:
    return "\n".join(line for table in _tables(found) for line in latex_table(table)) + "\n"


MULTI_TASK_FORMATS: Mapping[str, Callable[[Sequence[Across]], str]] = {
    "json": _json,
    "csv": _csv,
    "md": _markdown,
    "tex": _latex,
}
