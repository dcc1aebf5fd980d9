"""A weight's singular values against the law of random matrices: how far off, and which stand out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, log, pi, sqrt

import torch
from torch import Tensor

__all__ = ["Bulk", "bulk_of", "defect_at_random", "distance_at_random", "largest_at_random"]

TRACY_WIDOM = 3.2724  # the Tracy–Widom law of order 1 stays below in 999 of 1000 cases
GRID = 4096


@dataclass(frozen=True)
class Bulk:
    """What the singular values of some matrices of one size say beside those of random ones.

    Attributes:
        distance: of the distribution of squared singular values from Marchenko and Pastur's, in Kolmogorov's sense:
            between 0 and 1.
        outliers: singular values larger than the largest of a random matrix hardly ever is; `outlier_share`: of the
            squared norm that they hold.
        defect: root mean square of :math:`s_i^2 / \\overline{s^2} - 1`.
    """

    distance: float
    outliers: int
    outlier_share: float
    defect: float


def bulk_of(values: Tensor, rows: int, columns: int) -> Bulk | None:
    r"""The figures of all singular values of some matrices of `rows` × `columns`; None for a single row or column.

    Random means independent entries of mean 0 and of the root mean square that the matrices have together, so the
    figures do not depend on a common scale.

    References:
        [1] V. Marchenko, L. Pastur, "Distribution of eigenvalues for some sets of random matrices", Math. USSR
        Sb. 1(4), 1967.
    """
    small, large = sorted((rows, columns))
    largest = float(values.max())
    if small < 2 or not 0 < largest < inf:
        return None
    squares = (values.double().flatten().sort().values / largest).square()
    squares = squares / squares.mean()  # of mean 1, as the law's
    beyond = squares > largest_at_random(rows, columns) ** 2
    return Bulk(
        distance=_distance(squares, small / large),
        outliers=int(beyond.sum()),
        outlier_share=float(squares[beyond].sum() / squares.sum()),
        defect=float((squares - 1).square().mean().sqrt()),
    )


def largest_at_random(rows: int, columns: int) -> float:
    r"""What the largest singular value stays below in 999 of 1000 random matrices, over the root of the larger side.

    :math:`s_{\max}^2` is near :math:`\mu + \sigma\, TW_1` with :math:`\mu = (\sqrt{n - \frac12} + \sqrt{d -
    \frac12})^2` and :math:`\sigma = \sqrt\mu\,((n - \frac12)^{-1/2} + (d - \frac12)^{-1/2})^{1/3}`.

    Example:
        >>> from gonio.measuring.bulk import largest_at_random
        >>> round(largest_at_random(1000, 1000), 3)  # the edge of the law is 2
        2.02

    References:
        [1] I. Johnstone, "On the distribution of the largest eigenvalue in principal components analysis", Ann.
        Statist. 29(2), 2001, Theorem 1.1. [2] Z. Ma, "Accuracy of the Tracy–Widom limits for the extreme eigenvalues
        in white Wishart matrices", Bernoulli 18(1), 2012 (the halves, which make it hold for small sides).
    """
    a, b = sqrt(rows - 0.5), sqrt(columns - 0.5)
    mean = (a + b) ** 2
    deviation = (a + b) * (1 / a + 1 / b) ** (1 / 3)
    return sqrt((mean + TRACY_WIDOM * deviation) / max(rows, columns))


def distance_at_random(rows: int, columns: int) -> float:
    """The distance that one random matrix shows on average, :math:`(0.35 + 0.41 \\ln m) / m` for the smaller side m.

    Fitted to simulations with 2 to 256 rows and ratios of the sides from 1 to 1000; it does not depend on the ratio.
    """
    small = min(rows, columns)
    return (0.35 + 0.41 * log(small)) / small


def defect_at_random(rows: int, columns: int) -> float:
    r"""The defect of normal entries: :math:`\sqrt{(m + 1) / M}` for the smaller and the larger side."""
    small, large = sorted((rows, columns))
    return sqrt((small + 1) / large)


def _distance(squares: Tensor, ratio: float) -> float:
    """Largest difference of the distribution functions; the squares in ascending order."""
    n = len(squares)
    angle = torch.acos(((squares - 1 - ratio) / (2 * sqrt(ratio))).clamp(-1, 1))
    expected = 1 - _share_above(ratio)[(angle / pi * GRID).round().long()]
    steps = torch.arange(n + 1, dtype=torch.float64, device=squares.device) / n
    expected = expected.to(squares.device)
    return float(torch.maximum((steps[1:] - expected).max(), (expected - steps[:-1]).max()))


@lru_cache(maxsize=256)
def _share_above(ratio: float) -> Tensor:
    """The share of the law above λ = 1 + c + 2√c cos φ, for φ from 0 to π: its density in φ is smooth."""
    phi = torch.linspace(0, pi, GRID + 1, dtype=torch.float64)
    density = 2 * phi.sin().square() / (pi * (1 + ratio + 2 * sqrt(ratio) * phi.cos()).clamp_min(1e-300))
    density[-1] = 2 * (ratio == 1) / pi  # its limit there
    density = torch.where(torch.isfinite(density), density, 0.0)
    above = torch.cat([density.new_zeros(1), torch.cumulative_trapezoid(density, phi)])
    return above / above[-1]
