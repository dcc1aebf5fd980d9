"""Hyperspherical energy: filters as charges on the unit sphere that repel each other."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

import torch
from torch import Tensor

from gonio.geometry.angles import angles
from gonio.geometry.norms import normalize, safe_norm, whole
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer, identity_like, require


@dataclass(frozen=True, kw_only=True)
class HypersphericalEnergy(WeightRegularizer):
    r"""Mean energy of pairs of filters that repel each other on the unit sphere.

    .. math:: \frac{1}{n(n-1)} \sum_{i \ne j} f_s(\rho_{ij}), \qquad
              f_0 = -\log \rho, \quad f_s = \rho^{-s}

    with :math:`\rho^2 = \lVert \hat w_i - \hat w_j \rVert^2 + \text{eps}` (chord) or
    :math:`\rho = \theta_{ij} / \pi + \text{eps}` (angle); for s = 0 the chord counts as
    :math:`-\log \rho^2`. Least for :math:`n \le d + 1` at a regular simplex, with angles above 90°. With
    ``half_space`` each filter comes with its negative, and :math:`n \le d` filters become orthogonal. Zero filters are
    left out; without a pair the value is 0.

    Args:
        strength: the paper uses 1 for hidden layers and 10 for the last (angle, s ≥ 1: 0.1 and 1).
        power: s.
        distance: `"chord"` or `"angle"`.
        half_space: whether a filter and its negative count as one direction.
        eps: added to the (squared) distance; bounds the energy of filters that coincide.

    Invariances:
        Rescaling filters, permuting them, rotations; flips only with `half_space`.

    Example:
        >>> simplex = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
        >>> energy = gonio.regularizers.HypersphericalEnergy(1.0, eps=0.0)
        >>> energy(simplex), energy.excess(simplex)
        (tensor(0.3333), tensor(0.))

    References:
        [1] W. Liu, et al., "Learning towards minimum hyperspherical energy", NeurIPS 2018, Eq. (1), (4), §3.2.
        https://arxiv.org/abs/1805.09298

    Differs:
        The public code adds 1e-4 under the root of the filters' norms instead of to the distance, which lets
        small filters appear closer to orthogonal than they are.
    """

    power: Literal[0, 1, 2] = 2
    distance: Literal["chord", "angle"] = "chord"
    half_space: bool = False
    eps: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eps >= 0, "HypersphericalEnergy() needs eps >= 0", f"eps={self.eps}", "Use 0 for none.")

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        matrix = matrix_view(weight, layout)
        if self.half_space:
            matrix = torch.cat([matrix, -matrix], -2)
        unit = normalize(matrix)
        alive = unit.detach().square().sum(-1, keepdim=True)
        pairs = alive @ alive.mT
        pairs = pairs * (1 - identity_like(pairs))
        energy = self._energy(self._distance(unit, 1 - pairs)) * pairs
        return Evaluation((energy.sum((-2, -1)) / pairs.sum((-2, -1)).clamp_min(1)).sum())

    def _distance(self, unit: Tensor, ignored: Tensor) -> Tensor:
        """Squared chord or angle over π, moved to 1 where a pair does not count."""
        if self.distance == "angle":
            return angles(unit) / torch.pi + self.eps + ignored
        return (2 - 2 * (unit @ unit.mT)).clamp_min(0) + self.eps + ignored

    def _energy(self, distance: Tensor) -> Tensor:
        if self.power == 0:
            return -distance.log()
        return distance.pow(-self.power if self.distance == "angle" else -self.power / 2)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        norms = whole(safe_norm(matrix_view(weight, layout), -1))
        return weight.new_tensor(sum(self._least(int((of_one > 0).sum())) for of_one in norms))

    def _least(self, filters: int) -> float:
        """A lower bound of the mean energy of so many filters that are not zero."""
        rows = 2 * filters if self.half_space else filters
        if rows < 2:
            return 0.0
        # f is convex in the squared chord, whose mean over pairs is at most n² / (n choose 2).
        farthest = 1.0 if self.distance == "angle" else rows**2 / comb(rows, 2)
        return float(self._energy(torch.tensor(farthest + self.eps, dtype=torch.float64, device="cpu")))
