"""WEISSI: a penalty on scale that cannot be lowered by moving scale between layers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gonio.geometry.views import Layout
from gonio.regularizers.base import ClosedFormRegularizer, require
from gonio.regularizers.closed_form import Closed, Formula
from gonio.regularizers.l2 import check_before_norm

__all__ = ["ScaleShift"]

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
        formula = _LogNorm(self.effective_floor, self._share(rows.shape[1]))
        return Closed(formula, rows, names=("scale", "direction") if formula.share else ())

    def _share(self, entries: int) -> float:
        """The coefficient of the L1 norm at strength 1."""
        if not self.strength:
            return 0.0
        unit = math.sqrt(entries) if self.direction_scale == "sqrt_numel" else 1.0
        return self.direction_strength / (self.strength * unit)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        least = math.log(self.effective_floor) + self._share(weight.numel() // layout.blocks)
        return weight.new_tensor(layout.blocks * least)


# The L1 norm and the signs are taken in pieces that stay in cache: their temporaries cost more than the reading.
PIECE = 1 << 17


@dataclass(frozen=True)
class _LogNorm(Formula):
    """Σ over rows of log max(‖x‖, floor) + share · ‖x‖₁/‖x‖; gradient a x + b sign(x)."""

    results: ClassVar[int] = 3
    floor: float
    share: float

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        square = (x * x).sum(-1)
        scale = 0.5 * square.clamp_min(max(self.floor**2, torch.finfo(x.dtype).tiny)).log().sum()
        zero = square < torch.finfo(x.dtype).tiny
        inverse = square.masked_fill(zero, 1).rsqrt().masked_fill(zero, 0)
        direction = self.share * (x.abs().sum(-1) * inverse).sum()
        return scale + direction, scale, direction

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        norm = torch.linalg.vector_norm(x, dim=-1)
        low = norm <= self.floor
        zero = norm < torch.finfo(x.dtype).tiny ** 0.5
        inverse = norm.masked_fill(zero, 1).reciprocal().masked_fill(zero, 0)
        scale = norm.clamp_min(self.floor).log().sum()
        on_weight = (inverse * inverse).masked_fill(low, 0)
        direction, on_sign = torch.zeros_like(scale), torch.zeros_like(norm)
        if self.share:
            absolute = torch.stack([piece.abs().sum(-1) for piece in x.split(PIECE, -1)]).sum(0)
            direction = self.share * (absolute * inverse).sum()
            on_sign = self.share * inverse
            on_weight = on_weight - self.share * absolute * inverse**3
        return (scale + direction, scale, direction), (on_weight, on_sign)

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        on_weight, on_sign = ((factor * s).unsqueeze(-1) for s in saved)
        if not self.share:
            return x * on_weight
        return x.sign().mul_(on_sign).addcmul_(x, on_weight)

    def evaluate_and_add_(self, target: Tensor, x: Tensor, factor: float) -> tuple[Tensor, ...]:
        if x.device.type != "cpu":  # reading the coefficients would wait for the device
            return super().evaluate_and_add_(target, x, factor)
        scale = direction = 0.0
        scratch = x.new_empty(min(PIECE, x.shape[1]))
        for row, goal in zip(x.unbind(), target.unbind(), strict=True):
            norm, absolute = _norms(row, scratch if self.share else None)
            scale += math.log(max(norm, self.floor))
            on_weight, on_sign = 0.0, 0.0
            if not norm < torch.finfo(x.dtype).tiny ** 0.5:  # a NaN passes, and shows
                on_sign = self.share / norm
                on_weight = (norm > self.floor) / norm**2 - on_sign * absolute / norm**2
                direction += on_sign * absolute
            _add(goal, row, factor * on_weight, factor * on_sign, scratch)
        return x.new_tensor(scale + direction), x.new_tensor(scale), x.new_tensor(direction)


def _norms(row: Tensor, scratch: Tensor | None) -> tuple[float, float]:
    """‖x‖ and, where there is room to compute it, ‖x‖₁; read from memory once."""
    square = absolute = 0.0
    for piece in row.split(PIECE):
        square += float(torch.dot(piece, piece))
        if scratch is not None:
            absolute += float(torch.abs(piece, out=scratch[: len(piece)]).sum())
    return math.sqrt(square), absolute


def _add(target: Tensor, row: Tensor, on_weight: float, on_sign: float, scratch: Tensor) -> None:
    """target ← target + on_weight · x + on_sign · sign(x)."""
    for piece, part in zip(row.split(PIECE), target.split(PIECE), strict=True):
        part.add_(piece, alpha=on_weight)
        if on_sign:
            part.add_(torch.sign(piece, out=scratch[: len(piece)]), alpha=on_sign)
