"""Measurements on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gonio.escaping import plain, shorten
from gonio.measuring.columns import COLUMNS, columns_for, number
from gonio.measuring.signals import Signal
from gonio.measuring.structure import MovableScale

if TYPE_CHECKING:
    from gonio.measuring.measurements import Measurements

__all__ = ["SIGNAL_TITLES", "scale_sentence", "screen", "signal_cells"]

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
    yield from _model(measured, width)
    yield Text(measured.coverage, style="dim")


def _findings(measured: Measurements) -> Iterator[RenderableType]:
    if not measured.findings:
        yield Text("No findings.")
    for finding in measured.findings:
        head = (f"{finding.level:5} {finding.code}", TONES.get(finding.level, "bold"))
        yield Text.assemble(head, f"  {plain(finding.path) or 'the model'}: {plain(finding.found)}")
    if measured.findings:
        yield Text("gonio explain CODE says what a finding means and what to do.", style="dim")
    for sentence in measured.suppressed.sentences if measured.suppressed is not None else ():
        yield Text(plain(sentence, longest=len(sentence)), style="dim")
    yield Text("")


def _model(measured: Measurements, width: int) -> Iterator[RenderableType]:
    """What is said on the model as a whole: movable scale, mixtures, signals."""
    if measured.scale is not None:
        yield Text(scale_sentence(measured.scale))
        yield Text("")
    for path, shares in measured.mixtures.items():
        said = "; ".join(f"{what} {_shares(share)}" for what, share in shares.items())
        yield Text(f"{plain(path)} mixes {said}")
    if measured.mixtures:
        yield Text("")
    if measured.signals:
        yield _signals(measured, width)
        yield Text("")


def scale_sentence(scale: MovableScale) -> str:
    """The wasted L2 in one sentence."""
    return (
        f"Σ‖W‖² of the {scale.layers} layers between which scale can move is {number(scale.sum)} and could be "
        f"{number(scale.least)} for the same function: {scale.wasted:.1%} of it is wasted (gonio.balance_); "
        f"{scale.wasted_by_layer:.1%} with one scale per layer instead of one per neuron."
    )


def _shares(share: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in share.items())


def _signals(measured: Measurements, width: int) -> Table:
    names = [shorten(signal.path or signal.kind) for signal in measured.signals]
    rows = [signal_cells(signal) for signal in measured.signals]
    kept = _fitting(("output of", *SIGNAL_TITLES), [(n, *cells) for n, cells in zip(names, rows, strict=True)], width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("output of", no_wrap=True)
    for column in kept:
        table.add_column(SIGNAL_TITLES[column], justify="right", no_wrap=True)
    for name, cells in zip(names, rows, strict=True):
        table.add_row(Text(name), *(cells[column] for column in kept))
    return table


def _fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns that a screen has room for: first those without a figure go, then the ones that others imply."""
    widths = [max(map(len, column)) + 2 for column in zip(titles, *rows, strict=True)]
    empty = [title for title, *cells in zip(titles, *rows, strict=True) if set(cells) == {"–"}]
    left = list(titles)
    for title in (*empty, *_SPARED):
        if sum(widths[titles.index(name)] for name in left) - 2 > width and title in left:
            left.remove(title)
    return [titles.index(name) - 1 for name in left[1:]]


SIGNAL_TITLES = ("mean", "std", "rms", "gain", "zeros", "dead", "gradient", "its gain", "off 90°", "train–eval")
_SPARED = ("mean", "its gain", "std", "off 90°", "train–eval")  # where the screen is narrow, in this order


def signal_cells(signal: Signal) -> tuple[str, ...]:
    """A signal's figures as text, in the order of :data:`SIGNAL_TITLES`."""
    figures = (number(signal.mean), number(signal.std), number(signal.rms), number(signal.gain))
    dead = "ends a branch" if signal.branch == "ends" else f"{signal.dead_units} of {signal.units}"
    back = "waits" if signal.branch == "waits" else number(signal.gradient_rms)
    broken = f", {signal.nonfinite} values NaN or infinite" if signal.nonfinite else ""
    angles = "–" if signal.angles_read is None else f"{number(signal.angles_read)} ({number(signal.angles_exact)})"
    return (
        *figures,
        f"{signal.zeros:.0%}",
        f"{dead}{broken}",
        back,
        number(signal.gradient_gain),
        angles,
        number(signal.train_eval_gap),
    )


def _table(measured: Measurements, width: int) -> Table:
    longest = max(12, min(max(len(plain(t.path)) for t in measured.layers), max(16, width // 3)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("layer", no_wrap=True, min_width=min(longest, 12))
    columns = columns_for(COLUMNS, width, longest)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    flagged = {finding.path for finding in measured.findings if finding.level != "info"}
    for tensor in measured.layers:
        style = "dark_orange3" if tensor.path in flagged else ""
        cells = [Text(column.cell(tensor)) for column in columns]
        table.add_row(Text(shorten(tensor.path, longest=longest), style=style), *cells)
    return table
