"""Figures of `gonio.measure` and laws of chance from their formulas, in float64 NumPy and SciPy, and cases of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import integrate, special
from torch import Tensor

from references.geometry import filter_rows

Matrix = NDArray[np.float64]


def groups_of(weight: NDArray, kind: str, groups: int = 1) -> list[Matrix]:
    """One (filters, length) matrix per group, written from how torch documents each layer's weight."""
    w = np.asarray(weight, dtype=np.float64)
    return [np.stack(rows) for rows in filter_rows(w, transposed=kind == "transposed", groups=groups)]


def closest(matrices: list[Matrix]) -> tuple[int, int]:
    """The two filters with the largest |cos|, counted over all groups."""
    n = len(matrices[0])
    best = (-1.0, (0, 0))
    for g, matrix in enumerate(matrices):
        for i, j in combinations(range(n), 2):
            size = sqrt(matrix[i] @ matrix[i]) * sqrt(matrix[j] @ matrix[j])
            if size > 0:
                best = max(best, (abs(float(matrix[i] @ matrix[j])) / size, (g * n + i, g * n + j)))
    return best[1]


def pairs(matrices: list[Matrix]) -> Iterator[float]:
    for matrix in matrices:
        kept = [row / sqrt(row @ row) for row in matrix if row @ row > 0]
        for a, b in combinations(kept, 2):
            yield float(np.clip(a @ b, -1, 1))


def figures(matrices: list[Matrix]) -> dict[str, float | int | None]:
    """The attributes of a TensorMeasurement that follow from the matrices."""
    rows = [row for matrix in matrices for row in matrix]
    n, d = matrices[0].shape
    norms = np.array([sqrt(row @ row) for row in rows])
    singular = np.concatenate([np.linalg.svd(matrix, compute_uv=False) for matrix in matrices])
    rms = sqrt(sum(float(row @ row) for row in rows) / (len(rows) * d))
    edge = rms * (sqrt(n) + sqrt(d))
    share = singular / singular.sum()
    share = share[share > 0]
    found: dict[str, float | int | None] = {
        "rms": rms,
        "frobenius": sqrt(float((norms**2).sum())),
        "norm_mean": float(norms.mean()),
        "norm_std": float(norms.std()),
        "zero_filters": int((norms == 0).sum()),
        "sigma_max": float(singular.max()),
        "sigma_random": edge,
        "stable_rank": float((singular**2).sum() / singular.max() ** 2),
        "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
    }
    cosines = np.array(list(pairs(matrices)))
    if not len(cosines):
        return found | {"pairs": 0, "alignment": None}
    degrees = np.degrees(np.arccos(cosines))
    alignment = d * float((cosines**2).mean())
    deviation = d * sqrt(2 * (d - 1) / (d**2 * (d + 2)) / len(cosines)) if d > 1 else 0.0
    return found | {
        "pairs": len(cosines),
        "angle_mean": float(degrees.mean()),
        "angle_std": float(degrees.std()),
        "alignment": alignment,
        "alignment_z": (alignment - 1) / deviation if deviation else 0.0,
        "coherence": float(np.abs(cosines).max()),
        "welch_bound": sqrt((n - d) / (d * (n - 1))) if n > d else 0.0,
        "near_duplicates": int((np.abs(cosines) >= 0.95).sum()),
    }


def angle_std_by_chance(dim: int) -> float:
    def moment(power: int) -> float:
        value, _ = integrate.quad(lambda t: (t - np.pi / 2) ** power * np.sin(t) ** (dim - 2), 0, np.pi)
        return value

    return float(np.degrees(sqrt(moment(2) / moment(0))))


def coherence_by_chance(count: int, dim: int) -> float:
    """Median of the largest of `count` independent |cos|, by the incomplete beta function."""
    one = 0.5 ** (1 / count)  # P(a single one stays below)
    return sqrt(1 - special.betaincinv((dim - 1) / 2, 0.5, 1 - one))


def marchenko_pastur_below(value: float, ratio: float) -> float:
    """Share of eigenvalues of WWᵀ/M below `value`, for entries of variance 1 and `ratio` = m/M ≤ 1."""
    low, high = (1 - np.sqrt(ratio)) ** 2, (1 + np.sqrt(ratio)) ** 2

    def in_root(s: float) -> float:  # λ = s², so that the density is bounded at λ = 0 too
        x = s * s
        return np.sqrt(max(0.0, (high - x) * (x - low))) / (np.pi * ratio * s)

    end = min(max(value, low), high)
    return float(integrate.quad(in_root, np.sqrt(low) + 1e-12, np.sqrt(end), limit=400)[0])


def distance_from_marchenko_pastur(values: Matrix, rows: int, columns: int) -> float:
    """Kolmogorov's distance, over both sides of every step."""
    squares = np.sort(values**2)
    squares = squares / squares.mean()
    ratio = min(rows, columns) / max(rows, columns)
    expected = np.array([marchenko_pastur_below(float(x), ratio) for x in squares])
    n = len(squares)
    return float(max((np.arange(1, n + 1) / n - expected).max(), (expected - np.arange(n) / n).max()))


def defect(matrix: Matrix) -> float:
    """From the Gram matrix of the smaller side, scaled to a mean diagonal of 1."""
    gram = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    gram = gram / np.trace(gram) * len(gram)
    return float(np.linalg.norm(gram - np.eye(len(gram))) / np.sqrt(len(gram)))


# --- the rules on weights -------------------------------------------------------------------------


def weight(n: int = 64, d: int = 100, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def with_(change: Callable[[Tensor], object]) -> Tensor:
    made = weight()
    change(made)
    return made


def variances(*values: float) -> dict[str, Tensor]:
    return {"bn.running_var": torch.tensor(values), "bn.running_mean": -torch.ones(2)}


# code → (a weight or state dict it must find, a weight beside it on which it must stay silent)
CASES: dict[str, tuple[Tensor | dict[str, Tensor], Tensor | dict[str, Tensor]]] = {
    "G001": (with_(lambda w: w[3].__setitem__(4, float("nan"))), weight()),
    "G101": (torch.zeros(8, 9), weight()),
    "G102": (with_(lambda w: w[5].zero_()), with_(lambda w: w[5].mul_(0.1))),
    "G103": (with_(lambda w: w[5].mul_(1e-4)), with_(lambda w: w[5].mul_(0.01))),
    "G104": (with_(lambda w: w[5].mul_(20)), with_(lambda w: w[5].mul_(5))),
    "G105": (variances(1.0, -1e-9), variances(1.0, 0.0)),
    "G107": (variances(0.0, 0.0), variances(1.0, 0.0)),
    "G201": (weight() + 2, weight() + 0.2),
    "G202": (with_(lambda w: w[5].copy_(-2 * w[6] + 0.1 * w[7])), with_(lambda w: w[5].add_(w[6]))),
    "G203": (with_(lambda w: w[5].copy_(-2 * w[6])), with_(lambda w: w[5].copy_(w[6] + 1e-2 * w[7]))),
    "G301": (weight() + 3, weight() + 0.05),
}
