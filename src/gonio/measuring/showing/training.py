"""The page "how this training turned", also while it trains: the rotation of each layer, beside its prediction."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import degrees
from pathlib import Path
from typing import Any

from gonio.errors import InvalidArgumentError
from gonio.escaping import write_text
from gonio.measuring.showing.page import More, layer_map, render
from gonio.measuring.showing.table import Column, figures
from gonio.measuring.training.advice import LayerRotation, advice
from gonio.messages import say
from gonio.pages.charts import Lane
from gonio.pages.picture import spark
from gonio.pages.pictures import course, over_steps
from gonio.pages.tables import number


@dataclass(frozen=True)
class TrainingRow:
    """One layer on the page: its figures, and its curve over time on a scale that all layers share."""

    name: str
    path: str
    rotation: float
    predicted: float | None
    ratio: float | None
    reason: str
    curve: Any


COLUMNS: tuple[Column[TrainingRow], ...] = (
    Column("rotation", "rotation", "degrees per step, root mean square over the later half of the measured steps",
           9),
    Column("predicted", "predicted", "degrees per step in the long run before a normalisation layer, at this weight "
           "decay and learning rate", 9),
    Column("ratio", "ratio", "rotation over the prediction", 6, figures("{:.2f}", "ratio")),
)  # fmt: skip
MORE: tuple[More, ...] = (
    (say("over time"), say("on one logarithmic scale for all layers; thin: the prediction"), "spark",
     lambda row: row.curve),
    (say("why"), say("fits, or the reason why rotation and prediction differ"), "text", lambda row: row.reason),
)  # fmt: skip


@dataclass(frozen=True)
class TrackedAttention:
    """One attention on the page: its figures at the last step, and two curves over time."""

    path: str
    largest_logit: float
    entropy_share: float | None
    one_token_heads: int
    logits: Any
    entropies: Any


ATTENTION: tuple[Column[TrackedAttention], ...] = (
    Column("largest_logit", "largest logit", "of all heads in the forwards of the last recorded step", 13),
    Column("entropy_share", "entropy share", "entropy of the probabilities over its maximum, of the head with the "
           "smallest: 1 for equal probabilities, 0 for one token", 11),
    Column("one_token_heads", "on one token", "heads that attend to one token", 12,
           lambda row: str(row.one_token_heads)),
)  # fmt: skip
CURVES: tuple[More, ...] = (
    (say("logits over time"), say("the largest logit, on one scale for all"), "spark", lambda row: row.logits),
    (say("entropy over time"), say("its share of the maximum, of the head with the smallest"), "spark",
     lambda row: row.entropies),
)  # fmt: skip


def _attention(rows: Sequence[Mapping[str, Any]]) -> list[TrackedAttention]:
    """One for each attention in a tracker's rows."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "largest_logit" in row:
            found.setdefault(row["layer"], []).append(row)
    high = max((row["largest_logit"] for mine in found.values() for row in mine), default=1.0)
    made = []
    for path, mine in found.items():
        last = mine[-1]
        logits = over_steps([row["largest_logit"] for row in mine], max(high, 1.0), title=say("largest logit"))
        shares = [row.get("entropy_share") for row in mine]
        entropies = over_steps(shares, 1.0, title=say("entropy over its maximum"))
        single = int(last.get("one_token_heads", 0))
        made.append(TrackedAttention(path, last["largest_logit"], shares[-1], single, spark(logits), spark(entropies)))
    return made


