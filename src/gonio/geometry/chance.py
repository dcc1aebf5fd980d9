"""What random directions look like: the laws that measurements are held against.

For two independent uniform directions in :math:`d` dimensions the angle has density proportional to
:math:`\\sin^{d-2}\\theta`, so :math:`E\\cos = 0`, :math:`E\\cos^2 = 1/d`. Cosines of different pairs among
:math:`n` such directions are pairwise independent, which makes variances of pair averages exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import acos, lgamma, log, pi, sqrt

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError

__all__ = [
    "MarchenkoPastur",
    "alignment_deviation",
    "expected_coherence",
    "marchenko_pastur",
    "random_angle_density",
    "welch_bound",
]


def random_angle_density(theta: Tensor | float, dim: int) -> Tensor:
    r"""Density of the angle between two random directions in `dim` dimensions.

    .. math:: p(\theta) = \frac{\Gamma(d/2)}{\sqrt\pi\,\Gamma((d-1)/2)} \sin^{d-2}\theta

    Symmetric about :math:`\pi/2`, around which it narrows as :math:`1/\sqrt d`: in high dimensions any
    two random directions are nearly orthogonal. Uniform for :math:`d = 2`.

    Args:
        theta: angles in radians; outside :math:`[0, \pi]` the density is 0.
        dim: the dimension :math:`d \ge 2`.

    Returns:
        The density per radian, of the shape of `theta`.

    Raises:
        InvalidArgumentError: if `dim` is below 2 (in one dimension the angle is 0 or π).

    Example:
        >>> gonio.geometry.random_angle_density(torch.tensor([0.0, torch.pi / 2]), dim=3)
        tensor([0.0000, 0.5000])

    References:
        [1] T. T. Cai, J. Fan, T. Jiang, "Distributions of angles in random packing on spheres", JMLR 14
        (2013), Eq. (1). https://arxiv.org/abs/1306.0256
    """
    if dim < 2:
        raise InvalidArgumentError(
            "random_angle_density() needs dim >= 2", f"dim={dim}", "In one dimension angles are 0 or π."
        )
    theta = torch.as_tensor(theta)
    log_constant = lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * log(pi)
    inside = (theta >= 0) & (theta <= pi)
    sine = theta.sin().clamp_min(0)
    return torch.exp(torch.special.xlogy(dim - 2, sine) + log_constant) * inside


def alignment_deviation(n: int, d: int) -> float:
    r"""Standard deviation of :func:`alignment` over `n` random directions in `d` dimensions; exact.

    .. math:: \sigma = 2 \sqrt{\frac{d - 1}{(d + 2)\, n (n - 1)}}

    from :math:`\operatorname{Var}\cos^2 = 2(d - 1) / (d^2 (d + 2))` and the pairwise independence of the cosines.

    Raises:
        InvalidArgumentError: for fewer than two directions.

    Example:
        >>> round(gonio.geometry.alignment_deviation(64, 576), 4)
        0.0314
    """
    _check_counts("alignment_deviation", n, d, least=2)
    return 2 * sqrt((d - 1) / ((d + 2) * n * (n - 1)))


def expected_coherence(n: int, d: int) -> float:
    r"""Mean of the largest absolute cosine among `n` random directions in `d` dimensions.

    .. math:: E\mu \approx \int_0^{\pi/2} \big(1 - (1 - Q(\theta))^{n(n-1)/2}\big) \sin\theta \, d\theta

    with :math:`Q(\theta)` the chance that a random pair is within :math:`\theta` of parallel or opposite.
    Treats all pairs as independent, which they are two by two; simulations from (n, d) = (5, 3) to (1000, 100)
    agree within their error of 1 %. Roughly :math:`\sqrt{4 \ln n / d}` in high dimensions: the level below
    which coherence is what chance gives.

    Raises:
        InvalidArgumentError: for fewer than two directions, or less than two dimensions.

    Example:
        >>> round(gonio.geometry.expected_coherence(64, 576), 3)
        0.15

    References:
        [1] T. T. Cai, J. Fan, T. Jiang, "Distributions of angles in random packing on spheres", JMLR 14, 2013,
        Theorems 1 and 2 (limits of the extreme angle). https://arxiv.org/abs/1306.0256
    """
    _check_counts("expected_coherence", n, d, least=2)
    pairs = n * (n - 1) / 2
    # Beyond this cosine less than e^-40 of the pairs remain; it keeps the grid on the narrow bulk.
    reach = min(1.0, sqrt(2 * (log(pairs) + 40) / d))
    theta = torch.linspace(acos(reach), pi / 2, 20001, dtype=torch.float64)
    density = 2 * random_angle_density(theta, d)
    close = torch.cumulative_trapezoid(density, theta)
    close = torch.cat([close.new_zeros(1), close]).clamp(0, 1)
    some_pair = -torch.expm1(pairs * torch.log1p(-close.clamp_max(1 - 1e-16)))
    return float(torch.trapezoid(some_pair * theta.sin(), theta))


def _check_counts(function: str, n: int, d: int, *, least: int) -> None:
    if n < least or d < least:
        raise InvalidArgumentError(
            f"{function}() needs n >= {least} directions in d >= {least} dimensions",
            f"n={n}, d={d}",
            "Pass larger ones.",
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
            shape = ((high - x) * (x - low) * (x + low) * (x + high)).clamp_min(0).sqrt() / x
        return inside * shape / (pi * self.ratio * self.scale)


def marchenko_pastur(rows: int, cols: int, *, std: float = 1.0) -> MarchenkoPastur:
    r"""Where the singular values of a random `rows` × `cols` matrix with independent entries lie.

    .. math:: s \in \sigma\,[\sqrt M - \sqrt m,\; \sqrt M + \sqrt m], \qquad M, m = \text{larger, smaller side}

    for entries of mean 0 and standard deviation :math:`\sigma` of any law with finite fourth moment, as the
    sides grow. Singular values above ``upper`` are what training (or a non-zero mean) has put there.

    Args:
        rows: filters.
        cols: inputs of each.
        std: :math:`\sigma` of one entry.

    Raises:
        InvalidArgumentError: for sides below 1 or a `std` that is not positive.

    Example:
        >>> law = gonio.geometry.marchenko_pastur(4000, 1000, std=4000**-0.5)
        >>> round(law.lower, 6), round(law.upper, 6)
        (0.5, 1.5)

    References:
        [1] V. Marchenko, L. Pastur, "Distribution of eigenvalues for some sets of random matrices", Math. USSR
        Sb. 1(4), 1967. [2] Z. Bai, Y. Yin, "Limit of the smallest eigenvalue of a large dimensional sample
        covariance matrix", Ann. Probab. 21(3), 1993 (the ends of the support).
    """
    _check_counts("marchenko_pastur", rows, cols, least=1)
    if not std > 0:
        raise InvalidArgumentError("marchenko_pastur() needs std > 0", f"std={std}", "Pass the entries' deviation.")
    small, large = sorted((rows, cols))
    return MarchenkoPastur(
        lower=std * (sqrt(large) - sqrt(small)),
        upper=std * (sqrt(large) + sqrt(small)),
        ratio=small / large,
        scale=std * sqrt(large),
    )


def welch_bound(n: int, d: int) -> float:
    r"""Least possible coherence of `n` filters in `d` dimensions.

    .. math:: \mu \ge \sqrt{\frac{n - d}{d\,(n - 1)}} \quad (n > d), \qquad 0 \text{ otherwise.}

    Attained exactly by equiangular tight frames, for example three vectors at 120°.

    Raises:
        InvalidArgumentError: if `n` or `d` is below 1.

    Example:
        >>> gonio.geometry.welch_bound(3, 2)
        0.5
        >>> gonio.geometry.welch_bound(3, 3)
        0.0

    References:
        [1] L. Welch, "Lower bounds on the maximum cross correlation of signals", IEEE Trans. Inf. Theory
        20(3), 1974. The bound for k = 1.
    """
    _check_counts("welch_bound", n, d, least=1)
    return sqrt((n - d) / (d * (n - 1))) if n > d else 0.0
