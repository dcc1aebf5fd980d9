"""The verdicts for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gonio.compare.judging.results import Effect, Results
from gonio.escaping import plain
from gonio.report.tables import Table, attacks, evidence, hidden_gradients, verdicts
from gonio.report.wording import Scale, count, headline, mark, others, p_value, partial, ratio, seen, verdict_text

__all__ = ["rich_table", "text"]

TONES = {"good": "bold blue", "bad": "bold dark_orange3", "even": "default"}
TABLE_WIDTH = 92  # columns below which a table would break words


def text(results: Results) -> RenderableType:
    """The headline, missing runs and every recipe; print it with a rich Console or `rich.print`.

    A table if the terminal is wide enough, otherwise three lines per recipe. Nothing in a name acts as markup or as
    an escape sequence.

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
            table = verdicts(results)
            head = (table.head[0], scale.unit, *table.head[2:5], "time", "memory")
            yield rich_table(table, head=head, verdicts=[_verdict(effect) for effect in results.effects])
            yield Text("")
            yield rich_table(evidence(results))
        else:
            for effect in results.effects:
                yield from _lines(effect, scale)
        attacked = attacks(results)
        if attacked.rows:
            yield Text("")
            yield Text(attacked.title, style="dim")
            yield rich_table(attacked)
        for recipe, signs in hidden_gradients(results).items():
            yield from (Text(f"{plain(recipe)}: {plain(sign)}", style=TONES["bad"]) for sign in signs)
        yield Text("")
        yield Text(_baseline(results, scale), style="dim")


def rich_table(table: Table, *, head: Sequence[str] = (), verdicts: Sequence[Text] = ()) -> RichTable:
    """A table for a rich Console.

    Args:
        head: other titles of the columns.
        verdicts: coloured cells of the column `verdict`, by row.
    """
    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, title in enumerate(head or table.head):
        number = i in table.numbers
        made.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number and bool(head))
    for at, row in enumerate(table.rows):
        cells = [Text(plain(cell)) for cell in row]
        if verdicts:
            cells[table.head.index("verdict")] = verdicts[at]
        made.add_row(*cells)
    return made


def _lines(e: Effect, scale: Scale) -> Iterator[Text]:
    """One recipe on a narrow terminal."""
    yield Text.assemble((plain(e.recipe), "bold"), "  ", _verdict(e))
    interval = scale.interval(e.low, e.high)
    effect = f"{scale.signed(e.mean)} {scale.unit}" + (f" ({interval})" if interval else "")
    yield Text(f"  {effect}, Holm p {p_value(e.p_holm)}, time {ratio(e.step_time)}, memory {ratio(e.memory)}")
    rho = "" if e.rho is None else f", correlation {e.rho:.2f}".replace("-", "−")
    detectable = "" if e.mde is None else f", detectable effect {scale.score(e.mde)} {scale.unit}"
    yield Text(f"  {count(e.n, 'pair')}{rho}{detectable}")


def _verdict(e: Effect) -> Text:
    symbol, tone = mark(e.verdict)
    return Text(f"{symbol} {plain(verdict_text(e))}", style=TONES[tone])


def _baseline(results: Results, scale: Scale) -> str:
    plan = results.plan
    mean, sd = scale.score(results.baseline_mean), scale.score(results.baseline_sd)
    sesoi = f"±{scale.score(plan.sesoi)} {scale.unit}" if plan.sesoi else "none"
    return (
        f"baseline {mean} ± {sd} {plain(plan.unit)} (mean ± sd over seeds) · smallest effect of interest {sesoi}"
        f" · {len(plan.seeds)} seeds" + (f" · {seen(results)}" if seen(results) else "")
    )
