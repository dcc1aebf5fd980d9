"""Laws of random directions and random matrices, against which measurements are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import acos, exp, expm1, inf, lgamma, log, pi, sqrt
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import Array, as_real

TRACY_WIDOM = 3.2724  # 0.999 quantile of the Tracy–Widom law of order 1
LAW_POINTS = 4096  # of the Marchenko–Pastur distribution function
Number = TypeVar("Number", float, Tensor)


def random_angle_density(theta: Array, dim: int) -> Tensor:
    r"""Density of the angle between two random directions in `dim` dimensions.

    .. math:: p(\theta) = \frac{\Gamma(d/2)}{\sqrt\pi\,\Gamma((d-1)/2)} \sin^{d-2}\theta

    Uniform for :math:`d = 2`, of width :math:`1/\sqrt d` around :math:`\pi/2` in high dimensions. `theta` is in
    radians; outside :math:`[0, \pi]` the density is 0.

    Raises: InvalidArgumentError if `dim` is below 2 (in one dimension the angle is 0 or π).

    Example:
        >>> gonio.geometry.random_angle_density(torch.tensor([0.0, torch.pi / 2]), dim=3)
        tensor([0.0000, 0.5000])

    References: [1] T. T. Cai, J. Fan, T. Jiang, "Distributions of angles in random packing on spheres", JMLR 14 (2013),
        Eq. (1). https://arxiv.org/abs/1306.0256
    """
    if dim < 2:
        raise InvalidArgumentError(
            "random_angle_density() needs dim >= 2", f"dim={dim}", "In one dimension angles are 0 or π."
        )
    theta = as_real(theta)
    inside = (theta >= 0) & (theta <= pi)
    sine = theta.sin().clamp(min=0)
    return sine.pow(dim - 2) * exp(_log_density_at_right_angle(dim)) * inside  # has a derivative where the sine is 0


def _log_density_at_right_angle(dim: int) -> float:
    return lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * log(pi)


@lru_cache(maxsize=4096)
def random_angle_std(dim: int) -> float:
    r"""Standard deviation in degrees of the angle between two random directions, about :math:`57.3/\sqrt{d}`.

    Example:
        >>> from gonio.geometry.chance import random_angle_std
        >>> round(random_angle_std(2), 2), round(random_angle_std(576), 2)
        (51.96, 2.39)
    """
    if dim < 2:
        return 90.0
    theta = (torch.arange(20_000, dtype=torch.float64, device="cpu") + 0.5) * (pi / 20_000)
    weight = random_angle_density(theta, dim)
    weight = weight / weight.sum()
    return float(torch.rad2deg((weight * (theta - pi / 2).square()).sum().sqrt()))


def alignment_variance(pairs: Number, dim: int) -> Number:
    """Square of :func:`alignment_deviation`, over this many unordered pairs."""
    return 2 * (dim - 1) / ((dim + 2) * pairs)


def alignment_deviation(n: int, d: int) -> float:
    r"""Standard deviation of :func:`alignment` over `n` random directions in `d` dimensions; exact.

    .. math:: \sigma = 2 \sqrt{\frac{d - 1}{(d + 2)\, n (n - 1)}}

    from :math:`\operatorname{Var}\cos^2 = 2(d - 1) / (d^2 (d + 2))` and the pairwise independence of the cosines.

    Raises: InvalidArgumentError for fewer than two directions.

    Example:
        >>> round(gonio.geometry.alignment_deviation(64, 576), 4)
        0.0314
    """
    _check_counts("alignment_deviation", n, d, least=2)
    return sqrt(alignment_variance(n * (n - 1) / 2, d))


def expected_coherence(n: int, d: int) -> float:
    r"""Mean of the largest absolute cosine among `n` random directions in `d` dimensions.

    .. math:: E\mu \approx \int_0^{\pi/2} \big(1 - (1 - Q(\theta))^{n(n-1)/2}\big) \sin\theta \, d\theta

    with :math:`Q(\theta)` the probability that a random pair is within :math:`\theta` of parallel or opposite.
    All pairs are treated as independent; simulations from (n, d) = (5, 3) to (1000, 100) agree within their error of
    1 %. Roughly :math:`\sqrt{4 \ln n / d}` in high dimensions.

    Raises: InvalidArgumentError for fewer than two directions, or less than two dimensions.

    Example:
        >>> round(gonio.geometry.expected_coherence(64, 576), 3)
        0.15

    References: [1] T. T. Cai, J. Fan, T. Jiang, "Distributions of angles in random packing on spheres", JMLR 14, 2013,
        Theorems 1 and 2 (limits of the extreme angle). https://arxiv.org/abs/1306.0256
    """
    _check_counts("expected_coherence", n, d, least=2)
    pairs = n * (n - 1) / 2
    # Beyond this cosine less than e^-40 of the pairs remain; it keeps the grid on the narrow bulk.
    reach = min(1.0, sqrt(2 * (log(pairs) + 40) / d))
    theta = torch.linspace(acos(reach), pi / 2, 20001, dtype=torch.float64, device="cpu")
    density = 2 * random_angle_density(theta, d)
    close = torch.cumulative_trapezoid(density, theta)
    close = torch.cat([close.new_zeros(1), close]).clamp(0, 1)
    some_pair = -torch.expm1(pairs * torch.log1p(-close.clamp_max(1 - 1e-16)))
    return float(torch.trapezoid(some_pair * theta.sin(), theta))


@lru_cache(maxsize=4096)
def random_coherence(pairs: int, dim: int, *, quantile: float = 0.5) -> float:
    r"""A quantile of the largest :math:`|\cos|` among so many pairs of random directions; the median by default.

    The :math:`t` with :math:`(1 - P(|\cos| > t))^N = q`, all pairs treated as independent, and
    :math:`P(|\cos| > t) = I_{1-t^2}(\tfrac{d-1}{2}, \tfrac12)`.

    Example:
        >>> from gonio.geometry.chance import random_coherence
        >>> round(random_coherence(64 * 63 // 2, 576), 3)
        0.149
    """
    if dim < 2 or pairs < 1:
        return 1.0
    target = -expm1(log(quantile) / pairs)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_above(middle, dim) > target else (low, middle)
    return (low + high) / 2


def expected_pairs_above(cosine: float, pairs: int, dim: int) -> float:
    """Expected number, among so many pairs of random directions, with an absolute cosine above `cosine`."""
    return pairs * _probability_above(cosine, dim) if dim > 1 else float(pairs)


def _probability_above(cosine: float, dim: int) -> float:
    """P(|cos θ| > cosine), as twice the integral of the angle's density from 0 to the arc cosine."""
    # Substituting x = sin θ makes the integrand x^(d−2)/√(1−x²); scaled by its end point it cannot underflow.
    end = sqrt(max(0.0, 1.0 - cosine * cosine))
    if end in (0.0, 1.0):
        return end
    # x = end·(1 − s)^(1/(d−1)) turns x^(d−2) dx into a constant: ∫ = end^(d−1)/(d−1) · mean of 1/√(1−x²).
    s = (torch.arange(2000, dtype=torch.float64, device="cpu") + 0.5) / 2000
    x = end * (1 - s).pow(1 / (dim - 1))
    mean = float((1 - x * x).rsqrt().mean())
    return min(1.0, 2 * exp(_log_density_at_right_angle(dim) + (dim - 1) * log(end)) / (dim - 1) * mean)


def welch_bound(n: int, d: int) -> float:
    r"""Smallest possible coherence of `n` filters in `d` dimensions.

    .. math:: \mu \ge \sqrt{\frac{n - d}{d\,(n - 1)}} \quad (n > d), \qquad 0 \text{ otherwise.}

    Attained exactly by equiangular tight frames, for example three vectors at 120°.

    Raises: InvalidArgumentError if `n` or `d` is below 1.

    Example:
        >>> gonio.geometry.welch_bound(3, 2), gonio.geometry.welch_bound(3, 3)
        (0.5, 0.0)

    References: [1] L. Welch, "Lower bounds on the maximum cross correlation of signals", IEEE Trans. Inf. Theory 20(3),
        1974. The bound for k = 1.
    """
    _check_counts("welch_bound", n, d, least=1)
    return sqrt((n - d) / (d * (n - 1))) if n > d else 0.0


def _check_counts(function: str, n: int, d: int, *, least: int) -> None:
    if n < least or d < least:
        raise InvalidArgumentError(
            f"{function}() needs n >= {least} directions in d >= {least} dimensions",
            f"n={n}, d={d}",
            f"Pass n and d of at least {least}.",
        )


@dataclass(frozen=True)
class MarchenkoPastur:
    """Limit law of the singular values of a random matrix; see :func:`marchenko_pastur`."""

    lower: float
    upper: float
    ratio: float  # smaller over larger side, in (0, 1]
    scale: float  # std · √(larger side)

    def density(self, values: Tensor) -> Tensor:
        """Density of the singular values at `values`; integrates to 1 over [lower, upper]."""
        x = values / self.scale
        low, high = 1 - sqrt(self.ratio), 1 + sqrt(self.ratio)
        inside = (x >= low) & (x <= high)
        x = torch.where(inside, x, 1.0)
        # √((λ₊ − λ)(λ − λ₋)) / (π c x) with λ = x²; for c = 1 the x cancels: a quarter circle.
        if self.ratio == 1:
            shape = ((high - x) * (high + x)).sqrt()
        else:
            shape = ((high - x) * (x - low) * (x + low) * (x + high)).clamp(min=0).sqrt() / x
        return inside * shape / (pi * self.ratio * self.scale)


def marchenko_pastur(rows: int, cols: int, *, std: float = 1.0) -> MarchenkoPastur:
    r"""Limit law of the singular values of a random `rows` × `cols` matrix with independent entries.

    .. math:: s \in \sigma\,[\sqrt M - \sqrt m,\; \sqrt M + \sqrt m], \qquad M, m = \text{larger, smaller side}

    for entries of mean 0, standard deviation :math:`\sigma` (`std`) and finite fourth moment, as the sides grow.
    Training or a non-zero mean puts singular values above ``upper``.

    Raises: InvalidArgumentError for sides below 1 or a `std` that is not positive.

    Example:
        >>> law = gonio.geometry.marchenko_pastur(4000, 1000, std=4000**-0.5)
        >>> round(law.lower, 6), round(law.upper, 6)
        (0.5, 1.5)

    References: [1] V. Marchenko, L. Pastur, "Distribution of eigenvalues for some sets of random matrices", Math. USSR
        Sb. 1(4), 1967. [2] Z. Bai, Y. Yin, "Limit of the smallest eigenvalue of a large dimensional sample covariance
        matrix", Ann. Probab. 21(3), 1993 (the ends of the support).
    """
    _check_counts("marchenko_pastur", rows, cols, least=1)
    if not std > 0:
        raise InvalidArgumentError(
            "marchenko_pastur() needs std > 0", f"std={std}", "Pass the entries' standard deviation."
        )
    small, large = sorted((rows, cols))
    scale, width = std * sqrt(large), std * sqrt(small)
    return MarchenkoPastur(scale - width, scale + width, small / large, scale)


@dataclass(frozen=True)
class SpectrumDeviation:
    """Singular values of some matrices of one size compared with those of random matrices."""

    distance: float  # Kolmogorov distance of their squares from the law of Marchenko and Pastur, in [0, 1]
    outliers: int  # number of singular values above random_largest_singular_value
    outlier_share: float  # their share of the squared Frobenius norm
    defect: float  # root mean square of s_i² / mean(s²) − 1


def spectrum_deviations(values: Tensor, rows: int, cols: int) -> list[SpectrumDeviation | None]:
    r"""Compare all singular values of some `rows` × `cols` matrices, in each row, with those of random matrices.

    Random means independent entries of mean 0 and of the root mean square that the matrices have together, so a
    common scale has no effect. `values` are in any order. None for matrices of a single row or column.
    """
    small, large = sorted((rows, cols))
    ordered = np.sort(values.double().cpu().numpy(), axis=1)  # on short vectors NumPy takes a third of torch's time
    largest = ordered[:, -1:]
    if small < 2:
        return [None] * len(ordered)
    fine = (largest > 0) & (largest < inf)
    squares = np.square(np.where(fine, ordered, 1.0) / np.where(fine, largest, 1.0))
    squares /= squares.mean(1, keepdims=True)  # of mean 1, as under the law
    outlying = squares > random_largest_singular_value(rows, cols) ** 2
    columns = (
        _kolmogorov_distances(squares, small / large),
        outlying.sum(1),
        (squares * outlying).sum(1) / squares.shape[1],
        np.sqrt(np.square(squares - 1).mean(1)),
    )
    found = (SpectrumDeviation(*figures) for figures in zip(*(c.tolist() for c in columns), strict=True))
    return [one if good else None for one, good in zip(found, fine[:, 0], strict=True)]


def random_largest_singular_value(rows: int, cols: int) -> float:
    r"""0.999 quantile of the largest singular value of a random matrix, over the root of the larger side.

    :math:`s_{\max}^2` is near :math:`\mu + \sigma\, TW_1` with :math:`\mu = (\sqrt{n - \frac12} + \sqrt{d -
    \frac12})^2` and :math:`\sigma = \sqrt\mu\,((n - \frac12)^{-1/2} + (d - \frac12)^{-1/2})^{1/3}`, for entries of
    variance 1.

    Example:
        >>> from gonio.geometry.chance import random_largest_singular_value
        >>> round(random_largest_singular_value(1000, 1000), 3)  # the edge of the law is 2
        2.02

    References: [1] I. Johnstone, "On the distribution of the largest eigenvalue in principal components analysis", Ann.
        Statist. 29(2), 2001, Theorem 1.1. [2] Z. Ma, "Accuracy of the Tracy–Widom limits for the extreme eigenvalues in
        white Wishart matrices", Bernoulli 18(1), 2012 (the halves, which make it hold for small sides).
    """
    a, b = sqrt(rows - 0.5), sqrt(cols - 0.5)
    mean = (a + b) ** 2
    deviation = (a + b) * (1 / a + 1 / b) ** (1 / 3)
    return sqrt((mean + TRACY_WIDOM * deviation) / max(rows, cols))


def random_spectrum_distance(rows: int, cols: int) -> float:
    r"""Mean ``distance`` of one random matrix, :math:`(0.35 + 0.41 \ln m) / m` for the smaller side m.

    Fitted to simulations with 2 to 256 rows and ratios of the sides from 1 to 1000; it does not depend on the ratio.
    """
    small = min(rows, cols)
    return (0.35 + 0.41 * log(small)) / small


def random_orthogonality_defect(rows: int, cols: int) -> float:
    r"""``defect`` for normal entries: :math:`\sqrt{(m + 1) / M}` with the smaller and the larger side."""
    small, large = sorted((rows, cols))
    return sqrt((small + 1) / large)


def _kolmogorov_distances(squares: NDArray[np.float64], ratio: float) -> NDArray[np.float64]:
    """Largest difference of the distribution functions, of each row of squares in ascending order."""
    n = squares.shape[1]
    angle = np.arccos(((squares - (1 + ratio)) / (2 * sqrt(ratio))).clip(-1, 1))
    above = _share_above(ratio)[np.rint(angle * (LAW_POINTS / pi)).astype(np.intp)]
    excess = above - np.arange(n - 1, -1, -1) / n  # of the share above each square, itself excluded
    return np.maximum(excess.max(1), 1 / n - excess.min(1))


@lru_cache(maxsize=256)
def _share_above(ratio: float) -> NDArray[np.float64]:
    """Probability above λ = 1 + c + 2√c cos φ, for φ from 0 to π, in which the law has a smooth density."""
    phi = torch.linspace(0, pi, LAW_POINTS + 1, dtype=torch.float64, device="cpu")
    density = 2 * phi.sin().square() / (pi * (1 + ratio + 2 * sqrt(ratio) * phi.cos()).clamp(min=1e-300))
    density[-1] = 2 * (ratio == 1) / pi  # its limit there
    density = torch.where(torch.isfinite(density), density, 0.0)
    above = torch.cat([density.new_zeros(1), torch.cumulative_trapezoid(density, phi)])
    return (above / above[-1]).numpy()
