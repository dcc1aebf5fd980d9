"""The result of `measure`: a row per tensor, findings, and figures of the whole model; printable and exportable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from gonio.escaping import display_width, json_data, markdown_cell, plain, shorten
from gonio.measuring.figures.heads import HeadMeasurement
from gonio.measuring.figures.moments import StateMeasurement
from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.structure import MovableScale, PairScale
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.figures.usual import usual_of
from gonio.measuring.findings.rules import Finding, Suppressed, first_of, markdown_findings, render_findings, verdict
from gonio.measuring.reading.entry import FACTOR, FEW_DIMENSIONS, LOW_RANK, UNKNOWN
from gonio.measuring.showing import heads
from gonio.measuring.showing.columns import COLUMNS, DROPPED, GROUPED, KEPT, SIGNALS, columns_of
from gonio.measuring.showing.page import SPECTRUM_COLUMNS, angle_columns, lanes_beside, layer_map, render, side_by_side
from gonio.measuring.showing.table import (
    PAGE,
    TERMINAL,
    Grouped,
    Medium,
    Table,
    fitting,
    markdown_table,
    reasons,
    rows_shown,
    tensor_table,
)
from gonio.measuring.showing.usual import beside_trained, kinds_of
from gonio.messages import Message, counted, joined, local, say
from gonio.pages import made_by
from gonio.pages.tables import bare_table, number
from gonio.plots import depth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BESIDE = ("norm", "angle", "alignment", "coherence", "sigma", "stable_rank")  # columns of several models side by side
SCHEMA = "gonio.measurements/1"


@dataclass(frozen=True, repr=False)
class Measurements(Table[TensorMeasurement]):
    """Every tensor of a model with its figures or the reason why it has none: a mapping from paths to rows.

    Printing it gives a table as wide as the terminal; a notebook shows a page.

    Attributes:
        source: the name of the model or file.
        tensors: one :class:`TensorMeasurement` per parameter and buffer, in the model's order.
        findings: unusual properties, worst first.
        scale: the squared norm that moving scale between layers would save: the wasted L2. None for a
            source without a graph, or where no scale can move.
        mixtures: of each switchable norm, the shares of the statistics in its mean and in its variance.
        heads: of the attention blocks of a model, in the order of execution.
        optimizer: of a checkpoint with the state of an optimizer, one row per parameter that has one.
        signals: the layers' outputs on a batch, if one was given, in the order in which they ran.
        notes: how the source was read.
        suppressed: the findings that a :class:`Suppression` left out; None where none was applied.

    Example:
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        >>> len(m), m["0"].filters, m["0"].dim
        (4, 32, 64)
        >>> m.coverage
        'Measured: 2 of 4 tensors. Checked only for NaN and infinity: 2 (2 vectors). Skipped: none.'
    """

    ROW: ClassVar = TensorMeasurement

    source: str
    tensors: tuple[TensorMeasurement, ...]
    findings: tuple[Finding, ...] = ()
    scale: MovableScale | None = None
    mixtures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    heads: tuple[HeadMeasurement, ...] = ()
    signals: tuple[Signal, ...] = ()
    optimizer: tuple[StateMeasurement, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    suppressed: Suppressed | None = None

    @property
    def layers(self) -> tuple[TensorMeasurement, ...]:
        """The tensors that have filters."""
        return tuple(tensor for tensor in self.tensors if tensor.status == "measured")

    @property
    def size(self) -> Message:
        """How many layers, matrices of adapters, and numbers there are; products of factors hold none of their own.

        Example:
            >>> gonio.measure(nn.Linear(4, 3)).size
            '1 layer, 15 numbers'
        """
        kinds = Counter(layer.kind for layer in self.layers)
        plainly = len(self.layers) - kinds[FACTOR] - kinds[LOW_RANK]
        parts = [counted(plainly, "layer")] if plainly or not self.layers else []
        parts += [say("{n:,} factors of adapters", n=kinds[FACTOR])] if kinds[FACTOR] else []
        parts += [say("{n:,} products of theirs", n=kinds[LOW_RANK])] if kinds[LOW_RANK] else []
        return joined([*parts, counted(sum(t.entries for t in self.tensors if t.kind != LOW_RANK), "number")])

    @property
    def verdict(self) -> Message:
        """What was found, and where, as a sentence."""
        if self.layers or self.findings:
            tensors = [tensor.path for tensor in self.tensors]
            return verdict(self.findings, [layer.path for layer in self.layers], self._noun, tensors=tensors)
        if any(tensor.status == "skipped" for tensor in self.tensors):
            return say("Nothing was measured: the weights are of kinds that are not read, as the last lines say.")
        if not any(tensor.reason == UNKNOWN for tensor in self.tensors):
            return say(
                "Nothing was measured: no tensor is known to be a stack of filters, for the reasons in the last lines."
            )
        return say(
            "Nothing was measured: no tensor is known to be a stack of filters. Call weights NAME.weight as torch "
            "does, or pass the model with its checkpoint."
        )

    @property
    def _noun(self) -> str:
        """What a row is: a layer, or a weight where factors and products of adapters have rows too."""
        return "weight" if any(layer.kind in (FACTOR, LOW_RANK) for layer in self.layers) else "layer"

    @property
    def headline(self) -> Message:
        """The verdict of a page: it names the layers, and the first finding."""
        return joined([self.verdict, *([first_of(self.findings)] if self.findings else [])], " ")

    @property
    def coverage(self) -> Message:
        """How many tensors were measured, and why the others were not."""
        said = [say("Measured: {n:,} of {tensors}.", n=len(self.layers), tensors=counted(len(self.tensors), "tensor"))]
        without = Counter(tensor.reason for tensor in self.tensors if tensor.status == "no filters")
        if without:
            shown = without.most_common(4)
            kinds, more = joined([_plural(*each) for each in shown]), without.total() - sum(n for _, n in shown)
            kinds = say("{shown} and {more} more", shown=kinds, more=more) if more else kinds
            said.append(say("Checked only for NaN and infinity: {n} ({kinds}).", n=without.total(), kinds=kinds))
        skipped = reasons([t for t in self.tensors if t.status == "skipped"])
        return joined([*said, say("Skipped: {tensors}.", tensors=skipped)], " ")

    @property
    def scope(self) -> Message:
        """The properties that the rules look for, and those that cannot be seen in a measurement."""
        if not self.layers:
            return say("Looked for: NaN and infinity alone.")
        return say(
            "Looked for: NaN and infinity; dead, weak and dominant filters; shared directions, near duplicates and "
            "rank 1; {batch}. Not visible here: whether the model is accurate, overfits, or was trained on the right "
            "data.",
            batch=self._of_batch,
        )

    @property
    def _of_batch(self) -> Message:
        if not self.signals:
            return say("outputs only with batch=")
        attended = any(head.largest_logit is not None for head in self.heads)
        return say("dead units and large logits on the batch") if attended else say("dead units on the batch")

    def __repr__(self) -> str:
        findings = counted(len(self.findings), "finding")
        return f"<Measurements of {plain(self.source)}: {counted(len(self.layers), self._noun)}, {findings}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        yield Text(f"{plain(self.source)}: {local(self.size)}", style="bold")
        yield Text(local(self.verdict))
        for note in self.notes:
            yield Text(plain(local(note)), style="dim")
        yield Text("")
        none = [] if self.findings else [Text(local(self.scope), style="dim")]
        quiet = self.suppressed.sentences if self.suppressed is not None else ()
        yield from render_findings(
            self.findings, [*none, *(Text(plain(local(s), longest=len(s)), style="dim") for s in quiet)]
        )
        if self.layers:
            flagged = {finding.path for finding in self.findings if finding.level != "info"}
            groups, shown, said = self._shown(TERMINAL)
            if groups is not None:
                yield from groups.rich(said)
            columns = columns_of(shown)
            yield tensor_table("layer", shown, columns, KEPT, width, flagged=flagged)
            wide = fitting(shown, columns, KEPT, width)
            if out := [column.title for column in columns if column not in wide]:
                said = say("not in {width} columns, but in exports and pages: {names}", width=width, names=joined(out))
                yield Text(local(said), style="dim")
            yield Text(local(beside_trained(self.layers)), style="dim")
            yield Text("")
        if self.scale is not None:
            yield Text(local(_sentence(self.scale)))
            yield Text("")
        if self.heads:
            yield from heads.rendered(self.heads)
            yield Text("")
        for path, shares in self.mixtures.items():
            parts = (f"{what} {', '.join(f'{k} {v:.2f}' for k, v in share.items())}" for what, share in shares.items())
            yield Text(local(say("{path} mixes {parts}", path=plain(path), parts="; ".join(parts))))
        if self.mixtures:
            yield Text("")
        if self.signals:
            yield _signal_table(self.signals, width)
            yield Text("")
        yield Text(local(self.coverage), style="dim")

    def _shown(self, on: Medium) -> tuple[Grouped | None, Sequence[TensorMeasurement], str]:
        """The layers that have a row of their own, with groups and a sentence where these are not all."""
        return rows_shown(
            self.layers,
            on,
            first={finding.path for finding in self.findings},
            score=lambda t: abs(t.alignment_z or 0.0),
            figures=GROUPED,
            noun="layers",
            by="the largest |z|",
        )

    def plot(self, figure: str = "alignment", ax: Axes | None = None) -> Figure:
        """One figure of all layers along the depth of the model, see :func:`gonio.plots.depth`."""
        return depth(self.layers, figure, ax=ax)

    def _repr_html_(self) -> str:
        return self._page(whole=False)

    def to_html(self, *, beside: Sequence[Measurements] = (), command: str = "", date: str = "") -> str:
        """One self-contained page that loads nothing; its script sorts, filters and opens rows.

        Args:
            beside: measurements of other models, whose layers of the same paths are shown beside these.
            command, date: shown on the page, so that the same measurement can be made again.
        """
        return self._page(whole=True, beside=beside, command=command, date=date)

    def _page(self, *, whole: bool, beside: Sequence[Measurements] = (), command: str = "", date: str = "") -> str:
        lanes = lanes_beside(self.layers, [other.layers for other in beside])
        compared = [column for column in COLUMNS if column.name in BESIDE]
        groups, shown, said = self._shown(PAGE)
        columns = columns_of(self.layers)
        kinds = [kind for shares in self.mixtures.values() for share in shares.values() for kind in share]
        return render(
            "measurements.html.j2",
            whole=whole,
            m=self,
            map=layer_map(self.layers, self.findings, lanes, shown, every=self.tensors),
            layers=shown,
            groups=groups,
            said=said,
            beside=side_by_side((self, *beside), compared) if beside else None,
            made=made_by(self.versions, command=command, date=date),
            angles=([c for c in columns if not c.spectral], angle_columns(shown)),
            spectra=([c for c in columns if c.spectral], SPECTRUM_COLUMNS),
            usual=kinds_of(shown),
            beside_trained=beside_trained(self.layers),
            signals=SIGNALS,
            attention=(heads.rows_of(self.heads), heads.shown_columns(self.heads)),
            scale=self.scale and _sentence(self.scale),
            kinds=tuple(dict.fromkeys(kinds)),
            others=[tensor for tensor in self.tensors if tensor.status == "skipped" or tensor.notes],
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version, a non-finite number is None."""
        scale = self.scale
        content = {
            "schema": SCHEMA,
            "source": self.source,
            "verdict": self.verdict,
            "coverage": self.coverage,
            "notes": self.notes,
            "scale": scale
            and {
                **asdict(scale),
                "wasted": scale.wasted,
                "wasted_by_layer": scale.wasted_by_layer,
                "pairs": [{**asdict(pair), "wasted": pair.wasted} for pair in scale.pairs],
            },
            **{
                name: getattr(self, name)
                for name in ("mixtures", "heads", "signals", "optimizer", "findings", "suppressed", "tensors")
            },
            "usual": [one.exported(t.name) for t in self.layers if (one := usual_of(t)) is not None],
            "versions": self.versions,
        }
        return {key: json_data(value) for key, value in content.items()}

    def to_markdown(self) -> str:
        """Findings, the table of the layers, and the coverage, for an issue or a README."""
        lines = [f"**{markdown_cell(self.source)}**", "", self.verdict, "", *markdown_findings(self.findings)]
        for sentence in self.suppressed.sentences if self.suppressed is not None else ():
            lines += [markdown_cell(sentence), ""]
        lines += markdown_table("layer", self.layers, columns_of(self.layers))
        return "\n".join([*lines, "", markdown_cell(self.coverage), ""])


