"""Loggers of a tracker: what takes its figures, recognised by the methods that it has."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gonio.errors import InvalidArgumentError
from gonio.escaping import csv_cell, plain

Rows = Mapping[str, Mapping[str, float]]
Send = Callable[[int, Rows], None]  # of the step and, for each layer, its figures by name


def sender_of(logger: Any, figures: Sequence[str]) -> Send:
    """The function that sends figures to a logger: see :class:`gonio.Tracker`.

    Raises:
        InvalidArgumentError: for any other object, and for an existing CSV file with other columns.
    """
    if isinstance(logger, (str, os.PathLike)):
        return _to_csv(_csv_path(Path(logger)).absolute(), figures)
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
    """One scalar per tag: `gonio.alignment/layer1.0.conv1`; TensorBoard and W&B make a section of each figure."""
    return {f"gonio.{name}/{plain(layer)}": value for layer, row in rows.items() for name, value in row.items()}


def _add_scalar(method: Callable[..., object], step: int, rows: Rows) -> None:
    for tag, value in _flat(rows).items():
        method(tag, value, step)


def _log_metric(method: Callable[..., object], step: int, rows: Rows) -> None:
    for tag, value in _flat(rows).items():
        method(tag, value, step=step)


def _log_all(method: Callable[..., object], step: int, rows: Rows) -> None:
    method(_flat(rows), step=step)


_METHODS = {"add_scalar": _add_scalar, "log_metrics": _log_all, "log_metric": _log_metric, "log": _log_all}


def _csv_path(path: Path) -> Path:
    """The path, if it is one of a CSV file in a folder that exists."""
    takes = "Tracker(to=) takes the path of a CSV file, a logger or a function"
    if path.suffix != ".csv":
        do = "For TensorBoard pass torch.utils.tensorboard.SummaryWriter(), for W&B the run; a path ends in .csv."
        raise InvalidArgumentError(takes, repr(str(path)), do)
    if not path.parent.is_dir():
        raise InvalidArgumentError(takes, f"no folder {str(path.parent)!r} for {path.name!r}", "Create it.")
    return path


def _to_csv(path: Path, figures: Sequence[str]) -> Send:
    """Append one line per step and layer to a new file, or to an existing one with the same columns."""
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

    def send(step: int, rows: Rows) -> None:
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for layer, row in rows.items():
                writer.writerow([csv_cell(cell) for cell in (step, layer, *(row.get(name) for name in figures))])

    return send
