"""What random directions show: the spread of their angles, their largest cosine, how many lie close."""

from __future__ import annotations

from functools import lru_cache
from math import exp, expm1, lgamma, log, pi, sqrt

import torch

from gonio.geometry import random_angle_density

__all__ = ["angle_std_at_random", "coherence_at_random", "expected_above"]


@lru_cache(maxsize=4096)
def angle_std_at_random(dim: int) -> float:
    r"""Standard deviation in degrees of the angle between random directions, about :math:`57.3/\sqrt{d}`.

    Example:
        >>> from gonio.measuring.chance import angle_std_at_random
        >>> round(angle_std_at_random(2), 2), round(angle_std_at_random(576), 2)
        (51.96, 2.39)
    """
    if dim < 2:
        return 90.0
    theta = (torch.arange(20_000, dtype=torch.float64) + 0.5) * (pi / 20_000)
    weight = random_angle_density(theta, dim)
    weight = weight / weight.sum()
    return float(torch.rad2deg((weight * (theta - pi / 2).square()).sum().sqrt()))


@lru_cache(maxsize=4096)
def coherence_at_random(pairs: int, dim: int, *, quantile: float = 0.5) -> float:
    r"""The largest :math:`|\cos|` that so many pairs of random directions show; its median by default.

    :math:`t` with :math:`(1 - P(|\cos| > t))^N = q` (all pairs treated as independent; any two of them
    are), where :math:`P(|\cos| > t) = I_{1-t^2}(\tfrac{d-1}{2}, \tfrac12)`.

    Example:
        >>> from gonio.measuring.chance import coherence_at_random
        >>> round(coherence_at_random(64 * 63 // 2, 576), 3)
        0.149
    """
    if dim < 2 or pairs < 1:
        return 1.0
    target = -expm1(log(quantile) / pairs)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, dim) > target else (low, middle)
    return (low + high) / 2


def expected_above(cosine: float, pairs: int, dim: int) -> float:
    """How many of so many pairs of random directions have an absolute cosine above `cosine`, on average."""
    return pairs * _tail(cosine, dim) if dim > 1 else float(pairs)


def _tail(cosine: float, dim: int) -> float:
    """P(|cos θ| > cosine), as twice the integral of the angle's density from 0 to the arc cosine."""
    # Substituting x = sin θ makes the integrand x^(d−2)/√(1−x²); scaled by its end point it cannot underflow.
    end = sqrt(max(0.0, 1.0 - cosine * cosine))
    if end == 0.0:
        return 0.0
    if end == 1.0:
        return 1.0
    # x = end·(1 − s)^(1/(d−1)) turns x^(d−2) dx into a constant: ∫ = end^(d−1)/(d−1) · mean of 1/√(1−x²).
    s = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    x = end * (1 - s).pow(1 / (dim - 1))
    mean = float((1 - x * x).rsqrt().mean())
    log_constant = lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * log(pi)
    return min(1.0, 2 * exp(log_constant + (dim - 1) * log(end)) / (dim - 1) * mean)
