"""Powers of the norm of a weight, L2 among them; and what all penalties of the scale alone share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.views import Layout, matrix_view
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


@dataclass(frozen=True, kw_only=True)
class NormPower(ScaleRegularizer):
    r"""A power of the norm of a weight, :math:`\lVert W \rVert^p / p`; 0 for a weight that is 0.

    Each is one :math:`\varphi(\lVert W \rVert)` with an increasing :math:`\varphi`: `power=2` is :class:`L2`, and
    `power=1` the group lasso with the whole weight as the group, whose gradient has length 1. All of them fall when
    scale moves between layers; only the logarithm, :class:`ScaleShift`, does not. Groups of a convolution and stacked
    matrices count each for themselves, and are added.

    Args:
        power: :math:`p`, from 1 on.

    Invariances:
        Rotations on either side, permutations, flips.

    Raises:
        InvalidArgumentError: `power` is below 1 or not finite.

    Example:
        >>> gonio.regularizers.NormPower(1.0, power=1.0)(torch.tensor([[3.0, 4.0]]))
        tensor(5.)

    References: M. Yuan and Y. Lin, "Model selection and estimation in regression with grouped variables", J. R.
        Statist. Soc. B 68, 2006, §2.
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.power <= 16:  # above, powers of usual norms are not in float32
            raise InvalidArgumentError("NormPower(power=) must be from 1 to 16", repr(self.power), "Pass 1.0 or 1.5.")

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        squares = matrix_view(weight, layout).square().sum((1, 2))
        zero = squares == 0  # where the root has no derivative
        powers = squares.masked_fill(zero, 1).pow(self.power / 2) / self.power
        return Evaluation(powers.masked_fill(zero, 0).sum())
