"""Tables and findings on a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gonio.escaping import plain, shorten
from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.structure import MovableScale
from gonio.measuring.findings.finding import Finding, Suppressed
from gonio.measuring.showing.columns import Column, columns_for, number, signals_for

TONES = {"error": "bold red", "warn": "bold dark_orange3", "info": "bold blue"}


def as_text(shown: RenderableType) -> str:
    """`shown` without colours, as wide as the terminal, or 100 columns where there is none."""
    stream = io.StringIO()
    width = shutil.get_terminal_size((100, 24)).columns
    Console(file=stream, width=width, color_system=None, legacy_windows=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines())


def bare_table(first: str, titles: Sequence[str], **options: Any) -> Table:
    """An empty table without borders: names on the left, figures on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True, **options)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def tensor_table(
    first: str,
    tensors: Sequence[Any],
    columns: Sequence[Column[Any]],
    kept: Sequence[str],
    width: int,
    *,
    flagged: Collection[str] = (),
) -> Table:
    """One row per tensor in as many columns as fit.

    Args:
        first: the heading of the paths.
        kept: as for :func:`columns_for`.
        flagged: paths to show in colour.
    """
    longest = max(12, min(max(len(plain(t.path)) for t in tensors), max(16, width // 3)))
    shown = columns_for(columns, kept, width, longest)
    table = bare_table(first, [column.title for column in shown], min_width=min(longest, 12))
    for tensor in tensors:
        name = Text(shorten(tensor.path, longest=longest), style="dark_orange3" if tensor.path in flagged else "")
        table.add_row(name, *(Text(column.cell(tensor)) for column in shown))
    return table


def signal_table(signals: Sequence[Signal], width: int) -> Table:
    """One row per layer's output in as many columns as fit."""
    names = [shorten(signal.path or signal.kind) for signal in signals]
    columns = signals_for(signals, width, max(map(len, ("output of", *names))))
    table = bare_table("output of", [column.title for column in columns])
    for name, signal in zip(names, signals, strict=True):
        table.add_row(Text(name), *(column.cell(signal) for column in columns))
    return table


def findings(found: Sequence[Finding], suppressed: Suppressed | None, scope: str) -> Iterator[RenderableType]:
    """One line per finding, or the scope of the rules; and the number of suppressed findings."""
    if not found:
        yield Text("No findings.")
        yield Text(scope, style="dim")
    for finding in found:
        head = (f"{finding.level:5} {finding.code}", TONES.get(finding.level, "bold"))
        yield Text.assemble(head, f"  {plain(finding.path) or 'the model'}: {plain(finding.found)}")
    if found:
        yield Text("Run `gonio explain CODE` for the meaning of a finding and what to do.", style="dim")
    for sentence in suppressed.sentences if suppressed is not None else ():
        yield Text(plain(sentence, longest=len(sentence)), style="dim")
    yield Text("")


def scale_sentence(scale: MovableScale) -> str:
    """The wasted L2 in one sentence."""
    return (
        f"The same function can be computed with {scale.wasted:.1%} less squared weight norm ({number(scale.least)} "
        f"instead of {number(scale.sum)}, {scale.layers} layers; {scale.wasted_by_layer:.1%} less with one scale per "
        f"layer instead of one per neuron): gonio.balance_(model) does it."
    )
