"""Measurements on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gonio.foreign_text import plain, shorten
from gonio.measuring.columns import columns_for

if TYPE_CHECKING:
    from gonio.measuring.measurements import Measurements

__all__ = ["screen"]

TONES = {"error": "bold red", "warn": "bold dark_orange3", "info": "bold blue"}


def screen(measured: Measurements, width: int) -> Iterator[RenderableType]:
    """The findings, the table of layers in as many columns as fit, and the coverage."""
    entries = sum(tensor.entries for tensor in measured.tensors)
    yield Text(f"{plain(measured.source)}: {len(measured.layers)} layers, {entries:,} numbers", style="bold")
    for note in measured.notes:
        yield Text(plain(note), style="dim")
    yield Text("")
    yield from _findings(measured)
    if measured.layers:
        yield _table(measured, width)
        yield Text("")
    yield Text(measured.coverage, style="dim")


def _findings(measured: Measurements) -> Iterator[RenderableType]:
    if not measured.findings:
        yield Text("No findings.")
    for finding in measured.findings:
        head = (f"{finding.level:5} {finding.code}", TONES.get(finding.level, "bold"))
        yield Text.assemble(head, f"  {plain(finding.path)}: {plain(finding.found)}")
    if measured.findings:
        yield Text("gonio explain CODE says what a finding means and what to do.", style="dim")
    yield Text("")


def _table(measured: Measurements, width: int) -> Table:
    longest = max(12, min(max(len(plain(t.path)) for t in measured.layers), max(16, width // 3)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("layer", no_wrap=True, min_width=min(longest, 12))
    columns = columns_for(width, longest)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    flagged = {finding.path for finding in measured.findings if finding.level != "info"}
    for tensor in measured.layers:
        style = "dark_orange3" if tensor.path in flagged else ""
        cells = [Text(column.cell(tensor)) for column in columns]
        table.add_row(Text(shorten(tensor.path, longest=longest), style=style), *cells)
    return table
