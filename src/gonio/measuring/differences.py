"""What changed between two sets of weights: the figures, and how they are shown and exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from gonio.errors import UnknownNameError, listing
from gonio.escaping import markdown_cell, plain, shorten
from gonio.measuring.as_text import as_text
from gonio.measuring.columns import Column, columns_for, number
from gonio.measuring.export import csv_of, frame_of, table_of
from gonio.measuring.page_parts import page, row, table, text

__all__ = ["Differences", "TensorDifference"]


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    r"""One tensor of both sources.

    Attributes:
        status: `compared`, `equal` (every value), or `not compared`, with the reason.
        relative: :math:`\lVert \Delta \rVert / \lVert W \rVert` with :math:`\Delta = W' - W`; None from a zero tensor.
        norm_ratio: median over filters of the norm after over the norm before.
        angle_mean, angle_max: between each filter before and after, in degrees; 90 for independent directions.
        stable_rank: :math:`\lVert \Delta \rVert^2 / \sigma_{\max}^2(\Delta)`. `stable_rank_random`: for a change with
            independent entries.
        rank_99: the fewest singular directions of :math:`\Delta` that hold 99 % of its squared norm, that is of the
            best approximation with this relative error of a tenth; None where it is above 256 in a
            weight too large for all singular values.
    """

    name: str
    path: str
    status: str
    reason: str = ""
    shape: tuple[int, ...] = ()
    relative: float | None = None
    norm_ratio: float | None = None
    angle_mean: float | None = None
    angle_max: float | None = None
    stable_rank: float | None = None
    stable_rank_random: float | None = None
    rank_99: int | None = None


FIELDS = tuple(f.name for f in fields(TensorDifference))


def _degrees(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}°"


COLUMNS: tuple[Column[TensorDifference], ...] = (
    Column("shape", "of the tensor", lambda t: "×".join(map(str, t.shape)), 7, 14),
    Column("change", "norm of the difference over the norm before", lambda t: number(t.relative), 0, 7),
    Column("norm ratio", "median over filters of the norm after over before", lambda t: number(t.norm_ratio), 1, 10),
    Column("angle", "between each filter before and after: mean", lambda t: _degrees(t.angle_mean), 2, 6),
    Column("largest", "the largest of these angles", lambda t: _degrees(t.angle_max), 3, 7),
    Column("s.rank", "stable rank of the difference", lambda t: number(t.stable_rank), 5, 6),
    Column("chance", "stable rank of a random difference", lambda t: number(t.stable_rank_random), 6, 6),
    Column("rank 99%", "singular directions that hold 99% of it", lambda t: str(t.rank_99 or "–"), 4, 8),
)


@dataclass(frozen=True, repr=False)
class Differences:
    """Every tensor that either source has; a mapping by path that prints as a table.

    Attributes:
        before, after: what was compared.
        tensors: one :class:`TensorDifference` each, in the order of `before`, then what only `after` has.
    """

    before: str
    after: str
    tensors: tuple[TensorDifference, ...]

    def __getitem__(self, path: str) -> TensorDifference:
        for tensor in self.tensors:
            if path in (tensor.path, tensor.name):
                return tensor
        raise UnknownNameError("tensor", path, [tensor.path for tensor in self.tensors])

    def __iter__(self) -> Iterator[TensorDifference]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def moved(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ and could be compared."""
        return tuple(tensor for tensor in self.tensors if tensor.status == "compared")

    @property
    def coverage(self) -> str:
        """How many tensors were compared, and why the others were not."""
        equal = sum(t.status == "equal" for t in self.tensors)
        compared = equal + len(self.moved)
        left = [f"{plain(t.path)}: {plain(t.reason)}" for t in self.tensors if t.status == "not compared"]
        rest = f"{len(left)} are not: {listing(left, limit=5)}" if left else "none is left out"
        return f"{compared} of {len(self.tensors)} tensors are compared, {equal} of them are equal; {rest}."

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        return {"schema": "gonio.difference/1", "coverage": self.coverage, **asdict(self)}

    def to_json(self) -> str:
        """:meth:`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    def to_csv(self) -> str:
        """One line per tensor; no cell runs as a formula in a spreadsheet."""
        return csv_of(self.tensors, FIELDS)

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` with one row per tensor.

        Raises:
            MissingExtraError: without pandas.
        """
        return frame_of(self.tensors, FIELDS)

    def to_markdown(self) -> str:
        """The table of what moved, and the coverage."""
        head = f"**{markdown_cell(self.before)} → {markdown_cell(self.after)}**"
        return "\n".join([head, "", *table_of("tensor", self.moved, COLUMNS), "", markdown_cell(self.coverage)]) + "\n"

    def to_html(self) -> str:
        """One self-contained page: no script, no network."""
        return page(f"{self.before} → {self.after}", _inner(self), whole=True)

    def _repr_html_(self) -> str:
        return page("", _inner(self), whole=False)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Differences of {len(self.tensors)} tensors>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(f"{plain(self.before)} → {plain(self.after)}", style="bold")
        yield Text("")
        if self.moved:
            yield _table(self.moved, options.max_width)
            yield Text("")
        yield Text(self.coverage, style="dim")


def _table(moved: tuple[TensorDifference, ...], width: int) -> Table:
    longest = max(12, min(max(len(plain(t.path)) for t in moved), max(16, width // 3)))
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("tensor", no_wrap=True, min_width=min(longest, 12))
    columns = columns_for(COLUMNS, width, longest)
    for column in columns:
        made.add_column(column.title, justify="right", no_wrap=True)
    for tensor in moved:
        made.add_row(Text(shorten(tensor.path, longest=longest)), *(Text(column.cell(tensor)) for column in columns))
    return made


def _inner(found: Differences) -> str:
    parts = [
        f"<h1>{text(found.before)} → {text(found.after)}</h1>\n",
        f'<p class="muted">{text(found.coverage)}</p>\n',
    ]
    if found.moved:
        head = "".join(f'<th scope="col">{text(title)}</th>' for title in ("tensor", *(c.title for c in COLUMNS)))
        parts.append(table("", "", head, [row(t.path, (c.cell(t) for c in COLUMNS)) for t in found.moved]))
        items = "".join(f"<dt>{text(c.title)}</dt><dd>{text(c.explanation)}</dd>" for c in COLUMNS)
        parts.append(f"<details><summary>What the columns are</summary><dl>{items}</dl></details>\n")
    others = [tensor for tensor in found if tensor.status == "not compared"]
    if others:
        head = '<th scope="col">Tensor</th><th scope="col">Why it is not compared</th>'
        parts.append(table("<h2>Not compared</h2>\n", "left", head, [row(t.path, (t.reason,)) for t in others]))
    return "".join(parts)
