"""A step of training as a rotation: how far a weight turned, by what share of its norm it moved, how radially."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.execution import is_sharded
from gonio.geometry.angles import turned
from gonio.geometry.norms import whole
from gonio.measuring.training.shards import ShardSums, local, waits


@dataclass(frozen=True, eq=False)
class StepRotation:
    """The figures of :func:`step_rotation`, as float64 tensors: one number, or one per row.

    Attributes:
        norm: of the weight before the step.
        rotation: angle in radians between the weight before and after the step.
        relative_update: norm of the change over the norm of the weight.
        radial_share: share of the squared change along the weight, between 0 and 1. For a random direction it is 1/d
            with standard deviation √2/d, where d is the number of entries. NaN where nothing changed.
    """

    norm: Tensor
    rotation: Tensor
    relative_update: Tensor
    radial_share: Tensor

    @classmethod
    def of(cls, sums: Tensor) -> StepRotation:
        """The figures of the sums of :func:`step_sums`."""
        squares, moved, product = sums
        norm = squares.sqrt()
        radial = product / norm
        return cls(norm, turned(squares, moved, product), moved.sqrt() / norm, radial.square() / moved)


def step_rotation(before: Tensor, after: Tensor, *, by_row: bool = False) -> StepRotation:
    r"""How far a step turned a weight.

    With the weight w before the step, its change Δ and n = ‖w‖, the radial part of the change is r = ⟨Δ, w⟩/n and the
    tangential part q = √(‖Δ‖² − r²). The rotation is atan2(q, n + r), the relative update ‖Δ‖/n and the radial share
    r²/‖Δ‖². Sums are in float64. Unlike the arccos of a cosine, which is 0 for angles below 1e-8 in float64 and 3e-4 in
    float32, the arctangent is accurate for small angles. The limit is the change: a q below 1e-7 ‖Δ‖, which is lost in
    the rounding of ‖Δ‖² − r², counts as 0.

    Args:
        before, after: tensors of the same shape; sharded ones are summed over all shards.
        by_row: figures of each row, that is, each vector along the last dimension; otherwise of the whole tensor.

    Raises:
        InvalidArgumentError: if the shapes differ.

    Example:
        >>> before, after = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-6])
        >>> f"{gonio.measuring.step_rotation(before, after).rotation:.3e}"
        '1.000e-06'
        >>> float(torch.arccos(torch.cosine_similarity(before, after, dim=0)))
        0.0

    Source: Kosson, Messmer and Jaggi, "Rotational Equilibrium", arXiv 2305.17212, §2 (angular update).
    """
    if before.shape != after.shape:
        raise InvalidArgumentError(
            "step_rotation() takes the same weight before and after a step",
            f"shapes {tuple(before.shape)} and {tuple(after.shape)}",
            "Pass two tensors of one shape.",
        )
    if is_sharded(before) and (by_row or waits(before)):
        return StepRotation.of(step_sums(before, after, by_row=by_row))
    total = ShardSums()
    sums = total.add(before, found := step_sums(local(before), local(after), by_row=by_row))
    total.reduce()
    return StepRotation.of(sums().view(found.shape))


def step_sums(before: Tensor, after: Tensor, *, by_row: bool = False) -> Tensor:
    """Σ w², Σ Δ² and Σ Δ·w over everything, or over the last dimension, in float64; sums of all shards are added."""
    w = before.detach().double()
    change = after.detach() - w  # in float64
    pairs = ((w, w), (change, change), (change, w))
    if by_row or is_sharded(w):
        return torch.stack([whole((a * b).sum(-1) if by_row else (a * b).sum()) for a, b in pairs])
    return torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in pairs])
