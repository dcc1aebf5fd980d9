"""A step of training as a rotation: how far a weight turned, by what share of its norm it moved, how radially."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.execution import is_sharded
from gonio.geometry.norms import whole


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


def step_rotation(before: Tensor, after: Tensor, *, by_row: bool = False) -> StepRotation:
    r"""How far a step turned a weight.

    With the weight w before the step, its change Δ and n = ‖w‖, the radial part of the change is r = ⟨Δ, w⟩/n and the
    tangential part q = √(‖Δ‖² − r²). The rotation is atan2(q, n + r), the relative update ‖Δ‖/n and the radial share
    r²/‖Δ‖². Unlike the arccos of a cosine, which is 0 for angles below 1e-8 in float64 and 3e-4 in float32, the
    arctangent is accurate for every angle. Sums are in float64.

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
    w = before.detach().double()
    change = after.detach() - w  # in float64
    norm, moved = _squares(w, w, by_row).sqrt(), _squares(change, change, by_row)
    radial = _squares(change, w, by_row) / norm
    tangential = (moved - radial.square()).clamp(min=0).sqrt()
    rotation = torch.atan2(tangential, norm + radial)
    return StepRotation(norm, rotation, moved.sqrt() / norm, radial.square() / moved)


def angle_between(a: Tensor, b: Tensor) -> float:
    """Angle between two weights in radians, 2·atan2(‖â − b̂‖, ‖â + b̂‖), which is accurate near 0 and π.

    Example:
        >>> from gonio.measuring.training.rotation import angle_between
        >>> round(angle_between(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])), 6)
        0.785398
    """
    a, b = a.detach().double(), b.detach().double()
    a, b = a / _squares(a, a, False).sqrt(), b / _squares(b, b, False).sqrt()
    apart, together = a - b, a + b
    return 2 * float(torch.atan2(_squares(apart, apart, False).sqrt(), _squares(together, together, False).sqrt()))


def _squares(a: Tensor, b: Tensor, by_row: bool) -> Tensor:
    """Σ a·b over everything or over the last dimension, over all shards."""
    if not by_row and not is_sharded(a):
        return torch.dot(a.flatten(), b.flatten())
    return whole((a * b).sum(-1) if by_row else (a * b).sum())
