"""Float64 references for `gonio.init`: connections counted one by one, moments by sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from references.geometry import circular_conv_matrix

Array = NDArray[np.float64]


def counted_fans(shape: Sequence[int], *, transposed: bool, groups: int, stride: Sequence[int]) -> tuple[float, float]:
    """Mean connections per output and per input, from the incidence matrix on a torus that fits.

    A transposed convolution is the transpose of the convolution with the same stored weight.
    """
    per_group = (shape[0] // groups, *shape[1:])
    size = [s * (k + 2) for s, k in zip(stride, shape[2:], strict=True)]
    incidence = circular_conv_matrix(np.ones(per_group), size, stride, [1] * len(size))
    per_row, per_column = incidence.sum(1).mean(), incidence.sum(0).mean()
    return (per_column, per_row) if transposed else (per_row, per_column)


def sampled_gain(function: Callable[[Array], Array], kind: str, samples: int = 1_000_000) -> float:
    value = function(np.random.default_rng(0).standard_normal(samples))
    return float(1 / (np.sqrt((value**2).mean()) if kind == "rms" else value.std()))
