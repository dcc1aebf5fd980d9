"""WEISSI: a penalty on scale that cannot be lowered by moving scale between layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from gonio.geometry.norms import full_precision
from gonio.geometry.views import Layout
from gonio.regularizers.base import ClosedFormRegularizer, Evaluation, can_add_directly, require
from gonio.regularizers.closed_form import Closed
from gonio.regularizers.l2 import check_before_norm
from gonio.regularizers.log_norm import LogNorm, Row, add_rows_
from gonio.regularizers.log_norm_compiled import add_rows_compiled_

if TYPE_CHECKING:
    from gonio.regularizers.additions import Addition

__all__ = ["ScaleShift"]

NAMES = ("scale", "direction")
LEAST_FLOOR = 1e-3
USUAL_RATE = 10.0  # lr / (1 − momentum)² of lr 0.1 with momentum 0.9


@dataclass(frozen=True, kw_only=True)
class ScaleShift(ClosedFormRegularizer):
    r"""The logarithm of a weight's norm, and optionally the L1 norm of its direction.

    .. math::
        \lambda_1 \log \max(\lVert W \rVert, \text{floor}) + \lambda_2 \Bigl\lVert \frac{W}{\lVert W \rVert}
        \Bigr\rVert_1

    with :math:`\lambda_1` = `strength`, :math:`\lambda_2` = `direction_strength` and the Euclidean norm of the
    whole weight (of each stacked block, where a weight is several matrices in one). Summed over the layers of a
    positively homogeneous network the first term is :math:`\log \prod_l \lVert W_l \rVert`, which moving scale
    from layer to layer does not change, neither its value nor (up to the same factor) its gradient
    :math:`W / \lVert W \rVert^2`; L2 can be lowered that way without any change of the function. The second
    term only sees the direction: its gradient is orthogonal to W.

    Note [Floor]
        The gradient of the logarithm grows as 1/‖W‖, and one step of SGD multiplies W by
        :math:`1 - \eta\lambda_1/\lVert W \rVert^2`: below :math:`\lVert W \rVert^2 = \eta\lambda_1/2` the weight
        changes sign and grows. Under `floor` the term is constant and lets go. A step then moves no norm by more
        than a quarter if :math:`\eta / (1 - \text{momentum})^2 \le \text{floor}^2 / 4\lambda_1`
        (:attr:`largest_rate`; momentum carries a weight on below the floor). `Penalty` gives every weight a floor of
        its own where none is set: :math:`\sqrt{40\lambda_1}`, right for a rate of 0.1 with momentum 0.9, or half of
        the norm that it starts from if that is less. :meth:`gonio.Penalty.check` holds an optimizer against it.

    A weight that a normalisation layer follows has no scale that the loss could defend, so the term would
    shrink it to the floor and raise its effective learning rate all the while: `Penalty` leaves such weights
    out and says so. It also leaves out weights that are zero when it is built (zero-initialised branches).

    Args:
        strength: :math:`\lambda_1`. The paper's values are not known to us; there is no default.
        direction_strength: :math:`\lambda_2`.
        floor: the norm below which the first term is constant; None for 1e-3, and in a `Penalty` for
            one that fits the weight.
        direction_scale: `"none"`, or `"sqrt_numel"` to divide the L1 norm, which ranges over
            :math:`[1, \sqrt n]`, by :math:`\sqrt n`, so that layers of different size count alike.
        before_norm: `"skip"` or `"keep"` weights that a normalisation layer follows; read by `Penalty`.

    Invariances:
        Above the floor: multiplying layers by factors whose product is 1 (summed over layers). Not invariant
        under rescaling single neurons.

    Raises:
        InvalidArgumentError: for values out of range.

    Example:
        >>> log_norm = gonio.regularizers.ScaleShift(1.0, floor=0.1)
        >>> a, b = torch.eye(4), torch.ones(2, 2)
        >>> torch.allclose(log_norm(a) + log_norm(b), log_norm(3 * a) + log_norm(b / 3))
        True

    See also:
        :func:`gonio.balance_`, which takes what L2 could gain by moving scale.

    References:
        [1] Z. Liu, Y. Cui, J. Wan, Y. Mao, A. B. Chan, "Improve generalization and robustness of neural networks
        via weight scale shifting invariant regularizations", 2020, Eq. (8). https://arxiv.org/abs/2008.02965

    Differs:
        The paper has no floor. A second-hand account prints the second term with an L2 norm, which is the
        constant 1; here it is the L1 norm that its text describes.
    """

    scale_only: ClassVar[bool] = True
    logarithmic: ClassVar[bool] = True
    compilable: ClassVar[bool] = True

    direction_strength: float = 0.0
    floor: float | None = None
    direction_scale: Literal["none", "sqrt_numel"] = "none"
    before_norm: Literal["skip", "keep"] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.direction_strength >= 0 and (self.strength > 0 or self.direction_strength == 0),
            "ScaleShift() needs direction_strength >= 0, and strength > 0 beside it",
            f"strength={self.strength}, direction_strength={self.direction_strength}",
            "The value is taken relative to strength; give it a small one.",
        )
        require(
            self.floor is None or self.floor > 0,
            "ScaleShift() needs floor > 0",
            f"floor={self.floor}",
            "Without a floor the term has no minimum; leave it out for one that fits.",
        )
        require(
            self.direction_scale in ("none", "sqrt_numel"),
            "ScaleShift(direction_scale=…) takes 'none' or 'sqrt_numel'",
            repr(self.direction_scale),
            "'none' is the paper's.",
        )
        check_before_norm(self.before_norm, "ScaleShift")

    @classmethod
    def paper(cls, strength: float = 1.0, direction_strength: float = 1.0) -> ScaleShift:
        """The published form: no floor to speak of, the plain L1 norm, weights before normalisation included.

        Unsafe as published: see Note [Floor]. The floor of 1e-12 only keeps zero weights finite. The paper's own
        strengths are not known to us; the defaults take the formula as printed.
        """
        return cls(strength, direction_strength=direction_strength, floor=1e-12, before_norm="keep")

    @property
    def effective_floor(self) -> float:
        """The norm below which the first term is constant."""
        return LEAST_FLOOR if self.floor is None else self.floor

    @property
    def largest_rate(self) -> float:
        """lr / (1 − momentum)² up to which no step of SGD moves a norm by more than a quarter."""
        return self.effective_floor**2 / (4 * self.strength * self.every) if self.strength else math.inf

    def fitted(self, norm: float) -> ScaleShift:
        """The same with a floor for a weight that starts from this norm, unless one is set.

        Example:
            >>> [gonio.regularizers.ScaleShift(1e-3).fitted(norm).floor for norm in (0.1, 100.0)]
            [0.05, 0.2]
        """
        if self.floor is not None:
            return self
        safe = 2 * math.sqrt(USUAL_RATE * self.strength * self.every)
        return dataclasses.replace(self, floor=max(LEAST_FLOOR, min(norm / 2, safe)))

    def _closed(self, weight: Tensor, layout: Layout) -> Closed:
        rows = weight.unflatten(0, (layout.blocks, -1)).flatten(1)
        formula = LogNorm(self.effective_floor, self._share(rows.shape[1]))
        return Closed(formula, rows, names=NAMES if formula.share else ())

    @staticmethod
    def add_gradients_(additions: Sequence[Addition], *, backend: str | None = None) -> list[Evaluation]:
        with torch.no_grad():
            rows = [_rows(addition) for addition in additions]
        flat = [row for some in rows for row in some]
        if not flat:
            return [addition.carry_out_() for addition in additions]
        with torch.no_grad(), full_precision(flat[0].x):
            found = iter(add_rows_(flat) if backend is None else add_rows_compiled_(flat, backend))
        sums = [_summed([next(found) for _ in some]) for some in rows]
        numbers = iter(torch.tensor(sums, dtype=torch.float64).view(-1).unbind())
        values = zip(numbers, numbers, numbers, strict=True)  # three at a time
        return [
            Evaluation(value, dict(zip(NAMES, terms, strict=True)) if some[0].formula.share else {})
            if some
            else addition.carry_out_()
            for addition, some, (value, *terms) in zip(additions, rows, values, strict=True)
        ]

    def _share(self, entries: int) -> float:
        """The coefficient of the L1 norm at strength 1."""
        if not self.strength:
            return 0.0
        unit = math.sqrt(entries) if self.direction_scale == "sqrt_numel" else 1.0
        return self.direction_strength / (self.strength * unit)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        least = math.log(self.effective_floor) + self._share(weight.numel() // layout.blocks)
        return weight.new_tensor(layout.blocks * least)


def _rows(addition: Addition) -> list[Row]:
    """The matrices of a weight as rows that lie in memory one after another; none if they do not."""
    regularizer, target, x, layout, factor, _ = addition
    plain = x.device.type == "cpu" and can_add_directly(target, x) and x.is_contiguous() and target.is_contiguous()
    if not plain or not isinstance(regularizer, ScaleShift):
        return []
    blocks = layout.blocks
    formula = _log_norm(regularizer.effective_floor, regularizer._share(x.numel() // blocks))
    if blocks == 1:
        return [Row(x, target, formula, factor)]
    pairs = zip(x.view(blocks, -1).unbind(), target.view(blocks, -1).unbind(), strict=True)
    return [Row(a, b, formula, factor) for a, b in pairs]


_log_norm = lru_cache(maxsize=1024)(LogNorm)  # made at every step for every layer, whose numbers stay


def _summed(values: list[tuple[float, float]]) -> tuple[float, float, float]:
    """The value and its two terms, from those of the rows."""
    scale, direction = sum(v[0] for v in values), sum(v[1] for v in values)
    return scale + direction, scale, direction
