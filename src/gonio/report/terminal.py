"""The verdict table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from gonio.compare.results import Effect, Results
from gonio.escaping import plain
from gonio.report.sections import attacks_of, robust_rows
from gonio.report.shown import Shown, evidence
from gonio.report.words import Scale, count, headline, mark, others, p_value, partial, ratio, said, seen

__all__ = ["text"]

TONES = {"good": "bold blue", "bad": "bold dark_orange3", "even": "default"}
TABLE_WIDTH = 92  # columns below which a table would break words; there each recipe gets its own lines


def text(results: Results) -> RenderableType:
    """The headline, what is missing, and every recipe; print it with a rich Console or `rich.print`.

    A table where the terminal is wide enough, else two lines per recipe. Names are shown as they are:
    nothing in them is read as markup or as an escape sequence.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> console = Console(file=io.StringIO(), width=100)
        >>> console.print(gonio.report.text(gonio.report.example()))
        >>> print(console.file.getvalue().splitlines()[0])
        decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).
    """
    return _Verdicts(results)


@dataclass(frozen=True)
class _Verdicts:
    results: Results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        results, scale = self.results, Scale.of(self.results)
        yield Text(headline(results), style="bold")
        if others(results):
            yield Text(others(results))
        if partial(results):
            yield Text(partial(results), style="dark_orange3")
        yield Text("")
        if options.max_width >= TABLE_WIDTH:
            yield _table(results.effects, scale)
            yield Text("")
            yield table_of(evidence(results))
        else:
            for effect in results.effects:
                yield from _lines(effect, scale)
        yield from _robust(results)
        yield Text("")
        yield Text(_baseline(results, scale), style="dim")


def _table(effects: tuple[Effect, ...], scale: Scale) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("recipe", overflow="fold")
    for column in (scale.unit, "95 % interval", "Holm p"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for column in ("time", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for e in effects:
        numbers = (scale.signed(e.mean), scale.interval(e.low, e.high), p_value(e.p_holm))
        costs = (ratio(e.step_time), ratio(e.memory))
        table.add_row(Text(plain(e.recipe)), *map(Text, numbers), _verdict(e), *map(Text, costs))
    return table


def _lines(e: Effect, scale: Scale) -> Iterator[Text]:
    yield Text.assemble((plain(e.recipe), "bold"), "  ", _verdict(e))
    interval = scale.interval(e.low, e.high)
    effect = f"{scale.signed(e.mean)} {scale.unit}" + (f" ({interval})" if interval else "")
    costs = f"time {ratio(e.step_time)}, memory {ratio(e.memory)}"
    yield Text(f"  {effect}, Holm p {p_value(e.p_holm)}, {costs}")
    rho = "" if e.rho is None else f", ρ {e.rho:.2f}".replace("-", "−")
    seen_from = "" if e.mde is None else f", detectable {scale.score(e.mde)} {scale.unit}"
    yield Text(f"  {count(e.n, 'pair')}{rho}{seen_from}")


def _verdict(e: Effect) -> Text:
    shown = mark(e.verdict)
    return Text(f"{shown.symbol} {plain(said(e))}", style=TONES[shown.tone])


def table_of(shown: Shown) -> Table:
    """What is shown, as a table of the terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, title in enumerate(shown.head):
        table.add_column(title, justify="right" if i in shown.numbers else "left", overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table


def _robust(results: Results) -> Iterator[RenderableType]:
    """Accuracy under attack, one row per recipe; nothing if no model was attacked."""
    rows = robust_rows(results, {effect.recipe: "" for effect in results.effects})
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("right under attack, %", overflow="fold")
    for _, title in attacks_of(results):
        table.add_column(title, justify="right")
    table.add_column("difference", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(plain(row.recipe)), *map(Text, row.cells), Text(f"{row.mean} {row.interval}".strip()))
    yield Text("")
    yield table
    for row in rows:
        yield from (Text(f"{plain(row.recipe)}: {plain(sign)}", style=TONES["bad"]) for sign in row.signs)


def _baseline(results: Results, scale: Scale) -> str:
    plan = results.plan
    mean, sd = scale.score(results.baseline_mean), scale.score(results.baseline_sd)
    sesoi = f"±{scale.score(plan.sesoi)} {scale.unit}" if plan.sesoi else "not named"
    return (
        f"baseline {mean} ± {sd} {plain(plan.unit)} (mean ± sd of seeds) · smallest effect of interest {sesoi}"
        f" · {len(plan.seeds)} seeds" + (f" · {seen(results)}" if seen(results) else "")
    )
