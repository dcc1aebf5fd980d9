"""Soft orthogonality and its relatives: the Gram matrix of the filters against the identity."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from torch import Tensor

from gonio.execution import replicated
from gonio.geometry.chance import welch_bound
from gonio.geometry.norms import normalize, safe_norm, small_side, whole
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer, identity_like
from gonio.regularizers.kernels import defect_and_gradient, worst_entry_and_gradient

Filters = Literal["raw", "unit"]


@dataclass(frozen=True, kw_only=True)
class Orthogonality(WeightRegularizer):
    r"""Squared Frobenius distance of the filters' Gram matrix from orthogonality.

    With one filter per row of :math:`W` (per group),

    .. math::
        \lVert W W^\top - I \rVert_F^2 \quad\text{or, off the diagonal only,}\quad
        \sum_{i \ne j} \langle w_i, w_j \rangle^2 .

    The first also draws the norms to 1 and is taken on the smaller side of :math:`W`, where it can reach 0:
    :math:`\lVert W^\top W - I \rVert^2` differs by a constant and has the same gradient. The second can be lowered by
    smaller norms too; with unit filters it is :math:`\sum_{i \ne j} \cos^2 \theta_{ij}` and acts on angles alone.

    Args:
        strength: 1e-4 is BigGAN's β for the off-diagonal form.
        diagonal: whether norms are drawn to 1.
        filters: `"raw"`, or `"unit"` to normalise every filter first (`diagonal` then has no effect).

    Invariances:
        Rotations of the input space, permutations and flips of filters; with unit filters also their scale.

    Example:
        >>> w, R = 2 * torch.eye(3), gonio.regularizers
        >>> R.Orthogonality(1.0)(w / 2), R.Orthogonality(1.0)(w), R.Orthogonality(1.0, diagonal=False)(w)
        (tensor(0.), tensor(27.), tensor(0.))

    References:
        [1] A. Brock, J. Donahue, K. Simonyan, "Large scale GAN training for high fidelity natural image
        synthesis", ICLR 2019, Eq. (3) (off the diagonal). https://arxiv.org/abs/1809.11096
        [2] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.1. https://arxiv.org/abs/1810.09102

    Differs:
        BigGAN's public code adds :math:`2 (W W^\top \odot (1 - I)) W` to the gradient, half of the
        derivative of its formula; its strength 1e-4 is 0.5e-4 here. Groups are separate matrices.
    """

    diagonal: bool = True
    filters: Filters = "raw"

    @property
    def draws_norms(self) -> bool:
        """Whether norms of filters are drawn to 1."""
        return self.diagonal and self.filters == "raw"

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        matrix = matrix_view(weight, layout)
        if self.filters == "unit":
            return Evaluation(_defect(normalize(matrix), diagonal=False).square().sum())
        matrix = small_side(matrix) if self.diagonal else matrix
        return Evaluation(_defect(matrix, diagonal=self.diagonal).square().sum())

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        matrix = matrix_view(weight, layout)
        if self.filters == "unit":
            unit = normalize(matrix)
            value, gradient = defect_and_gradient(unit, diagonal=False)
            return Evaluation(value), _by_raw(gradient, unit, matrix)
        value, gradient = defect_and_gradient(matrix, diagonal=self.diagonal)
        return Evaluation(value), gradient

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        if self.draws_norms:
            return weight.new_zeros(())
        matrix = matrix_view(weight, layout)
        return _welch_floor(normalize(matrix) if self.filters == "unit" else matrix).sum()


@dataclass(frozen=True, kw_only=True)
class DoubleOrthogonality(WeightRegularizer):
    r"""Squared Frobenius distance from orthogonality of rows and of columns together.

    .. math:: \lVert W^\top W - I \rVert_F^2 + \lVert W W^\top - I \rVert_F^2

    The two summands differ by the constant :math:`|n - d|`, so this is twice :class:`Orthogonality` plus that constant.

    Invariances:
        Rotations on either side, permutations and flips of filters. Not the filters' scale.

    Example:
        >>> gonio.regularizers.DoubleOrthogonality(1.0)(torch.eye(3)[:2])
        tensor(1.)

    References:
        [1] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.2. https://arxiv.org/abs/1810.09102
    """

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        matrix = matrix_view(weight, layout)
        return Evaluation(2 * _defect(small_side(matrix), diagonal=True).square().sum() + _surplus(matrix))

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        matrix = matrix_view(weight, layout)
        value, gradient = defect_and_gradient(matrix, diagonal=True)
        return Evaluation(2 * value + _surplus(matrix)), gradient.mul_(2)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        return weight.new_tensor(_surplus(matrix_view(weight, layout)))


@dataclass(frozen=True, kw_only=True)
class MutualCoherence(WeightRegularizer):
    r"""Largest deviation of an entry of the Gram matrix from the identity.

    .. math:: \lVert W W^\top - I \rVert_\infty = \max_{i, j} \lvert \langle w_i, w_j \rangle - \delta_{ij} \rvert

    on the smaller side of :math:`W`, where it can reach 0. With unit filters it is the coherence of the filters,
    :math:`\max_{i \ne j} |\cos\theta_{ij}|`, which for n > d filters cannot fall below the Welch bound. Only the
    worst pair has a gradient; where several are equally bad, one of them.

    Args:
        filters: `"raw"`, or `"unit"` to normalise every filter first.

    Invariances:
        Permutations and flips of filters; with unit filters also their scale and rotations.

    Example:
        >>> w = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> gonio.regularizers.MutualCoherence(1.0)(w)
        tensor(1.)
        >>> gonio.regularizers.MutualCoherence(1.0, filters="unit")(w)
        tensor(0.7071)

    References:
        [1] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.3. https://arxiv.org/abs/1810.09102

    Differs:
        The paper writes :math:`W^\top W` throughout; for fewer rows than columns that cannot be the identity.
    """

    filters: Filters = "raw"

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        matrix = matrix_view(weight, layout)
        if not matrix.numel():
            return Evaluation(matrix.sum())
        a = normalize(matrix) if self.filters == "unit" else small_side(matrix)
        defect = replicated(_defect(a, diagonal=self.filters == "raw"))  # an empty shard has no largest entry
        return Evaluation(defect.abs().amax((-2, -1)).sum())

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        matrix = matrix_view(weight, layout)
        if self.filters == "unit":
            unit = normalize(matrix)
            value, gradient = worst_entry_and_gradient(unit, diagonal=False)
            return Evaluation(value), _by_raw(gradient, unit, matrix)
        a = small_side(matrix)
        value, gradient = worst_entry_and_gradient(a, diagonal=True)
        return Evaluation(value), gradient if a is matrix else gradient.mT

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        if self.filters == "raw":
            return weight.new_zeros(())
        matrix = matrix_view(weight, layout)
        alive = (whole(safe_norm(matrix, -1)) > 0).sum(-1).tolist()  # a zero filter is orthogonal to all
        return weight.new_tensor(sum(welch_bound(n, matrix.shape[-1]) for n in alive if n > 1))


def _defect(a: Tensor, *, diagonal: bool) -> Tensor:
    """A Aᵀ − I, or A Aᵀ without its diagonal."""
    product = a @ a.mT
    eye = identity_like(product)
    return product - eye if diagonal else product * (1 - eye)


def _by_raw(gradient: Tensor, unit: Tensor, matrix: Tensor) -> Tensor:
    """The gradient by raw filters, given that by unit filters: the part orthogonal to each filter, over its norm."""
    across = gradient - (gradient * unit).sum(-1, keepdim=True) * unit
    norm = safe_norm(matrix, -1, keepdim=True)
    return across / norm.masked_fill(norm == 0, inf)


def _surplus(matrix: Tensor) -> float:
    count, rows, cols = matrix.shape
    return float(count * abs(rows - cols))


def _welch_floor(matrix: Tensor) -> Tensor:
    r"""Least :math:`\sum_{i \ne j} \langle w_i, w_j \rangle^2` of filters with the given norms.

    .. math::
        \max\Bigl(0, \tfrac1d \bigl(\textstyle\sum_i \lVert w_i \rVert^2\bigr)^2
        - \sum_i \lVert w_i \rVert^4\Bigr)

    because :math:`\operatorname{tr}(G)^2 \le d \lVert G \rVert_F^2` for a Gram matrix of rank at most d;
    with unit norms it is the Welch bound :math:`n^2/d - n`.
    """
    square = (matrix * matrix).sum(-1)
    return (square.sum(-1).square() / matrix.shape[-1] - square.square().sum(-1)).clamp_min(0)
