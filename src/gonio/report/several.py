"""What recipes do over several tasks, as a table in any format."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.text import Text

from gonio.compare.results import Results
from gonio.compare.several import PROFILE, Across, across
from gonio.escaping import csv_cell, markdown_cell, tex_cell
from gonio.report.latex import tabular
from gonio.report.shown import Shown
from gonio.report.terminal import table_of

__all__ = ["SEVERAL_FORMATS", "several_text"]

_HEAD = ("recipe", "tasks", "pairs", "IQM", "95 % interval", "P(better)", "95 % interval")
_PROFILE_HEAD = ("recipe", *(f"{least:+g}" for least in PROFILE))
_NOTE = (
    "Effects are paired differences in their task's smallest effect of interest; more is better. IQM: interquartile "
    "mean over the pairs of all tasks. Intervals: stratified bootstrap; with fewer than 10 pairs per task they are too "
    "narrow."
)


def _tables(found: Sequence[Across]) -> list[Shown]:
    """Over all tasks, task by task, and how the pairs are spread."""
    return [
        Shown("Over all tasks", _HEAD, tuple(_rows(found)), notes=(_NOTE,)),
        Shown("Task by task", ("recipe", "task", "pairs", "effect", "verdict"), tuple(_single(found)), (0, 1, 4)),
        Shown("Share of the pairs that are better by more than", _PROFILE_HEAD, tuple(_profiles(found))),
    ]


def _single(found: Sequence[Across]) -> list[tuple[str, ...]]:
    return [
        (a.recipe, task, str(pairs), f"{effect:+.2f}", verdict)
        for a in found
        for task, pairs, effect, verdict in zip(a.tasks, a.pairs, a.effects, a.verdicts, strict=True)
    ]


def _profiles(found: Sequence[Across]) -> list[tuple[str, ...]]:
    return [(a.recipe, *(f"{100 * share:.0f} %" for share in a.profile)) for a in found]


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
    """The tables over several tasks for a terminal.

    Raises:
        InvalidArgumentError: see :func:`gonio.compare.across`.
    """
    parts: list[RenderableType] = []
    for shown in _tables(across(studies)):
        parts += [Text(shown.title, style="bold"), table_of(shown), *(Text(note, style="dim") for note in shown.notes)]
        parts.append(Text(""))
    return Group(*parts[:-1])


def _json(found: Sequence[Across]) -> str:
    content = {"schema": "gonio.across/1", "note": _NOTE, "profile": PROFILE, "recipes": [asdict(one) for one in found]}
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _csv(found: Sequence[Across]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(Across.__dataclass_fields__)
    for one in found:
        cells = ["; ".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in asdict(one).values()]
        writer.writerow([csv_cell(cell) for cell in cells])
    return buffer.getvalue()


def _markdown(found: Sequence[Across]) -> str:
    lines: list[str] = []
    for shown in _tables(found):
        rows = [shown.head, ("---",) * len(shown.head), *(tuple(map(markdown_cell, row)) for row in shown.rows)]
        lines += [f"{shown.title}:", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
        lines += [*(f"- {note}" for note in shown.notes), ""] if shown.notes else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _latex(found: Sequence[Across]) -> str:
    lines: list[str] = []
    for shown in _tables(found):
        lines += [f"% {tex_cell(shown.title)}", *tabular(shown.head, shown.rows, numbers=shown.numbers)]
    return "\n".join(lines) + "\n"


SEVERAL_FORMATS: Mapping[str, Callable[[Sequence[Across]], str]] = {
    "json": _json,
    "csv": _csv,
    "md": _markdown,
    "tex": _latex,
}
