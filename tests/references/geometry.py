"""Float64 references for `gonio.geometry`, written from the formulas, entry by entry, in numpy and mpmath."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gamma, pi, sqrt

import mpmath
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def filter_rows(weight: Array, *, transposed: bool = False, groups: int = 1) -> list[list[Array]]:
    """For each group its flattened filters, by walking over output channels."""
    if not transposed:
        per_group = weight.shape[0] // groups
        return [[weight[g * per_group + o].ravel() for o in range(per_group)] for g in range(groups)]
    inputs = weight.shape[0] // groups
    return [[weight[g * inputs : (g + 1) * inputs, o].ravel() for o in range(weight.shape[1])] for g in range(groups)]


def cosine(a: Array, b: Array) -> float:
    norms = sqrt(float(a @ a)) * sqrt(float(b @ b))
    return float(a @ b) / norms if norms else 0.0


def cosines(matrix: Array) -> Array:
    return np.array([[cosine(a, b) for b in matrix] for a in matrix])


def exact_angle(a: Sequence[float], b: Sequence[float]) -> float:
    """acos of the cosine with 60 digits."""
    with mpmath.workdps(60):
        x, y = [mpmath.mpf(float(v)) for v in a], [mpmath.mpf(float(v)) for v in b]
        norm = mpmath.sqrt(mpmath.fdot(x, x) * mpmath.fdot(y, y))
        ratio = mpmath.fdot(x, y) / norm
        return float(mpmath.acos(min(mpmath.mpf(1), max(mpmath.mpf(-1), ratio))))


def coherence(matrix: Array) -> float:
    n = len(matrix)
    return max(abs(cosine(matrix[i], matrix[j])) for i in range(n) for j in range(n) if i != j)


def alignment(matrix: Array) -> float:
    n, d = matrix.shape
    total = sum(cosine(matrix[i], matrix[j]) ** 2 for i in range(n) for j in range(n) if i != j)
    return d * total / (n * (n - 1))


def angle_density(theta: float, d: int) -> float:
    return gamma(d / 2) / (sqrt(pi) * gamma((d - 1) / 2)) * np.sin(theta) ** (d - 2)


def circular_conv_matrix(weight: Array, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Array:
    """Dense matrix of an ungrouped convolution on a torus: y[o, p] = Σ w[o, i, t] x[i, s·p + d·t]."""
    out, in_, *kernel = weight.shape
    grid = [n // s for n, s in zip(size, stride, strict=True)]
    matrix = np.zeros((out, *grid, in_, *size))
    for p, t in product(product(*map(range, grid)), product(*map(range, kernel))):
        source = tuple((s * a + d * b) % n for s, a, d, b, n in zip(stride, p, dilation, t, size, strict=True))
        for o, i in product(range(out), range(in_)):
            matrix[(o, *p, i, *source)] += weight[(o, i, *t)]
    return matrix.reshape(out * int(np.prod(grid)), -1)


def top_singular_value(matrix: Array) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False)[0])


def effective_rank(matrix: Array) -> float:
    s = np.linalg.svd(matrix, compute_uv=False)
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def least_scale(norms_squared: Sequence[float]) -> float:
    """Minimum of Σ γ_l² n_l over Πγ = 1, by brute force over two layers or Newton steps on the Lagrangian."""
    log_n = np.log(np.asarray(norms_squared))
    log_gamma = np.zeros_like(log_n)
    for _ in range(200):  # pairwise balancing converges to the common norm
        for i in range(len(log_n) - 1):
            gap = (log_n[i] + 2 * log_gamma[i] - log_n[i + 1] - 2 * log_gamma[i + 1]) / 4
            log_gamma[i] -= gap
            log_gamma[i + 1] += gap
    return float(np.exp(log_n + 2 * log_gamma).sum())


def quantized(row: Sequence[float], bits: int, largest: float) -> list[float]:
    """Each entry as the nearest multiple of the step 2·largest/(2^b − 1) that b bits with a sign can count."""
    step = 2 * largest / (2**bits - 1)
    if step == 0:
        return [0.0 for _ in row]
    counts = [min(max(round(value / step), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1) for value in row]
    return [step * count for count in counts]


def quantized_from_least_to_largest(row: Sequence[float], bits: int) -> list[float]:
    """Each entry as a multiple of the step (largest − least)/(2^b − 1), where 0 is at most the least and counts."""
    least, largest = min(*row, 0.0), max(*row, 0.0)
    step = (largest - least) / (2**bits - 1)
    if step == 0:
        return [0.0 for _ in row]
    below = -round(least / step)  # multiples below 0
    return [step * (min(max(round(value / step) + below, 0), 2**bits - 1) - below) for value in row]


def quantization_error(matrix: Array, bits: int, per: str | int) -> float:
    """Relative error, by walking over what shares a scale."""
    rows = [matrix.ravel()] if per == "tensor" else list(matrix)
    size = max(len(row) for row in rows) if isinstance(per, str) else per
    parts = [row[start : start + size] for row in rows for start in range(0, len(row), size)]
    lost = [(a - b) ** 2 for x in parts for a, b in zip(quantized(x, bits, abs(x).max()), x, strict=True)]
    total = float((matrix**2).sum())
    return sqrt(sum(lost) / total) if total else 0.0
