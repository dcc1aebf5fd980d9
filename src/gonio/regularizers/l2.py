"""L2: half the squared norm of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from gonio.geometry.views import Layout
from gonio.regularizers.base import Evaluation, WeightRegularizer, require

__all__ = ["L2", "check_before_norm"]


@dataclass(frozen=True, kw_only=True)
class L2(WeightRegularizer):
    r"""Half the squared Euclidean norm of a weight, :math:`\tfrac12 \lVert W \rVert^2`.

    With plain SGD it equals ``weight_decay=strength``; with Adam it does not, because the gradient is normalised
    (use AdamW's decay for that). It can be lowered without any change of the function by moving scale between
    layers. Where a normalisation layer follows, it only raises the effective learning rate: `Penalty`
    leaves such weights out and reports it.

    Args:
        strength: as SGD's ``weight_decay``.
        before_norm: `"skip"` or `"keep"` weights in front of a normalisation layer; read by `Penalty`.

    Invariances:
        Rotations on either side, permutations, flips.

    Raises:
        InvalidArgumentError: for an unknown value of `before_norm`.

    Example:
        >>> gonio.regularizers.L2(0.1)(torch.tensor([[3.0, 4.0]]))
        tensor(1.2500)

    See also:
        :class:`ScaleShift`, which does not change when scale moves between layers.
    """

    scale_only: ClassVar[bool] = True

    before_norm: Literal["skip", "keep"] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_before_norm(self.before_norm, "L2")

    @property
    def skips_before_norm(self) -> bool:
        return self.before_norm == "skip"

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        return Evaluation(0.5 * weight.square().sum())

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        return self._evaluate(weight, layout, state), weight


def check_before_norm(before_norm: str, name: str) -> None:
    """Raise unless `before_norm` is `"skip"` or `"keep"`."""
    require(
        before_norm in ("skip", "keep"),
        f"{name}(before_norm=…) takes 'skip' or 'keep'",
        repr(before_norm),
        "'keep' also penalises weights in front of a normalisation layer.",
    )
