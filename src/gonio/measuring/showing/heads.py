"""Attention heads in tables: one row per attention, with the smallest and the largest figure of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import RenderableType
from rich.text import Text

from gonio.escaping import shorten
from gonio.measuring.figures.heads import HeadMeasurement
from gonio.measuring.findings.model_rules import COLLAPSED, by_attention, one_token_heads
from gonio.measuring.showing.table import Column
from gonio.messages import local, say
from gonio.pages.tables import bare_table, number

_BLOCKS = 12  # of attention, with a row in a terminal


@dataclass(frozen=True)
class AttentionRow:
    """One attention.

    Attributes:
        members: its heads.
    """

    path: str
    members: tuple[HeadMeasurement, ...]


def rows_of(heads: Sequence[HeadMeasurement]) -> list[AttentionRow]:
    """The attention blocks, in the order of execution."""
    return [AttentionRow(path, tuple(members)) for path, members in by_attention(heads).items()]


def _values(row: AttentionRow, figure: str) -> list[float] | None:
    """Of all heads; None if one has none."""
    values = [getattr(head, figure) for head in row.members]
    return None if None in values else values


def _range(figure: str) -> Callable[[AttentionRow], str]:
    def text(row: AttentionRow) -> str:
        values = _values(row, figure)
        return "–" if values is None else f"{number(min(values))}–{number(max(values))}"

    return text


def _largest(figure: str) -> Callable[[AttentionRow], str]:
    return lambda row: number(None if (values := _values(row, figure)) is None else max(values))


def _single(row: AttentionRow) -> str:
    if _values(row, "one_token") is None:
        return "–"
    return local(say("{n} of {every}", n=one_token_heads(row.members), every=len(row.members)))


_ENDS = say("smallest and largest norm over the heads: of the rows that compute it, of the output of the columns")
NORMS: tuple[Column[AttentionRow], ...] = (
    Column("heads", "heads", "their number", 5, lambda row: str(len(row.members))),
    *(Column(role, role, _ENDS, 11, _range(role)) for role in ("query", "key", "value", "output")),
)
LOGITS: tuple[Column[AttentionRow], ...] = (
    Column("logit_bound", "logits up to", "bound of the absolute logits on any input, of the head with the largest", 12,
           _largest("logit_bound")),
    Column("largest_logit", "largest logit", "on the batch, over the keys that the mask allows", 13,
           _largest("largest_logit")),
    Column("entropy", "entropy", "of the probabilities of a query, in nats, the mean over the batch: smallest and "
           "largest over the heads", 11, _range("entropy")),
    Column("entropy_share", "entropy share", "entropy over its maximum, the logarithm of the number of allowed keys: 1 "
           "for equal probabilities, 0 for one token", 11, _range("entropy_share")),
    Column("one_token", "on one token", say("heads of which at least {share:.0%} of the queries attend to one token, "
           "with a probability of 0.95 or more", share=COLLAPSED), 12, _single),
)  # fmt: skip
COLUMNS = (*NORMS, *LOGITS)


def shown_columns(heads: Sequence[HeadMeasurement]) -> tuple[Column[AttentionRow], ...]:
    """All columns, or without a batch those of weights."""
    return COLUMNS if any(head.largest_logit is not None for head in heads) else (*NORMS, LOGITS[0])


def rendered(heads: Sequence[HeadMeasurement]) -> Iterator[RenderableType]:
    """The first rows for a terminal: norms, and with a batch logits in a table of their own."""
    rows, columns = rows_of(heads), shown_columns(heads)
    tables = {say("norms of heads in"): columns} if len(columns) < len(COLUMNS) else {
        say("norms of heads in"): NORMS, say("logits of heads in"): LOGITS}  # fmt: skip
    for n, (title, some) in enumerate(tables.items()):
        table = bare_table(title, [column.title for column in some])
        for row in islice(rows, _BLOCKS):
            cells = (column.cell(row) for column in some)
            table.add_row(Text(shorten(row.path or local(say("the model")))), *cells)
        yield from [Text("")] if n else []
        yield table
    if len(rows) > _BLOCKS:
        yield Text(local(say("and {n} more blocks: to_dict() has all heads", n=len(rows) - _BLOCKS)), style="dim")
