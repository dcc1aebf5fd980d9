"""L2: half the squared norm of a weight; and what all penalties of the scale alone share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from gonio.geometry.views import Layout
from gonio.regularizers.base import Evaluation, WeightRegularizer


@dataclass(frozen=True, kw_only=True)
class ScaleRegularizer(WeightRegularizer):
    """A regularizer of the scale of a weight only, which a following normalisation layer removes.

    Args:
        before_norm: `"skip"` or `"keep"` weights in front of a normalisation layer; read by `Penalty`.
    """

    scale_only: ClassVar[bool] = True

    before_norm: Literal["skip", "keep"] = "skip"

    @property
    def skips_before_norm(self) -> bool:
        return self.before_norm == "skip"


@dataclass(frozen=True, kw_only=True)
class L2(ScaleRegularizer):
    r"""Half the squared Euclidean norm of a weight, :math:`\tfrac12 \lVert W \rVert^2`.

    With plain SGD it equals ``weight_decay=strength``; with Adam it does not, because the gradient is normalised
    (use AdamW's decay for that). It can be lowered without any change of the function by moving scale between
    layers. Where a normalisation layer follows, it only raises the effective learning rate: `Penalty`
    leaves such weights out and reports it, unless ``before_norm="keep"``.

    Invariances:
        Rotations on either side, permutations, flips.

    Example:
        >>> gonio.regularizers.L2(0.1)(torch.tensor([[3.0, 4.0]]))
        tensor(1.2500)

    See also:
        :class:`ScaleShift`, which does not change when scale moves between layers.
    """

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        return Evaluation(0.5 * weight.square().sum())

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        return self._evaluate(weight, layout, state), weight