_COMMON = (*FEW_DIMENSIONS, say("a counter"))  # reasons that have a plural


def _plural(reason: str, n: int) -> Message:
    noun = reason.removeprefix("a ")
    said = f"{noun}s" if n > 1 and reason in _COMMON else plain(noun)
    return Message(f"{n} {said}", "{n} × {reason}", {"n": n, "reason": Message(said, reason)})


def _sentence(scale: MovableScale) -> Message:
    """The wasted L2 in one sentence, and of attention and MLP blocks in one more."""
    said = say(
        "The same function can be computed with {wasted:.1%} less squared weight norm ({least} instead of {sum}, "
        "{layers}; {by_layer:.1%} less with one scale per layer instead of one per neuron): gonio.balance_(model) does "
        "it.",
        wasted=scale.wasted,
        least=number(scale.least),
        sum=number(scale.sum),
        layers=counted(scale.layers, "layer"),
        by_layer=scale.wasted_by_layer,
    )
    kinds: dict[str, list[PairScale]] = {}
    for pair in scale.pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    parts = []
    for kind, pairs in kinds.items():
        share = 1 - sum(p.least for p in pairs) / (sum(p.sum for p in pairs) or 1.0)
        worst = max(pairs, key=lambda pair: pair.wasted)
        if len(pairs) > 1:
            told = {"path": plain(worst.path) or say("the model"), "most": worst.wasted}
            parts.append(say("{kind} {share:.1%} (most in {path}, {most:.1%})", kind=kind, share=share, **told))
        else:
            parts.append(say("{kind} {share:.1%}", kind=kind, share=share))
    if not parts:
        return said
    return joined([said, say("By pairs of weights in blocks: {parts}.", parts=joined(parts, "; "))], " ")


def _signal_table(signals: Sequence[Signal], width: int) -> RichTable:
    """One row per layer's output in as many columns as fit; those without any figure are dropped first."""
    paths = [shorten(signal.path or signal.kind) for signal in signals]
    cells = {c.name: [c.cell(signal) for signal in signals] for c in SIGNALS}
    widths = {c.name: max(map(display_width, (local(c.title), *cells[c.name]))) + 2 for c in SIGNALS}
    empty = [name for name, column in cells.items() if set(column) == {"–"}]
    left = width - max(map(display_width, (local("output of"), *paths)))
    for name in (*empty, *DROPPED):
        if sum(widths.values()) > left:
            widths.pop(name, None)
    table = bare_table("output of", [column.title for column in SIGNALS if column.name in widths])
    for i, path in enumerate(paths):
        table.add_row(Text(path), *(cells[name][i] for name in widths))
    return table
