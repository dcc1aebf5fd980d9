"""Loggers of a tracker: what takes its figures and histograms, recognised by the methods that it has."""

from __future__ import annotations

import csv
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gonio.errors import InvalidArgumentError
from gonio.escaping import csv_cell, plain
from gonio.geometry import matrix_view
from gonio.geometry.blocks import row_norms
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.reading.entry import TensorEntry, numbers_of

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


# --- histograms of the norms and angles of a layer --------------------------------------------------------------------

BINS = 64  # of norms, from the smallest to the largest; angles have one per degree


@dataclass(frozen=True)
class Histogram:
    """Counts between edges, and the moments of what was counted.

    Attributes:
        least, most: of the values; for angles, the edges of the outermost bins that are not empty.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    mean: float
    std: float
    least: float
    most: float


Histograms = Mapping[str, Histogram]
SendHistograms = Callable[[int, Histograms], None]
"""A function of the step and the histograms by tag, `gonio.norms/LAYER` or `gonio.angles/LAYER`."""


@torch.no_grad()
def histograms_of(entry: TensorEntry, measured: TensorMeasurement) -> dict[str, Histogram]:
    """Those of one weight: finite norms of its filters, and angles in degrees where it has pairs of filters."""
    found: dict[str, Histogram] = {}
    raw = entry.read() if measured.filters else None
    weight = None if raw is None else numbers_of(raw).tensor
    if weight is not None and entry.layout is not None:
        norms = torch.cat([row_norms(matrix) for matrix in matrix_view(weight, entry.layout)]).cpu().double().numpy()
        norms = norms[np.isfinite(norms)]
        if len(norms):
            counts, edges = np.histogram(norms, BINS)
            bins = tuple(counts.tolist()), tuple(edges.tolist())
            moments = (float(each) for each in (norms.mean(), norms.std(), norms.min(), norms.max()))
            found[f"gonio.norms/{plain(entry.path)}"] = Histogram(*bins, *moments)
    pairs = measured.angle_histogram
    if pairs and any(pairs) and measured.angle_mean is not None and measured.angle_std is not None:
        held = [degree for degree, count in enumerate(pairs) if count]
        degrees = tuple(map(float, range(len(pairs) + 1)))
        found[f"gonio.angles/{plain(entry.path)}"] = Histogram(
            pairs, degrees, measured.angle_mean, measured.angle_std, degrees[held[0]], degrees[held[-1] + 1]
        )
    return found


def histogram_sender_of(logger: Any) -> SendHistograms | None:
    """The function that sends histograms to a logger; None for one that takes scalars alone."""
    method = getattr(logger, "add_histogram_raw", None)
    if callable(method):
        return partial(_to_tensorboard, method)
    wandb = sys.modules.get("wandb")
    if wandb is not None and (logger is wandb or isinstance(logger, wandb.Run)):
        return partial(_to_wandb, logger.log, wandb.Histogram)
    return None


def _to_tensorboard(method: Callable[..., object], step: int, found: Histograms) -> None:
    for tag, one in found.items():
        number = sum(one.counts)
        method(
            tag,
            min=one.least,
            max=one.most,
            num=number,
            sum=number * one.mean,
            sum_squares=number * (one.std**2 + one.mean**2),
            bucket_limits=list(one.edges[1:]),
            bucket_counts=list(one.counts),
            global_step=step,
        )


def _to_wandb(method: Callable[..., object], kind: Callable[..., object], step: int, found: Histograms) -> None:
    method({tag: kind(np_histogram=(one.counts, one.edges)) for tag, one in found.items()}, step=step)
