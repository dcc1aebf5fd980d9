"""`Tracker`: the figures of `measure` during training, as scalars for a logger."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.escaping import csv_cell, plain
from gonio.measuring.figures.tensor import TensorMeasurement, measure_tensor
from gonio.measuring.reading.entry import Entry
from gonio.measuring.reading.model import entries_of_model
from gonio.measuring.showing.table import frame_from
from gonio.surgery import Where, as_selector, sites

FIGURES = (  # the columns of a CSV file, in this order
    *("frobenius", "norm_mean", "norm_std", "norm_min", "norm_max", "zero_filters", "nonfinite"),
    *("angle_mean", "angle_std", "alignment", "alignment_z", "coherence"),
    *("sigma_max", "stable_rank"),
)


class Tracker:
    r"""Norms, angles and spectra of a model's weights at an interval of its training, as scalars for any logger.

    The same figures as :func:`gonio.measure`, of every weight that has filters. Training is not affected: no random
    number, gradient, mode or buffer of the model changes, so the trained weights are bit-equal. Each measurement
    costs one :func:`gonio.measure` without a batch, whatever the batch size; `where` makes it cheaper.

    Args:
        model: wrapped or not; layers swapped later are measured too.
        to: loggers. A logger is recognised by the first method that it has of `add_scalar(tag, value, step)`
            (TensorBoard), `log_metrics(dict, step=)` (Lightning's loggers, MLflow), `log_metric(tag, value, step=)`
            and `log(dict, step=)` (W&B). Or the path of a CSV file, to which lines are appended, or a function of the
            step and the figures of each layer. Tags are `gonio/FIGURE/LAYER`.
        every: number of steps from one measurement to the next.
        where: the layers to measure; all by default.

    Attributes:
        rows: a dict with `step`, `layer` and the figures, for each measured step and layer. A figure that does not
            apply is absent: a depthwise convolution has no angles.

    Raises:
        InvalidArgumentError: if `every` is not positive, or for an object that is not a logger.
        NoMatchError: if `where` selects no layer that has filters.

    Note:
        With several processes, call it in all of them, because gathering sharded weights needs all. Only the first one
        logs and stores rows.

    Example:
        >>> model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tracker = gonio.Tracker(model, every=2)
        >>> for _ in range(4):
        ...     loss = model(torch.randn(8, 20)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     tracker.step()
        >>> [(row["step"], row["layer"]) for row in tracker.rows]
        [(2, '0'), (2, '2'), (4, '0'), (4, '2')]
        >>> tracker.rows[-1]["alignment"] == gonio.measure(model)["2"].alignment
        True
    """

    def __init__(self, model: nn.Module, to: Any = (), *, every: int = 100, where: Where = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidArgumentError("Tracker(every=) is a number of steps", repr(every), "Pass 1 or more.")
        self._model, self._every, self._selector = model, every, as_selector(where)
        if not self._entries():
            paths = [entry.path[:80] for entry in entries_of_model(model) if entry.layout is not None]
            raise NoMatchError("Tracker", str(self._selector), paths)
        loggers = to if isinstance(to, (list, tuple)) else [to]
        self._senders = [sender_of(logger) for logger in loggers] if _first() else []
        self._step = self._measured = 0
        self.rows: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<Tracker every {self._every} steps: {len(self.rows)} rows, {len(self._senders)} loggers>"

    def step(self, number: int | None = None) -> None:
        """Count one step of the optimizer, and measure at every `every`-th one.

        Args:
            number: of the step, if it is counted elsewhere. A number that was measured before is not measured again.
        """
        self._step = self._step + 1 if number is None else number
        if self._step % self._every == 0 and self._step != self._measured:
            self.measure()

    def measure(self) -> None:
        """Measure now, for example before the first step."""
        self._measured = self._step
        found = {entry.path: _figures(measure_tensor(entry)) for entry in self._entries()}
        if not _first():
            return
        self.rows += ({"step": self._step, "layer": layer, **row} for layer, row in found.items())
        for send in self._senders:
            send(self._step, found)

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            MissingExtraError: without pandas.
        """
        return frame_from(self.rows, ["step", "layer", *FIGURES])

    def _entries(self) -> list[Entry]:
        """The weights with filters of the selected layers."""
        modules = {site.path: site.module for site in sites(self._model)}
        weights = [e for e in entries_of_model(self._model) if e.layout is not None and e.load is not None]
        owners = [entry.name.rpartition(".")[0] for entry in weights]
        pairs = zip(weights, owners, strict=True)
        return [entry for entry, owner in pairs if self._selector(owner, modules.get(owner, self._model))]


def _first() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def _figures(t: TensorMeasurement) -> dict[str, float]:
    """The figures that apply; only the number of non-finite values for a weight that cannot be read."""
    quantiles = t.norm_quantiles or (None,)
    ends = {"norm_min": quantiles[0], "norm_max": quantiles[-1]}
    values = {name: ends[name] if name in ends else getattr(t, name) for name in FIGURES}
    return {name: float(value) for name, value in values.items() if value is not None}


# --- loggers ---------------------------------------------------------------------------------------------------------

Rows = Mapping[str, Mapping[str, float]]
Send = Callable[[int, Rows], None]
"""A function of the step and, for each layer, its figures by name."""


def sender_of(logger: Any) -> Send:
    """The function that sends figures to a logger: see :class:`Tracker`.

    Raises:
        InvalidArgumentError: for any other object, and for an existing CSV file with other columns.
    """
    if isinstance(logger, (str, os.PathLike)):
        return _to_csv(Path(logger))
    if not isinstance(logger, logging.Logger):  # whose log() takes a level and a text
        for name, send in _METHODS.items():
            method = getattr(logger, name, None)
            if callable(method):
                return partial(send, method)
        if callable(logger):
            return logger
    raise InvalidArgumentError(
        "a logger has add_scalar, log_metrics, log_metric or log, or is a function or the path of a CSV file",
        type(logger).__name__,
        "Pass one of them, for example a function of the step and a dict.",
    )


def _flat(rows: Rows) -> dict[str, float]:
    """One scalar per tag: `gonio/alignment/layer1.0.conv1`, so that one panel holds one figure of all layers."""
    return {f"gonio/{name}/{plain(layer)}": value for layer, row in rows.items() for name, value in row.items()}


def _add_scalar(method: Callable[..., object], step: int, rows: Rows) -> None:
    for tag, value in _flat(rows).items():
        method(tag, value, step)


def _log_metric(method: Callable[..., object], step: int, rows: Rows) -> None:
    for tag, value in _flat(rows).items():
        method(tag, value, step=step)


def _log_all(method: Callable[..., object], step: int, rows: Rows) -> None:
    method(_flat(rows), step=step)


_METHODS = {"add_scalar": _add_scalar, "log_metrics": _log_all, "log_metric": _log_metric, "log": _log_all}


def _to_csv(path: Path) -> Send:
    """Append one line per step and layer to a new file, or to an existing one with the same columns."""
    head = ["step", "layer", *FIGURES]
    if path.exists() and path.stat().st_size:
        with path.open(encoding="utf-8", newline="") as file:
            found = next(csv.reader(file))
        if found != head:
            raise InvalidArgumentError(
                f"the tracker appends to {str(path)!r}, with the columns {', '.join(head)}",
                f"a file with {', '.join(map(plain, found))}",
                "Name another file.",
            )
    else:
        path.write_text(",".join(head) + "\n", encoding="utf-8")

    def send(step: int, rows: Rows) -> None:
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for layer, row in rows.items():
                writer.writerow([csv_cell(cell) for cell in (step, layer, *(row.get(name) for name in FIGURES))])

    return send
