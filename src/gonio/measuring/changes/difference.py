"""`difference`: how far the weights of one model or file are from those of another, norms and directions apart."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, nan, prod
from typing import Any, ClassVar, TypeVar

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from torch import Tensor, nn

from gonio.escaping import json_data, markdown_cell, plain, shorten
from gonio.geometry.blocks import StoredDifference
from gonio.measuring.changes.pair import TensorDifference, figures_of, norm_of
from gonio.measuring.changes.rules import findings_of_change
from gonio.measuring.changes.sources import (
    NotCompared,
    TunedModel,
    base_entries,
    copied,
    is_rounded,
    layout_of_pair,
    tuned,
    values_of,
    with_origins,
)
from gonio.measuring.checking.rules import of_files
from gonio.measuring.engines import Engine, Progress, Spread, path_of, results
from gonio.measuring.figures.heads import ROLES, HeadChange, anatomy_of, head_changes
from gonio.measuring.findings.rules import Finding, markdown_findings, render_findings, verdict, worst_first
from gonio.measuring.journal import Journal
from gonio.measuring.reading.entry import TensorEntry, layer_path, says_tied
from gonio.measuring.reading.source import Source, contents_of, name_of, watching
from gonio.measuring.showing.page import changed_lanes, layer_map, render
from gonio.measuring.showing.table import (
    PAGE,
    TERMINAL,
    Column,
    Grouped,
    Medium,
    PagedTable,
    figures,
    markdown_table,
    reasons,
    rows_shown,
    tensor_table,
)
from gonio.messages import Message, counted, joined, local, say
from gonio.pages.tables import bare_table, number

_HEADS = 8  # that a terminal shows
_BLOCK = re.compile(r"(.*?\.)?\d+(?=\.)")  # up to the first number: `model.layers.3`


def _intruders(t: TensorDifference) -> str:
    if t.intruders is None:
        return "–"
    return str(t.intruders) if t.intruders_random is None else f"{t.intruders} · {t.intruders_random}"


def _by_chance(name: str) -> Callable[[TensorDifference], str]:
    """A figure and its value for a random change; a dash without it."""

    def text(t: TensorDifference) -> str:
        found, random = getattr(t, name), getattr(t, f"{name}_random")
        return "–" if found is None else f"{number(found)} · {number(random)}"

    return text


C = Column[TensorDifference]
COLUMNS: tuple[Column[TensorDifference], ...] = (
    C("shape", "shape", "of the tensor", 14, lambda t: "×".join(map(str, t.shape))),
    C("relative", "change", "norm of the difference over the norm before", 7),
    C("norm_ratio", "norm ratio", "median over filters of the norm after over before", 10),
    C("angle_mean", "angle", "between each filter before and after: mean", 6, figures("{:.1f}°", "angle_mean")),
    C("angle_max", "largest", "the largest of these angles", 7, figures("{:.1f}°", "angle_max")),
    C("form", "form",
      "of the change: rounded, pruned, reordered, transposed, moved, scaled, gains, rotation, rank r (low), full",
      10,
      lambda t: t.form or "–"),
    C("intruders", "intr.", "of the 10 top directions after, those unlike any before · after a random change", 6,
      _intruders),
    C("stable_rank", "s.rank", "stable rank of the difference", 6),
    C("stable_rank_random", "chance", "stable rank of a random difference", 6),
    C("rank_99", "rank 99%", "singular directions with 99 % of its squared norm", 8, lambda t: str(t.rank_99 or "–")),
    C("gram_change", "products", "change of WWᵀ, 0 after a rotation · after a random change", 12,
      _by_chance("gram_change")),
    C("overlap", "overlap", "mean cos² between the 10 top directions before and after · by chance", 12,
      _by_chance("overlap")),
    C("magnitude_direction", "m–d", "correlation over filters of the changes of norm and direction", 6),
)  # fmt: skip
GROUPED: tuple[tuple[str, str, Callable[[TensorDifference], float | None]], ...] = (
    (say("change"), "norm of the difference over the norm before", lambda t: t.relative),
    (say("norm ratio"), "median over filters of the norm after over before", lambda t: t.norm_ratio),
    (say("angle"), say("mean angle of the filters before and after, in degrees"), lambda t: t.angle_mean),
    (say("intruders"), say("of the 10 top directions after"), lambda t: t.intruders),
)
KEPT = ("relative", "form", "norm_ratio", "angle_mean", "intruders", "angle_max", "rank_99")


# --- over depth -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthChange:
    """The tensors of one block together: those whose names begin alike up to the first number.

    Attributes:
        path: of the block; the first part of the name for a tensor without a number.
        relative: norm of the difference over the norm before; None from zero tensors.
        tensors: number of tensors compared.
        intruders: of all its weights.
    """

    path: str
    relative: float | None
    tensors: int
    intruders: int


def block_of(name: str) -> str:
    """The block of a tensor.

    Example:
        >>> from gonio.measuring.changes.difference import block_of
        >>> block_of("model.layers.3.mlp.up.weight"), block_of("head.weight")
        ('model.layers.3', 'head')
    """
    found = _BLOCK.match(name)
    return found[0] if found else name.split(".")[0]


# --- the whole ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Differences(PagedTable[TensorDifference]):
    """Every tensor of either source: a mapping from paths to rows that prints as a table.

    Attributes:
        before, after: the names of the sources.
        tensors: one :class:`TensorDifference` each, in the order of `before`, then those only in `after`.
        findings: what is unusual in the change, with advice.
        notes: how the sources were read, and their names matched.
        heads: how far each attention head moved, if one of the sources is a model, in the order of execution.

    Example:
        >>> found = gonio.measuring.difference({"a.weight": torch.eye(4)}, {"a.weight": 2 * torch.eye(4)})
        >>> found, found["a"].norm_ratio
        (<Differences of 1 tensor>, 2.0)
    """

    ROW: ClassVar = TensorDifference

    before: str
    after: str
    tensors: tuple[TensorDifference, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    heads: tuple[HeadChange, ...] = ()

    @property
    def moved(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ and could be compared."""
        return tuple(tensor for tensor in self.tensors if tensor.status == "compared")

    @property
    def largest(self) -> tuple[TensorDifference, ...]:
        """:attr:`moved`, the largest relative change first; those that were zero before have none and come last."""
        return tuple(sorted(self.moved, key=lambda t: -(t.relative if t.relative is not None else -1.0)))

    @property
    def intruders(self) -> tuple[TensorDifference, ...]:
        """The weights with intruder dimensions, most first."""
        return tuple(sorted((t for t in self.moved if t.intruders), key=lambda t: -(t.intruders or 0)))

    @property
    def depth(self) -> tuple[DepthChange, ...]:
        """The relative change of each block of layers, in the order of the base; without tensors of unknown norms."""
        blocks: dict[str, list[TensorDifference]] = {}
        for tensor in self.tensors:
            if tensor.norm is not None and tensor.change_norm is not None:
                blocks.setdefault(block_of(tensor.name), []).append(tensor)
        made = []
        for path, members in blocks.items():
            norm, moved = (hypot(*(getattr(t, name) for t in members)) for name in ("norm", "change_norm"))
            relative = moved / norm if norm else None
            made.append(DepthChange(path, relative, len(members), sum(t.intruders or 0 for t in members)))
        return tuple(made)

    @property
    def verdict(self) -> Message:
        """How much changed, and what was found, as a sentence."""
        if not self.moved:
            equal = sum(tensor.status == "equal" for tensor in self.tensors)
            if not equal:
                return say("Nothing could be compared.")
            every, left = counted(len(self.tensors), "tensor"), len(self.tensors) - equal
            if left and not self.findings:
                told = {"equal": equal, "every": every, "left": left}
                return say("{equal:,} of {every} are equal, {left:,} not compared.", **told)
            if self.findings:
                alike = say("{equal:,} of {every} are equal.", equal=equal, every=every)
                return joined([alike, verdict(self.findings, [t.path for t in self.tensors], "tensor")], " ")
            return say("Nothing changed: {tensors} equal.", tensors=counted(equal, "tensor"))
        known = [tensor.relative for tensor in self.moved if tensor.relative is not None]
        low, high = (number(end, 2) for end in (min(known), max(known))) if known else ("", "")
        of = {"n": len(self.moved), "tensors": counted(len(self.tensors), "tensor")}
        if all(tensor.rounded for tensor in self.moved):
            changed = say("{n:,} of {tensors} are rounded to another dtype, and nothing else changed.", **of)
        elif not known:
            changed = say("{n:,} of {tensors} changed.", **of)
        elif low == high:
            changed = say("{n:,} of {tensors} changed, by {low} of the norm.", low=low, **of)
        else:
            changed = say("{n:,} of {tensors} changed, by {low} to {high} of the norm.", low=low, high=high, **of)
        return joined([changed, verdict(self.findings, [t.path for t in self.moved], "changed tensor")], " ")

    @property
    def coverage(self) -> Message:
        """How many tensors were compared, and why the others were not."""
        equal = sum(t.status == "equal" for t in self.tensors)
        left = reasons([t for t in self.tensors if t.status == "not compared"])
        return say(
            "Compared: {n} of {tensors}, {equal} of them equal. Not compared: {left}.",
            n=equal + len(self.moved),
            tensors=counted(len(self.tensors), "tensor"),
            equal=equal,
            left=left,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version."""
        head = {"schema": "gonio.difference/1", "verdict": self.verdict, "coverage": self.coverage}
        return {**head, **json_data(self), "depth": json_data(self.depth)}

    def to_markdown(self) -> str:
        """The table of the tensors that changed, and the coverage."""
        head = f"**{markdown_cell(self.before)} → {markdown_cell(self.after)}**"
        said, table = markdown_findings(self.findings), markdown_table("tensor", self.largest, COLUMNS)
        return "\n".join([head, "", self.verdict, "", *said, *table, "", markdown_cell(self.coverage), ""])

    def _shown(self, on: Medium) -> tuple[Grouped | None, Sequence[TensorDifference], str]:
        """The tensors that have a row, largest change first, with groups and a sentence where these are not all."""
        return rows_shown(
            self.largest,
            on,
            first={finding.path for finding in self.findings},
            score=lambda t: -1.0 if t.relative is None else t.relative,
            figures=GROUPED,
            tensors=self.moved,
            noun="tensors",
            by="the largest changes",
        )

    def _page(self, *, whole: bool, made: tuple[tuple[str, str], ...]) -> str:
        rows, (groups, shown, said) = self.moved, self._shown(PAGE)
        mapped = layer_map(rows, self.findings, changed_lanes(rows), shown, every=self.tensors)
        parts = {"rows": shown, "groups": groups, "said": said, "most": PAGE.most}
        return render("differences.html.j2", whole=whole, d=self, columns=COLUMNS, made=made, map=mapped, **parts)

    def __repr__(self) -> str:
        return f"<Differences of {counted(len(self.tensors), 'tensor')}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(f"{plain(self.before)} → {plain(self.after)}", style="bold")
        yield Text(local(self.verdict))
        for note in self.notes:
            yield Text(plain(local(note)), style="dim")
        yield Text("")
        yield from render_findings(self.findings)
        if self.moved:
            flagged = {finding.path for finding in self.findings if finding.level != "info"}
            groups, shown, said = self._shown(TERMINAL)
            if groups is not None:
                yield from groups.rich(said)
            yield tensor_table("tensor", shown, COLUMNS, KEPT, options.max_width, flagged=flagged)
            yield Text("")
        if any(head.relative for head in self.heads):
            yield _head_table(self.heads)
            yield Text("")
        yield Text(local(self.coverage), style="dim")


def _head_table(heads: Sequence[HeadChange]) -> RichTable:
    """The heads that moved most."""
    changed = sorted((head for head in heads if head.relative), key=lambda head: -(head.relative or 0.0))
    said = say("{n} of {heads} changed, most", n=len(changed), heads=counted(len(heads), "head"))
    table = bare_table(said, ["head", "change", *ROLES])
    for head in changed[:_HEADS]:
        figures_ = (head.relative, *(getattr(head, role) for role in ROLES))
        cells = ("–" if each is None else number(each) for each in figures_)
        table.add_row(Text(shorten(head.path or local("the model"))), str(head.head), *cells)
    return table


def difference(
    before: Source,
    after: Source,
    *,
    engine: Engine = "local",
    jobs: int = 1,
    journal: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> Differences:
    r"""Compare two models, state dicts or files tensor by tensor, norms and directions apart.

    For each filter the ratio of the norms and the angle between :math:`w` before and after; for each tensor the
    relative change :math:`\lVert W' - W \rVert / \lVert W \rVert`. A change of direction can change the function
    of a layer that a normalisation follows; a change of norm there only changes the step size. The rank of
    :math:`W' - W` is the number of directions of the change: at most r after fine-tuning with adapters of rank r.
    Intruder dimensions are top singular directions after that are like none before.

    Args:
        before, after: anything that :func:`gonio.measure` takes. Tensors are matched by name, across prefixes such as
            `model.`. `after` may hold adapters of peft (LoRA, DoRA, OFT) for `before`, without peft installed.
        engine, jobs, journal: of two files, as in :func:`gonio.measure`.
        progress: called after each tensor with the number done and the number in all.

    Returns:
        :class:`Differences`; a tensor of only one source, or of different shapes, is listed with the reason.

    Raises:
        InvalidArgumentError: as :func:`gonio.measure`, and if the two have no tensor of the same name.
        UnreadableFileError: as :func:`gonio.measure`.

    Example:
        >>> layer = nn.Linear(8, 4)
        >>> before = {name: value.clone() for name, value in layer.state_dict().items()}
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(3.0)
        >>> moved = gonio.measuring.difference(before, layer)["weight"]
        >>> round(moved.norm_ratio, 4), round(moved.angle_max, 3), round(moved.relative, 4)
        (3.0, 0.0, 2.0)
        >>> with torch.no_grad():
        ...     _ = layer.weight.copy_(before["weight"]).add_(torch.ones(4, 1) @ torch.ones(1, 8))
        >>> gonio.measuring.difference(before, layer)["weight"].rank_99
        1

    References:
        [1] E. J. Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, arXiv 2106.09685, §4.1. [2] R.
        Shuttleworth et al., "LoRA vs full fine-tuning: an illusion of equivalence", 2024, arXiv 2410.21228.
    """
    spread = Spread(engine, jobs, journal)
    spread.check((before, after))
    watched = watching((before, after))
    with spread.journal_of(TensorDifference, (before, after)) as kept:
        held, (model,), rows = compared(before, [after], _row_alone, spread, progress, kept)
    found, heads = assembled(name_of(before), held, model, rows), _changed_heads(before, after)
    own = (note for note in contents_of(before).notes if note not in found.notes)
    read = [say("{source}: {note}", source=name_of(before), note=note) for note in own]
    findings = worst_first([*of_files(watched.changed()), *found.findings])
    return replace(found, heads=heads, findings=findings, notes=(*read, *found.notes))


def _changed_heads(before: Source, after: Source) -> tuple[HeadChange, ...]:
    """How far each attention head moved, where one of the sources is a model that shows them."""
    model = before if isinstance(before, nn.Module) else after
    found = anatomy_of(model) if isinstance(model, nn.Module) else None
    if found is None or not found.attention:
        return ()
    held = base_entries(before)
    made = tuned(held, after).entries
    own = {name if model is before else entry.name: name for name, entry in made.items()}

    def pair(name: str) -> tuple[Tensor, Tensor] | None:
        entries = [of.get(own.get(name, "")) for of in (held, made)]
        values = [entry if entry is None else values_of(entry, "") for entry in entries]
        a, b = values
        return (a, b.to(a)) if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape else None

    return head_changes(
        found, lambda name: (two := pair(name)) and two[0], lambda name: (two := pair(name)) and two[1] - two[0]
    )


def _row_alone(rows: Rows, deltas: Deltas) -> TensorDifference:
    return rows[0]


def assembled(
    before: str, held: Mapping[str, TensorEntry], model: TunedModel, rows: Sequence[TensorDifference]
) -> Differences:
    """The differences of one model with their findings."""
    rows = with_origins(rows, held, model)
    notes = (*model.notes, *copied(rows))
    return Differences(before, model.name, tuple(rows), findings_of_change(rows, model.adapters), notes)


Rows = list[TensorDifference]
Deltas = list[StoredDifference | None]
Reduced = TypeVar("Reduced")
Reduce = Callable[[Rows, Deltas], Reduced]


def compared(
    base: Source,
    after: Sequence[Source],
    reduce: Reduce[Reduced],
    spread: Spread,
    progress: Progress,
    journal: Journal[Reduced] | None = None,
) -> tuple[dict[str, TensorEntry], list[TunedModel], list[Reduced]]:
    """The base, the models, and for each name what `reduce` makes of the row and of the change of every model.

    One tensor of the base is read once and then released. Workers call `reduce`, so that only its results are sent.
    """
    held, models, names = _opened(base, after)
    reduced = results(
        lambda left: (([n], [reduce(*_compared(names[n], held.get(names[n]), models))]) for n in left),
        _reduced,
        lambda: (reduce, path_of(base), [*map(path_of, after)]),
        [prod(held[name].shape or ()) if name in held else 0 for name in names],
        spread,
        progress,
        journal,
    )
    return held, models, reduced


def _reduced(reduce: Reduce[Reduced], base: Source, after: Sequence[Source], numbers: Sequence[int]) -> list[Reduced]:
    """The results for some names, on a worker."""
    held, models, names = _opened(base, after)
    return [reduce(*_compared(name, held.get(name), models)) for name in (names[number] for number in numbers)]


def _opened(base: Source, after: Sequence[Source]) -> tuple[dict[str, TensorEntry], list[TunedModel], list[str]]:
    """The tensors of the base and of the models, and the names of both: those of the base first."""
    held = base_entries(base)
    models = [tuned(held, one) for one in after]
    return held, models, [*held, *dict.fromkeys(name for model in models for name in model.entries if name not in held)]


@torch.no_grad()
def _compared(name: str, held: TensorEntry | None, models: Sequence[TunedModel]) -> tuple[Rows, Deltas]:
    rows: Rows = []
    changes: Deltas = []
    before: Tensor | NotCompared | None = None
    for model in models:
        entry, change = model.entries.get(name), None
        if entry is None and held is not None and model.rest_equal:
            row = _row(name, "equal", shape=held.shape or ())
        elif entry is None or held is None:
            only = NotCompared(f"only {'after' if held is None else 'before'}")
            row = _not_compared(
                name, NotCompared(entry.reason, "adapter") if entry is not None and entry.fault else only
            )
        elif (twin := model.entries.get(held.tied)) is not None and twin.load is entry.load:  # one tensor on both sides
            row = _not_compared(name, NotCompared(says_tied(held.tied)))
        else:
            before = values_of(held, "before") if before is None else before
            row, change = _row_of(name, held, entry, before)
        rows.append(row)
        changes.append(change)
    return rows, changes


def _row(name: str, status: str, **values: Any) -> TensorDifference:
    return TensorDifference(name=name, path=layer_path(name), status=status, **values)


def _not_compared(name: str, why: NotCompared, **values: Any) -> TensorDifference:
    return _row(name, "not compared", reason=why.reason, cause=why.cause, **values)


def _row_of(
    name: str, held: TensorEntry, entry: TensorEntry, before: Tensor | NotCompared
) -> tuple[TensorDifference, StoredDifference | None]:
    if isinstance(before, NotCompared):
        return _not_compared(name, before), None
    after = values_of(entry, "after")
    if isinstance(after, NotCompared):
        unknown = {"change_norm": nan} if entry.role == "unknown" else {}
        return _not_compared(name, after, **unknown), None
    if before.shape != after.shape:
        shapes = f"shape {tuple(before.shape)} before, {tuple(after.shape)} after"
        return _not_compared(name, NotCompared(shapes)), None
    dtype = torch.promote_types(before.dtype, after.dtype)
    rounded = is_rounded(before, after.to(before.device))
    before, after = before.to(dtype), after.to(before.device, dtype)
    if torch.equal(before, after):
        norm = norm_of(before)
        return _row(name, "equal", shape=tuple(before.shape), relative=0.0, norm=norm, change_norm=0.0), None
    values = figures_of(before, after, layout_of_pair(held, entry), name)
    return replace(_row(name, "compared"), **values, rounded=rounded), StoredDifference(before, after)
