"""Mutual coherence: the worst pair of filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.geometry.chance import welch_bound
from gonio.geometry.norms import normalize
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import ClosedFormRegularizer
from gonio.regularizers.closed_form import Closed, Formula
from gonio.regularizers.gram import small_side, symmetric_product
from gonio.regularizers.orthogonality import Filters, check_filters
from gonio.regularizers.sharding import identity_like

__all__ = ["MutualCoherence"]


@dataclass(frozen=True, kw_only=True)
class MutualCoherence(ClosedFormRegularizer):
    r"""Largest deviation of an entry of the Gram matrix from the identity.

    .. math:: \lVert W W^\top - I \rVert_\infty = \max_{i, j} \lvert \langle w_i, w_j \rangle - \delta_{ij} \rvert

    on the smaller side of :math:`W`, where it can reach 0. With unit filters it is the coherence of the filters,
    :math:`\max_{i \ne j} |\cos\theta_{ij}|`, which for n > d filters cannot fall below the Welch bound. Only the
    worst pair has a gradient; where several are equally bad, one of them.

    Args:
        strength: the coefficient of the value.
        filters: `"raw"`, or `"unit"` to normalise every filter first.

    Invariances:
        Permutations and flips of filters; with unit filters also their scale and rotations.

    Raises:
        InvalidArgumentError: for an unknown value of `filters`.

    Example:
        >>> w = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> gonio.regularizers.MutualCoherence(1.0)(w)
        tensor(1.)
        >>> gonio.regularizers.MutualCoherence(1.0, filters="unit")(w)
        tensor(0.7071)

    See also:
        :func:`gonio.geometry.coherence`.

    References:
        [1] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.3. https://arxiv.org/abs/1810.09102

    Differs:
        The paper writes :math:`W^\top W` throughout; for fewer rows than columns that cannot be the identity.
    """

    filters: Filters = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_filters(self.filters, "MutualCoherence")

    def _closed(self, weight: Tensor, layout: Layout) -> Closed:
        matrix = matrix_view(weight, layout)
        if self.filters == "unit":
            return Closed(_WorstEntry(diagonal=False), normalize(matrix))
        return Closed(_WorstEntry(diagonal=True), small_side(matrix))

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        count, rows, cols = matrix_view(weight, layout).shape
        if self.filters == "raw" or rows < 2:
            return weight.new_zeros(())
        return weight.new_tensor(count * welch_bound(rows, cols))


@dataclass(frozen=True)
class _WorstEntry(Formula):
    """Σ over matrices of max |A Aᵀ − I|, or of max off the diagonal."""

    diagonal: bool

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        gram = x @ x.mT
        eye = identity_like(gram)
        return ((gram - eye if self.diagonal else gram * (1 - eye)).abs().amax((-2, -1)).sum(),)

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gram = symmetric_product(x)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal.sub_(1) if self.diagonal else diagonal.zero_()
        flat = gram.flatten(1)
        index = flat.abs().argmax(1)
        worst = flat.gather(1, index.unsqueeze(1)).squeeze(1)
        return (worst.abs().sum(),), (index, worst.sign())

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        self._add(out, x, saved, factor)
        return out

    def add_gradient_(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: float) -> None:
        self._add(target, x, saved, factor)

    def _add(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor | float) -> None:
        index, sign = saved
        which = torch.arange(len(x), device=x.device)
        one, other = index // x.shape[1], index % x.shape[1]
        scale = (sign * factor).unsqueeze(1)
        target[which, one] += scale * x[which, other]
        target[which, other] += scale * x[which, one]