def training_page(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[LayerRotation],
    found: Sequence[str] = (),
    *,
    whole: bool,
    refresh: int = 0,
) -> str:
    """The page as HTML: what was found in weights, advice, and a table of layers in the order of the model.

    Curves share one logarithmic scale over all layers, so that layers can be compared. A browser loads the page anew
    every `refresh` seconds, unless that is 0.
    """
    everything = [value for layer in layers for value in (*layer.rotations, *layer.predictions) if value]
    low, high = (min(everything), max(everything)) if everything else (1.0, 10.0)
    steps = [row["step"] for row in rows if "rotation" in row]
    shown = [_row(layer, low, max(high, 2 * low)) for layer in layers]
    reasons = {layer.reason for layer in layers}
    shared = reasons.pop() if len(reasons) == 1 and len(layers) > 1 else None  # said once, not in every row
    return render(
        "training.html.j2",
        whole=whole,
        refresh=refresh,
        layers=shown,
        columns=COLUMNS,
        more=MORE if shared is None else MORE[:1],
        shared=shared,
        map=layer_map(shown, (), _lanes(layers)),
        found=found,
        attention=(_attention(rows), ATTENTION, CURVES),
        advice=advice(layers, rows),
        first=min(steps, default=0),
        last=max(steps, default=0),
        fits=sum(layer.cause == "fits" for layer in layers),
        predicted=sum(layer.predicted is not None for layer in layers),
    )


def _row(layer: LayerRotation, low: float, high: float) -> TrainingRow:
    turned, predicted = number(degrees(layer.rotation)), number(_degrees(layer.predicted))
    title = say("rotation {turned}° per step, predicted {predicted}", turned=turned, predicted=predicted)
    curve, path = spark(course(layer.rotations, layer.predictions, low, high, title=title)), layer.layer
    return TrainingRow(path, path, degrees(layer.rotation), _degrees(layer.predicted), layer.ratio, layer.reason, curve)


def _degrees(angle: float | None) -> float | None:
    return None if angle is None else degrees(angle)


def _lanes(layers: Sequence[LayerRotation]) -> list[Lane]:
    turned = [_degrees(layer.rotation or None) for layer in layers]
    return [
        Lane("rotation", "degrees per step; dashed: predicted", turned,
             chance=[_degrees(layer.predicted) for layer in layers]),
        Lane("ratio", "rotation over the prediction; dashed: 1", [layer.ratio for layer in layers],
             chance=[None if layer.ratio is None else 1.0 for layer in layers]),
    ]  # fmt: skip


# --- the page while the network trains --------------------------------------------------------------------------------

SECONDS = 10
"""The least time between two versions of a page, and after which a browser loads it anew."""
_SHARE = 0.02  # of the time, which writing the page may take


class LivePage:
    """Writes a page from time to time; the file is replaced whole, so that a browser never sees half of it.

    Example:
        >>> import tempfile
        >>> from gonio.measuring.showing.training import LivePage
        >>> page = LivePage(Path(tempfile.mkdtemp()) / "run.html")
        >>> page.renew(lambda: "first"), page.renew(lambda: "too early")
        (True, False)
        >>> page.path.read_text()
        'first'
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock, self._due = path, clock, float("-inf")

    def renew(self, make: Callable[[], str]) -> bool:
        """Write the page that `make` returns, unless it is too early; whether it was written."""
        began = self._clock()
        if began < self._due:
            return False
        try:
            self.write(make())
        finally:  # also if the disk is full
            ended = self._clock()
            self._due = ended + max(SECONDS, (ended - began) / _SHARE)
        return True

    def write(self, text: str) -> None:
        """Write the page now."""
        write_text(text, self.path)


def checked_page(page: str | os.PathLike[str], optimizer: object) -> Path:
    """The path of a page of a :class:`gonio.Tracker`.

    Raises:
        InvalidArgumentError: if it does not end in .html, its folder does not exist, or there is no optimizer.
    """
    path = Path(page)
    if path.suffix != ".html":
        raise InvalidArgumentError("Tracker(page=) is the path of a page", repr(str(path)), "Let it end in .html.")
    if not path.parent.is_dir():
        raise InvalidArgumentError("Tracker(page=) is written into a folder", f"no folder {path.parent}", "Create it.")
    if optimizer is None:
        raise InvalidArgumentError("Tracker(page=) shows steps with optimizer=", "none", "Pass the optimizer.")
    return path.absolute()  # a program may change its folder while it trains
