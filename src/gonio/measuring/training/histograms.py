"""Histograms of the norms and angles of a layer, for loggers that draw them over the steps of a training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from gonio.escaping import plain
from gonio.geometry import matrix_view
from gonio.geometry.blocks import row_norms
from gonio.measuring.figures.tensor import TensorMeasurement
from gonio.measuring.reading.entry import TensorEntry, numbers_of

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
