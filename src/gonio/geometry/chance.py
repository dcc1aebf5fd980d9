"""What random directions look like: the laws that measurements are held against.

For two independent uniform directions in :math:`d` dimensions the angle has density proportional to
:math:`\\sin^{d-2}\\theta`, so :math:`E\\cos = 0`, :math:`E\\cos^2 = 1/d`. Cosines of different pairs among
:math:`n` such directions are pairwise independent, which makes variances of pair averages exact.
"""

from __future__ import annotations

from math import lgamma, log, pi, sqrt

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError

__all__ = ["random_angle_density", "welch_bound"]


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
    if n < 1 or d < 1:
        raise InvalidArgumentError("welch_bound() needs n >= 1 and d >= 1", f"n={n}, d={d}", "Pass the matrix's shape.")
    return sqrt((n - d) / (d * (n - 1))) if n > d else 0.0
