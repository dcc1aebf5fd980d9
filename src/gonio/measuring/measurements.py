"""What was measured on a whole model, and how to read it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType

from gonio.errors import UnknownNameError, listing
from gonio.escaping import plain
from gonio.measuring.as_text import as_text
from gonio.measuring.export import csv_of, frame_of, markdown_of
from gonio.measuring.findings import Finding
from gonio.measuring.page import page_of
from gonio.measuring.screen import screen
from gonio.measuring.signals import Signal
from gonio.measuring.structure import MovableScale
from gonio.measuring.suppressed import Suppressed
from gonio.measuring.tensor import TensorMeasurement

__all__ = ["Measurements"]

SCHEMA = "gonio.measurements/1"


@dataclass(frozen=True, repr=False)
class Measurements:
    """Every tensor of a model with its figures or the reason why it has none; a mapping by path.

    Printing it gives a table as wide as the terminal; in a notebook it is a page.

    Attributes:
        source: what was measured.
        tensors: one :class:`TensorMeasurement` per parameter and buffer, in the model's order.
        findings: what does not look like working weights, worst first.
        scale: how much squared norm could be saved by moving scale between layers: the wasted L2. None for a
            source without a graph, or where no scale can move.
        mixtures: of each switchable norm, the shares of the statistics in its mean and in its variance.
        signals: the layers' outputs on a batch, if one was given, in the order in which they ran.
        notes: how the source was read.
        suppressed: the findings that a :class:`Suppression` left out; None where none was applied.

    Example:
        >>> m = gonio.measure(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        >>> len(m), m["0"].filters, m["0"].dim
        (4, 32, 64)
        >>> m.coverage.split("; ")[0]
        '2 of 4 tensors have filters and are measured'
    """

    source: str
    tensors: tuple[TensorMeasurement, ...]
    findings: tuple[Finding, ...] = ()
    scale: MovableScale | None = None
    mixtures: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    signals: tuple[Signal, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    suppressed: Suppressed | None = None

    def __getitem__(self, path: str) -> TensorMeasurement:
        """The tensor of this path; `conv1` and `conv1.weight` are the same.

        Raises:
            UnknownNameError: with the nearest paths.
        """
        for tensor in self.tensors:
            if path in (tensor.path, tensor.name):
                return tensor
        raise UnknownNameError("tensor", path, [tensor.path for tensor in self.tensors])

    def __iter__(self) -> Iterator[TensorMeasurement]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, path: object) -> bool:
        return any(path in (tensor.path, tensor.name) for tensor in self.tensors)

    @property
    def layers(self) -> tuple[TensorMeasurement, ...]:
        """The tensors that have filters."""
        return tuple(tensor for tensor in self.tensors if tensor.status == "measured")

    @property
    def coverage(self) -> str:
        """How many tensors were measured, and why the others were not."""
        states = Counter(tensor.status for tensor in self.tensors)
        without = Counter(tensor.reason for tensor in self.tensors if tensor.status == "no filters")
        kinds = ", ".join(f"{n} {_plural(reason, n)}" for reason, n in without.most_common(4))
        skipped = [f"{plain(t.path)}: {plain(t.reason)}" for t in self.tensors if t.status == "skipped"]
        said = f"{states['measured']} of {len(self.tensors)} tensors have filters and are measured"
        if without:
            said += f"; {states['no filters']} have none ({kinds}) and are checked for non-finite values"
        return f"{said}; {f'{len(skipped)} skipped: {listing(skipped, limit=5)}' if skipped else 'none is skipped'}."

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Measurements of {plain(self.source)}: {len(self.layers)} layers, {len(self.findings)} findings>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from screen(self, options.max_width)

    def _repr_html_(self) -> str:
        return page_of(self, whole=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data; `schema` names its version, a non-finite number is None."""
        made: dict[str, Any] = _finite(
            {
                "schema": SCHEMA,
                "source": self.source,
                "coverage": self.coverage,
                "notes": self.notes,
                "scale": self.scale and _scale(self.scale),
                "mixtures": self.mixtures,
                "signals": [asdict(signal) for signal in self.signals],
                "findings": [asdict(finding) for finding in self.findings],
                "suppressed": self.suppressed and asdict(self.suppressed),
                "tensors": [asdict(tensor) for tensor in self.tensors],
                "versions": self.versions,
            }
        )
        return made

    def to_json(self) -> str:
        """:meth:`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    def to_csv(self) -> str:
        """One line per tensor; no cell runs as a formula in a spreadsheet."""
        return csv_of(self.tensors)

    def to_frame(self) -> Any:
        """A `pandas.DataFrame` with one row per tensor and the columns of :meth:`to_csv`.

        Raises:
            MissingExtraError: without pandas.
        """
        return frame_of(self.tensors)

    def to_markdown(self) -> str:
        """The table of the layers, for an issue or a README."""
        return markdown_of(self)

    def to_html(self) -> str:
        """One self-contained page: no script, no network."""
        return page_of(self, whole=True)


def _plural(reason: str, n: int) -> str:
    noun = reason.removeprefix("a ")
    return f"{noun}s" if n > 1 and noun in ("vector", "single number", "counter") else plain(noun)


def _scale(scale: MovableScale) -> dict[str, float]:
    return {**asdict(scale), "wasted": scale.wasted, "wasted_by_layer": scale.wasted_by_layer}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
