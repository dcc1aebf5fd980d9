"""SRIP: the spectral norm of the Gram matrix's distance from the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gonio.geometry.norms import full_precision, matrix_vector, normalize, safe_norm
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer, can_add_directly, require, shares_memory
from gonio.regularizers.closed_form import Formula, apply
from gonio.regularizers.gram import add_product_, product, small_side
from gonio.regularizers.sharding import is_sharded, replicated_like

__all__ = ["SRIP"]

GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True)
class SRIP(WeightRegularizer):
    r"""Spectral restricted isometry: the largest distance of a squared singular value from 1.

    .. math:: \sigma(W W^\top - I) = \max_i \lvert \sigma_i^2 - 1 \rvert

    over the singular values of the smaller side of :math:`W`; added over groups. Estimated without forming the
    Gram matrix, by power iteration :math:`v \leftarrow W (W^\top v) - v`: three products of the matrix with a
    vector. :math:`v` is held fixed in the backward, so there is no second derivative. The estimate never exceeds
    the true value and rises to it with every iteration.

    `Penalty` keeps :math:`v` from step to step, so that one iteration per step follows a slowly changing weight.
    :meth:`value` by itself starts from a fixed vector.

    Args:
        strength: the paper's code starts from 1e-2 and decays it, see :meth:`Milestones.srip`.
        iterations: power iterations per evaluation.

    Invariances:
        Rotations on either side, permutations and flips of filters (of the true value). Not scale.

    Raises:
        InvalidArgumentError: if `iterations` is below 1.

    Example:
        >>> value = gonio.regularizers.SRIP(1.0, iterations=50)(torch.diag(torch.tensor([1.0, 2.0, 0.5])))
        >>> round(value.item(), 3)
        3.0

    References:
        [1] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.4. https://arxiv.org/abs/1810.09102

    Differs:
        The public code penalises the square, estimates it with one iteration from a random vector in each step
        (2.49 reads as 1.75), differentiates through that iteration, and for some models takes the side on which
        the identity cannot be reached.
    """

    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.iterations >= 1, "SRIP() needs iterations >= 1", f"iterations={self.iterations}", "Use 1 or more.")

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        a = small_side(matrix_view(weight, layout))
        value, following = apply(self._stretch(a, state), a)
        return Evaluation(value, {}, _whole(following))

    @torch.no_grad()
    def _stretch(self, a: Tensor, state: Tensor | None) -> _Stretch:
        """The formula for the vector of the last iteration."""
        vector = replicated_like(_start(a) if state is None else state.to(a), a)
        for _ in range(self.iterations - 1):
            vector = _next(a, vector)[0]
        return _Stretch(vector)

    def add_gradient_(
        self, grad: Tensor, weight: Tensor, layout: Layout, *, factor: float, state: Tensor | None = None
    ) -> Evaluation:
        a, target = (small_side(matrix_view(x, layout)) for x in (weight.detach(), grad))
        if not (can_add_directly(grad, weight) and shares_memory(a, weight) and shares_memory(target, grad)):
            return super().add_gradient_(grad, weight, layout, factor=factor, state=state)
        with torch.no_grad(), full_precision(weight):
            value, following = self._stretch(a, state).evaluate_and_add_(target, a, factor)
        return Evaluation(value, {}, following)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        return weight.new_zeros(())


def _start(a: Tensor) -> Tensor:
    """A fixed vector per matrix with no pattern that a weight would share (fractional parts of i·φ)."""
    spread = torch.arange(1, a.shape[1] + 1, dtype=a.dtype, device=a.device).mul_(GOLDEN).remainder_(1).sub_(0.5 - 1e-3)
    vector: Tensor = normalize(spread)
    return vector.view(1, -1, 1).expand(a.shape[0], -1, -1)


def _next(a: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised image of a vector and its length; the vector itself where the image is zero."""
    image = a @ (a.mT @ vector) - vector
    length = safe_norm(image, -2, keepdim=True)
    zero = (length == 0).to(a.dtype)
    return image / (length + zero) + vector * zero, length


def _whole(x: Any) -> Tensor:
    """The state as a plain tensor, whatever the weight is."""
    whole: Tensor = x.full_tensor() if is_sharded(x) else x
    return whole.detach()


@dataclass(frozen=True, eq=False)
class _Stretch(Formula):
    """Σ over matrices of |A Aᵀ v − v| for fixed unit v; gradient u (Aᵀ v)ᵀ + v (Aᵀ u)ᵀ, u the unit image."""

    results: ClassVar[int] = 2
    held: ClassVar[str] = "the vector of the power iteration"
    vector: Tensor

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        following, length = _next(x, self.vector)
        return length.sum(), following

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        if _alone(x):
            length, unit, inner = self._of_one(x[0])
            following = unit.clone() if length else self.vector[0, :, 0].clone()
            return (length, following.view(1, -1, 1)), (unit.view(1, -1, 1), inner.view(1, -1, 1))
        inner = product(x.mT, self.vector)
        image = product(x, inner).sub_(self.vector)
        length = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        zero = length == 0
        unit = image.div_(length.masked_fill(zero, 1))
        return (length.sum(), torch.where(zero, self.vector, unit)), (unit, inner)

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        left, right = self._sides(x, *saved)
        return product(left * factor, right)

    def add_gradient_(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: float) -> None:
        add_product_(target, *self._sides(x, *saved), alpha=factor)

    def _sides(self, x: Tensor, unit: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient, of rank 2, as the product of a tall and a wide matrix, whose rows lie in one piece."""
        other = product(x.mT, unit)
        return torch.cat([unit, self.vector], -1), torch.cat([inner.mT, other.mT], -2)

    def evaluate_and_add_(self, target: Tensor, x: Tensor, factor: float) -> tuple[Tensor, ...]:
        if not _alone(x):
            return super().evaluate_and_add_(target, x, factor)
        vector = self.vector[0, :, 0]
        length, unit, inner = self._of_one(x[0])
        if not length:
            return length, self.vector
        other = matrix_vector(x[0].T, unit)
        # two passes by outer products are faster than one by a matrix product with two inner terms
        target[0].addr_(unit, inner, alpha=factor).addr_(vector, other, alpha=factor)
        return length, unit.view(1, -1, 1)

    def _of_one(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The length of the vector's image, the image at length 1 (or 0) and Aᵀ v, for a single matrix."""
        vector = self.vector[0, :, 0]
        inner = matrix_vector(matrix.T, vector)
        image = matrix_vector(matrix, inner).sub_(vector)
        length = torch.linalg.vector_norm(image)
        return length, image.div_(length) if length else image, inner


def _alone(x: Tensor) -> bool:
    """Whether there is one matrix, and reading a number off does not wait for a device."""
    return x.device.type == "cpu" and x.shape[0] == 1
