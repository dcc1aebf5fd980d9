"""The figures of `measure` while a model trains, as scalars."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.measuring.entry import Entry
from gonio.measuring.export import frame_from
from gonio.measuring.from_model import entries_of_model
from gonio.measuring.loggers import sender_of
from gonio.measuring.tensor import TensorMeasurement, measure_tensor
from gonio.surgery import Where, as_selector, sites

__all__ = ["FIGURES", "Tracker"]

FIGURES = (
    *("frobenius", "norm_mean", "norm_std", "norm_min", "norm_max", "zero_filters", "nonfinite"),
    *("angle_mean", "angle_std", "alignment", "alignment_z", "coherence"),
    *("sigma_max", "stable_rank"),
)


class Tracker:
    r"""Norms, angles and spectra of a model's weights at an interval of its training, as scalars for any logger.

    The same figures as :func:`gonio.measure`, of every weight that has filters. The training is as it would be
    without: no random number, gradient, mode or buffer of the model is touched, so the weights are equal to the
    last bit. It costs one :func:`gonio.measure` without a batch, every `every` steps, whatever the batch is; `where`
    makes it cheaper.

    Args:
        model: wrapped or not; layers that are swapped later are measured as they are then.
        to: loggers; each is known by the first method that it has of `add_scalar(tag, value, step)` (TensorBoard),
            `log_metrics(dict, step=)` (Lightning's loggers, MLflow), `log_metric(tag, value, step=)` and
            `log(dict, step=)` (W&B). Or the path of a CSV file, which is appended to, or a function of the step and
            the figures of each layer. Tags are `gonio/FIGURE/LAYER`.
        every: steps from one measurement to the next.
        where: which layers; all by default.

    Attributes:
        rows: everything that was measured: a dict with `step`, `layer` and the figures, for each step and layer.
            A figure that does not exist is absent: a depthwise convolution has no angles.

    Raises:
        InvalidArgumentError: if `every` is not positive, or for an object that is no logger.
        NoMatchError: if `where` selects no layer that has filters.

    Note:
        With several processes, call it in all of them: sharded weights are gathered by all. Only the first one logs
        and keeps rows.

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
            paths = [entry.path for entry in entries_of_model(model) if entry.layout is not None]
            raise NoMatchError("Tracker", str(self._selector), paths)
        loggers = to if isinstance(to, (list, tuple)) else [to]
        self._senders = [sender_of(logger, FIGURES) for logger in loggers] if _first() else []
        self._step = self._measured = 0
        self.rows: list[dict[str, Any]] = []

    def step(self, number: int | None = None) -> None:
        """Count one step of the optimizer, and measure if it is due.

        Args:
            number: of the step, where something else counts; a number that was measured already is not again.
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
        modules = {site.path: site.module for site in sites(self._model)}
        return [entry for entry in entries_of_model(self._model) if self._takes(entry, modules)]

    def _takes(self, entry: Entry, modules: dict[str, nn.Module]) -> bool:
        """Whether it is a weight that has filters, of a selected layer."""
        if entry.layout is None or entry.load is None:
            return False
        owner = entry.name.rpartition(".")[0]
        return self._selector(owner, modules.get(owner, self._model))


def _first() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def _figures(t: TensorMeasurement) -> dict[str, float]:
    """The figures that exist; a weight that cannot be read has the count of non-finite values alone."""
    quantiles = t.norm_quantiles or (None,)
    ends = {"norm_min": quantiles[0], "norm_max": quantiles[-1]}
    values = {name: ends[name] if name in ends else getattr(t, name) for name in FIGURES}
    return {name: float(value) for name, value in values.items() if value is not None}
