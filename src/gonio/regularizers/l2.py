"""L2: half the squared norm of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gonio.geometry.norms import widest
from gonio.geometry.views import Layout
from gonio.regularizers.base import ClosedFormRegularizer, require
from gonio.regularizers.closed_form import Closed, Formula

__all__ = ["L2", "check_before_norm"]


@dataclass(frozen=True, kw_only=True)
class L2(ClosedFormRegularizer):
    r"""Half the squared Euclidean norm of a weight, :math:`\tfrac12 \lVert W \rVert^2`.

    With plain SGD the same as ``weight_decay=strength``; with Adam not, because the gradient is normalised
    (use AdamW's decay for that). It can be lowered without any change of the function by moving scale between
    layers, and where a normalisation layer follows it only raises the effective learning rate: `Penalty`
    leaves such weights out and says so.

    Args:
        strength: as SGD's ``weight_decay``.
        before_norm: `"skip"` or `"keep"` weights that a normalisation layer follows; read by `Penalty`.

    Invariances:
        Rotations on either side, permutations, flips.

    Raises:
        InvalidArgumentError: for an unknown value of `before_norm`.

    Example:
        >>> gonio.regularizers.L2(0.1)(torch.tensor([[3.0, 4.0]]))
        tensor(1.2500)

    See also:
        :class:`ScaleShift`, which scale moved between layers does not change.
    """

    scale_only: ClassVar[bool] = True

    before_norm: Literal["skip", "keep"] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_before_norm(self.before_norm, "L2")

    def _closed(self, weight: Tensor, layout: Layout) -> Closed:
        return Closed(_HalfSquare(), weight)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        return weight.new_zeros(())


def check_before_norm(before_norm: str, name: str) -> None:
    """Raise unless `before_norm` is one of the two words that it may be."""
    require(
        before_norm in ("skip", "keep"),
        f"{name}(before_norm=…) takes 'skip' or 'keep'",
        repr(before_norm),
        "'keep' penalises weights that a normalisation layer follows, too.",
    )


class _HalfSquare(Formula):
    """½‖x‖²; gradient x."""

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        return (0.5 * x.square().sum(),)

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        norm = torch.linalg.vector_norm(x, dtype=widest(x)).to(x.dtype)  # its float32 sum is off by 5e-4 at a million
        return (0.5 * norm * norm,), ()

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        return x * factor

    def add_gradient_(self, target: Tensor, x: Tensor, saved: tuple[Tensor, ...], factor: float) -> None:
        target.add_(x, alpha=factor)
