"""The result of `measure`: a row per tensor, findings, and figures of the whole model; printable and exportable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from gonio.escaping import markdown_cell, plain
from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.structure import MovableScale
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.findings.finding import Finding, Suppressed
from gonio.measuring.showing import terminal
from gonio.measuring.showing.columns import COLUMNS, KEPT, SIGNALS
from gonio.measuring.showing.page import render
from gonio.measuring.showing.table import Table, markdown_table, reasons

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
    signals: tuple[Signal, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    suppressed: Suppressed | None = None

    @property
    def layers(self) -> tuple[TensorMeasurement, ...]:
        """The tensors that have filters."""
        return tuple(tensor for tensor in self.tensors if tensor.status == "measured")

    @property
    def coverage(self) -> str:
        """How many tensors were measured, and why the others were not."""
        said = f"Measured: {len(self.layers)} of {len(self.tensors)} tensors."
        without = Counter(tensor.reason for tensor in self.tensors if tensor.status == "no filters")
        if without:
            kinds = ", ".join(f"{n} {_plural(reason, n)}" for reason, n in without.most_common(4))
            said += f" Checked only for NaN and infinity: {without.total()} ({kinds})."
        skipped = reasons([t for t in self.tensors if t.status == "skipped"])
        return f"{said} Skipped: {skipped or 'none'}."

    @property
    def scope(self) -> str:
        """The properties that the rules look for, and those that cannot be seen in a measurement."""
        batch = "dead units on the batch" if self.signals else "outputs only with batch="
        return (
            "Looked for: NaN and infinity; dead, weak and dominant filters; shared directions, near duplicates and "
            f"rank 1; {batch}. Not visible here: whether the model is accurate, overfits, or had the right data."
        )

    def __repr__(self) -> str:
        return f"<Measurements of {plain(self.source)}: {len(self.layers)} layers, {len(self.findings)} findings>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, entries = options.max_width, sum(tensor.entries for tensor in self.tensors)
        yield Text(f"{plain(self.source)}: {len(self.layers)} layers, {entries:,} numbers", style="bold")
        for note in self.notes:
            yield Text(plain(note), style="dim")
        yield Text("")
        yield from terminal.findings(self.findings, self.suppressed, self.scope)
        if self.layers:
            flagged = {finding.path for finding in self.findings if finding.level != "info"}
            yield terminal.tensor_table("layer", self.layers, COLUMNS, KEPT, width, flagged=flagged)
            yield Text("")
        if self.scale is not None:
            yield Text(terminal.scale_sentence(self.scale))
            yield Text("")
        for path, shares in self.mixtures.items():
            parts = (f"{what} {', '.join(f'{k} {v:.2f}' for k, v in share.items())}" for what, share in shares.items())
            yield Text(f"{plain(path)} mixes {'; '.join(parts)}")
        if self.mixtures:
            yield Text("")
        if self.signals:
            yield terminal.signal_table(self.signals, width)
            yield Text("")
        yield Text(self.coverage, style="dim")

    def _repr_html_(self) -> str:
        return self._page(whole=False)

    def to_html(self) -> str:
        """One self-contained page without scripts and network access."""
        return self._page(whole=True)

    def _page(self, *, whole: bool) -> str:
        kinds = [kind for shares in self.mixtures.values() for share in shares.values() for kind in share]
        return render(
            "measurements.html.j2",
            whole=whole,
            m=self,
            columns=COLUMNS,
            signals=SIGNALS,
            scale=self.scale and terminal.scale_sentence(self.scale),
            kinds=tuple(dict.fromkeys(kinds)),
            others=[tensor for tensor in self.tensors if tensor.status == "skipped" or tensor.notes],
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version, a non-finite number is None."""
        scale = self.scale
        made: dict[str, Any] = _finite(
            {
                "schema": SCHEMA,
                "source": self.source,
                "coverage": self.coverage,
                "notes": self.notes,
                "scale": scale and {**asdict(scale), "wasted": scale.wasted, "wasted_by_layer": scale.wasted_by_layer},
                "mixtures": self.mixtures,
                "signals": [asdict(signal) for signal in self.signals],
                "findings": [asdict(finding) for finding in self.findings],
                "suppressed": self.suppressed and asdict(self.suppressed),
                "tensors": [asdict(tensor) for tensor in self.tensors],
                "versions": self.versions,
            }
        )
        return made

    def to_markdown(self) -> str:
        """Findings, the table of the layers, and the coverage, for an issue or a README."""
        lines = [f"**{markdown_cell(self.source)}**", ""]
        for f in self.findings:
            place = markdown_cell(f.path) or "the model"
            lines.append(f"- **{f.level} {f.code}** {place}: {markdown_cell(f.found)}")
        lines += [""] if self.findings else []
        for sentence in self.suppressed.sentences if self.suppressed is not None else ():
            lines += [markdown_cell(sentence), ""]
        return "\n".join([*lines, *markdown_table("layer", self.layers, COLUMNS), "", markdown_cell(self.coverage), ""])


def _plural(reason: str, n: int) -> str:
    noun = reason.removeprefix("a ")
    return f"{noun}s" if n > 1 and noun in ("vector", "single number", "counter") else plain(noun)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
