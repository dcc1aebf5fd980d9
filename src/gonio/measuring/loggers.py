"""Where scalars go during training: loggers known by the methods they have, and CSV files."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gonio.errors import InvalidArgumentError
from gonio.escaping import csv_cell, plain

__all__ = ["Send", "sender_of"]

Send = Callable[[int, Mapping[str, Mapping[str, float]]], None]
"""Takes the step and, for each layer, its figures by name."""


def sender_of(logger: Any, figures: Sequence[str]) -> Send:
    """What hands scalars to a logger: the first of `add_scalar`, `log_metrics`, `log_metric` and `log` that it has.

    Args:
        logger: a TensorBoard writer, a W&B run or the module, the MLflow module, a Lightning logger, the path of a CSV
            file, or a function of the step and the figures of each layer.
        figures: the columns of a CSV file.

    Raises:
        InvalidArgumentError: for anything else, and for a CSV file that exists with other columns.
    """
    if isinstance(logger, (str, os.PathLike)):
        return _to_csv(Path(logger), figures)
    if not isinstance(logger, logging.Logger):  # whose log() takes a level and a text
        for method, sender in _METHODS.items():
            if callable(getattr(logger, method, None)):
                return sender(logger)
        if callable(logger):
            send: Send = logger
            return send
    raise InvalidArgumentError(
        "a logger has add_scalar, log_metrics, log_metric or log, or is a function or the path of a CSV file",
        type(logger).__name__,
        "Pass one of them, for example a function of the step and a dict.",
    )


def _flat(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One scalar per tag: `gonio/alignment/layer1.0.conv1`, so that one panel holds one figure of all layers."""
    return {f"gonio/{name}/{plain(layer)}": value for layer, row in rows.items() for name, value in row.items()}


def _add_scalar(logger: Any) -> Send:
    def send(step: int, rows: Mapping[str, Mapping[str, float]]) -> None:
        for tag, value in _flat(rows).items():
            logger.add_scalar(tag, value, step)

    return send


def _log_metrics(logger: Any) -> Send:
    return lambda step, rows: logger.log_metrics(_flat(rows), step=step)


def _log_metric(logger: Any) -> Send:
    def send(step: int, rows: Mapping[str, Mapping[str, float]]) -> None:
        for tag, value in _flat(rows).items():
            logger.log_metric(tag, value, step=step)

    return send


def _log(logger: Any) -> Send:
    return lambda step, rows: logger.log(_flat(rows), step=step)


_METHODS: dict[str, Callable[[Any], Send]] = {
    "add_scalar": _add_scalar,
    "log_metrics": _log_metrics,
    "log_metric": _log_metric,
    "log": _log,
}


def _to_csv(path: Path, figures: Sequence[str]) -> Send:
    """Appends one line per step and layer; a file that exists goes on, if it has these columns."""
    head = ["step", "layer", *figures]
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

    def send(step: int, rows: Mapping[str, Mapping[str, float]]) -> None:
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for layer, row in rows.items():
                writer.writerow([csv_cell(cell) for cell in (step, layer, *(row.get(name) for name in figures))])

    return send
