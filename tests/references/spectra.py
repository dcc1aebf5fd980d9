"""The law of random matrices, from its density by quadrature, in float64 SciPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import integrate

__all__ = ["defect", "distance_from_marchenko_pastur", "marchenko_pastur_below"]


def marchenko_pastur_below(value: float, ratio: float) -> float:
    """Share of eigenvalues of WWᵀ/M below `value`, for entries of variance 1 and `ratio` = m/M ≤ 1."""
    low, high = (1 - np.sqrt(ratio)) ** 2, (1 + np.sqrt(ratio)) ** 2

    def in_root(s: float) -> float:  # λ = s², so that the density is bounded at λ = 0 too
        x = s * s
        return np.sqrt(max(0.0, (high - x) * (x - low))) / (np.pi * ratio * s)

    end = min(max(value, low), high)
    return float(integrate.quad(in_root, np.sqrt(low) + 1e-12, np.sqrt(end), limit=400)[0])


def distance_from_marchenko_pastur(values: NDArray[np.float64], rows: int, columns: int) -> float:
    """Kolmogorov's distance, over both sides of every step."""
    squares = np.sort(values**2)
    squares = squares / squares.mean()
    ratio = min(rows, columns) / max(rows, columns)
    expected = np.array([marchenko_pastur_below(float(x), ratio) for x in squares])
    n = len(squares)
    return float(max((np.arange(1, n + 1) / n - expected).max(), (expected - np.arange(n) / n).max()))


def defect(matrix: NDArray[np.float64]) -> float:
    """From the Gram matrix of the smaller side, scaled to a mean diagonal of 1."""
    gram = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    gram = gram / np.trace(gram) * len(gram)
    return float(np.linalg.norm(gram - np.eye(len(gram))) / np.sqrt(len(gram)))
