"""The results of one study, or of several over their tasks, as JSON, CSV, markdown, LaTeX and on a terminal."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gonio.compare.judging.multi_task import PROFILE, Across, across
from gonio.compare.judging.results import Effect, Ratio, Results, Robust
from gonio.compare.planning.plan import BASELINE
from gonio.escaping import csv_cell, markdown_cell, plain, redact, tex_cell
from gonio.report.tables import ATTACKS, Table, attacks, evidence, hidden_gradients, tables, verdicts
from gonio.report.wording import Scale, count, headline, mark, others, p_value, partial, ratio, rho, seen, verdict_text

SCHEMA = "gonio.results/1"


def to_json(results: Results) -> str:
    """The whole results as strict JSON: `schema` names the version, a non-finite number is null.

    Home directories and credentials in URLs are removed from every text, as on the page.

    Example:
        >>> import json
        >>> read = json.loads(gonio.report.to_json(gonio.report.example()))
        >>> read["schema"], read["effects"][1]["verdict"]
        ('gonio.results/1', 'helps')
    """
    return _json_text({"schema": SCHEMA, "headline": headline(results), **results.to_dict()})


def _json_text(content: Any) -> str:
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
    *(f"right_{name}{of}" for name in ATTACKS for of in ("", "_baseline")), "worst", "worst_low", "worst_high",
    "hidden_gradients",
)  # fmt: skip


def to_csv(results: Results) -> str:
    """One line per recipe; no cell runs as a formula in a spreadsheet.

    `right_pgd` is the recipe's accuracy under that attack and `right_pgd_baseline` the baseline's; `worst` is the
    paired difference in the worst case. All of these are empty if no model was attacked. If `changes` has more than
    one entry, the effect is confounded.

    Example:
        >>> lines = gonio.report.to_csv(gonio.report.example()).splitlines()
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
    return _csv_text(COLUMNS, rows)


def _quartiles(cost: Ratio | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if cost is None else (cost.median, cost.low, cost.high)


def _csv_text(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Lines of CSV in which no cell is a formula."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    joined = (["; ".join(map(str, c)) if isinstance(c, (list, tuple)) else c for c in row] for row in rows)
    writer.writerows(map(csv_cell, row) for row in joined)
    return buffer.getvalue()


def to_markdown(results: Results) -> str:
    """The tables for an issue or a README; names are escaped and cannot act as markup.

    Example:
        >>> print(gonio.report.to_markdown(gonio.report.example()).splitlines()[0])
        **decoupled-tanh helps: +0.90 points (95 % interval +0.80 to +1.00).**
    """
    lines = [f"**{markdown_cell(headline(results))}**", ""]
    if partial(results):
        lines += [markdown_cell(partial(results)), ""]
    for i, table in enumerate(tables(results)):
        lines += _markdown_table(table)[0 if i else 2 :]
    lines += [f"- {markdown_cell(note)}" for note in results.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_table(table: Table) -> list[str]:
    """Title, table and notes."""
    rows = [map(markdown_cell, table.head), ["---"] * len(table.head), *(map(markdown_cell, row) for row in table.rows)]
    lines = [f"{markdown_cell(table.title)}:", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return [*lines, *(f"- {markdown_cell(note)}" for note in table.notes), ""] if table.notes else lines


def to_latex(results: Results) -> str:
    r"""The tables as LaTeX with booktabs; names are escaped and cannot act as commands.

    Example:
        >>> print(gonio.report.to_latex(gonio.report.example()).splitlines()[6])
        orthogonal-init & $+$0.10 & $+$0.00 to $+$0.20 & 0.50 & no useful effect & $\times$1.03 & $\times$1.00 \\
    """
    lines = [line for table in tables(results) for line in _latex_table(table)]
    notes = [f"% {tex_cell(note)}" for note in (headline(results), *results.notes)]
    return "\n".join([*lines, *notes]) + "\n"


def _latex_table(table: Table) -> list[str]:
    """Title, table and notes; columns of numbers are right-aligned."""
    columns = "".join("r" if i in table.numbers else "l" for i in range(len(table.head)))
    first, *rest = [" & ".join(map(tex_cell, row)) + r" \\" for row in (table.head, *table.rows)]
    begin = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
    title, *notes = [f"% {tex_cell(text)}" for text in (table.title, *table.notes)]
    return [title, *begin, *rest, r"\bottomrule", r"\end{tabular}", *notes]


# --- terminal --------------------------------------------------------------------------------------------------------

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
        sentences = ((headline, "bold"), (others, ""), (partial, "dark_orange3"))
        yield from (Text(said, style=style) for sentence, style in sentences if (said := sentence(results)))
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
            yield from (Text(""), Text(attacked.title, style="dim"), rich_table(attacked))
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
    correlation = "" if e.rho is None else f", correlation {rho(e)}"
    detectable = "" if e.mde is None else f", detectable effect {scale.score(e.mde)} {scale.unit}"
    yield Text(f"  {count(e.n, 'pair')}{correlation}{detectable}")


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


# --- several tasks ---------------------------------------------------------------------------------------------------

_NOTE = (
    "Effects are paired differences divided by their task's smallest effect of interest; larger is better. IQM: "
    "interquartile mean over the pairs of all tasks. Intervals: stratified bootstrap; with fewer than 10 pairs per "
    "task they are too narrow."
)


def _multi_task_tables(found: Sequence[Across]) -> list[Table]:
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
    for table in _multi_task_tables(across(studies)):
        notes = [Text(note, style="dim") for note in table.notes]
        parts += [Text(table.title, style="bold"), rich_table(table), *notes, Text("")]
    return Group(*parts[:-1])


MULTI_TASK_FORMATS: Mapping[str, Callable[[Sequence[Across]], str]] = {
    "json": lambda found: _json_text(
        {"schema": "gonio.across/1", "note": _NOTE, "profile": PROFILE, "recipes": [asdict(one) for one in found]}
    ),
    "csv": lambda found: _csv_text(Across.__dataclass_fields__, (asdict(one).values() for one in found)),
    "md": lambda found: "\n".join(chain(*map(_markdown_table, _multi_task_tables(found)))).rstrip("\n") + "\n",
    "tex": lambda found: "\n".join(chain(*map(_latex_table, _multi_task_tables(found)))) + "\n",
}
