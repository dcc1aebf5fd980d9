"""WEISSI: a penalty on scale that does not change when scale moves between layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.execution import is_sharded
from gonio.geometry.norms import WIDE, whole
from gonio.geometry.scale import HOMOGENEOUS
from gonio.geometry.views import Layout
from gonio.regularizers.base import AddGradient, Evaluation, require
from gonio.regularizers.kernels import compiled_log_norm, log_norm
from gonio.regularizers.l2 import ScaleRegularizer

LEAST_FLOOR = 1e-3
_MOST_BLOCKS = 16
USUAL_RATE = 10.0  # lr / (1 − momentum)² of lr 0.1 with momentum 0.9


@dataclass(frozen=True, kw_only=True)
class ScaleShift(ScaleRegularizer):
    r"""The logarithm of a weight's norm, and optionally the L1 norm of its direction.

    .. math::
        \lambda_1 \log \max(\lVert W \rVert, \text{floor}) + \lambda_2 \Bigl\lVert \frac{W}{\lVert W \rVert}
        \Bigr\rVert_1

    with :math:`\lambda_1` = `strength`, :math:`\lambda_2` = `direction_strength` and the Euclidean norm of the
    whole weight (of each stacked block, where a weight is several matrices in one). Summed over the layers of a
    positively homogeneous network the first term is :math:`\log \prod_l \lVert W_l \rVert`, which moving scale
    from layer to layer does not change; L2 can be lowered that way without any change of the function. The gradient of
    the second term is orthogonal to W.

    Note [Floor]
        One step of SGD multiplies W by :math:`1 - \eta\lambda_1/\lVert W \rVert^2`: below
        :math:`\lVert W \rVert^2 = \eta\lambda_1/2` the weight changes sign and grows. Below `floor` the term is
        constant. A step then changes no norm by more than a quarter if
        :math:`\eta / (1 - \text{momentum})^2 \le \text{floor}^2 / 4\lambda_1` (:attr:`largest_rate`). `Penalty` gives
        every weight a floor of its own where none is set: :math:`\sqrt{40\lambda_1}`, which suits a rate of 0.1 with
        momentum 0.9, or half of the initial norm if that is less. :meth:`gonio.Penalty.check` compares an optimizer.

    In front of a normalisation layer the term would shrink a weight to the floor and raise its effective learning rate:
    `Penalty` leaves such weights out (unless ``before_norm="keep"``), and weights that are zero when it is built.

    Args:
        strength: :math:`\lambda_1`. The paper's values are not known to us; there is no default.
        direction_strength: :math:`\lambda_2`.
        floor: the norm below which the first term is constant; None for 1e-3, and in a `Penalty` for one fitted to
            the weight.
        direction_scale: `"none"`, or `"sqrt_numel"` to divide the L1 norm, which ranges over
            :math:`[1, \sqrt n]`, by :math:`\sqrt n`, so that layers of different size count alike.

    In transformers `Penalty(heads=gonio.surgery.anatomy(model))` sums it over pairs of parts instead: :math:`\log
    \lVert W_v \rVert + \log \lVert W_o \rVert` for each head of keys and values, with the columns of all heads that
    read it, the same of its queries and keys, and of the row and the column of each unit of an MLP with a gate or ReLU
    (with the degree n of the activation, :math:`n \log \lVert w_{up} \rVert + \log \lVert w_{down} \rVert`). Scale that
    moves within a pair does not change it; over whole weights it does, from head to head.

    Invariances:
        Above the floor: multiplying layers by factors whose product is 1 (summed over layers); with `heads`, the parts
        of each pair. Not invariant under rescaling single neurons otherwise.

    Example:
        >>> log_norm = gonio.regularizers.ScaleShift(1.0, floor=0.1)
        >>> a, b = torch.eye(4), torch.ones(2, 2)
        >>> torch.allclose(log_norm(a) + log_norm(b), log_norm(3 * a) + log_norm(b / 3))
        True

    References:
        [1] Z. Liu, et al., "Improve generalization and robustness of neural networks
        via weight scale shifting invariant regularizations", 2020, Eq. (8). https://arxiv.org/abs/2008.02965

    Differs:
        The paper has no floor. A second-hand account prints the second term with an L2 norm, which is the
        constant 1; here it is the L1 norm that its text describes.
    """

    direction_strength: float = 0.0
    floor: float | None = None
    direction_scale: Literal["none", "sqrt_numel"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.direction_strength >= 0 and (self.strength > 0 or self.direction_strength == 0),
            "ScaleShift() needs direction_strength >= 0, and strength > 0 beside it",
            f"strength={self.strength}, direction_strength={self.direction_strength}",
            "The value is relative to strength; use a small strength.",
        )
        require(
            self.floor is None or self.floor > 0,
            "ScaleShift() needs floor > 0",
            f"floor={self.floor}",
            "Without a floor the term has no minimum; leave it out for a fitted one.",
        )

    @classmethod
    def paper(cls, strength: float = 1.0, direction_strength: float = 1.0) -> ScaleShift:
        """The published form: a floor of 1e-12, the plain L1 norm, weights before normalisation included.

        Unsafe as published: see Note [Floor]. The defaults are those of the printed formula.
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
        """This regularizer with a floor for a weight of this initial norm, unless one is set.

        Example:
            >>> [gonio.regularizers.ScaleShift(1e-3).fitted(norm).floor for norm in (0.1, 100.0)]
            [0.05, 0.2]
        """
        if self.floor is not None:
            return self
        safe = 2 * math.sqrt(USUAL_RATE * self.strength * self.every)
        return dataclasses.replace(self, floor=max(LEAST_FLOOR, min(norm / 2, safe)))

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        least, share = self._least(weight.dtype), self._share(weight, layout)
        return _evaluation(*_terms(_blocks(weight, layout), layout, least, share), named=share > 0)

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        least, share = self._least(weight.dtype), self._share(weight, layout)
        scale, direction, gradient = _with_gradient(_blocks(weight, layout), layout, least, share)
        return _evaluation(scale, direction, named=share > 0), gradient.view(weight.shape)

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        return weight.new_tensor(layout.blocks * (math.log(self.effective_floor) + self._share(weight, layout)))

    @property
    def reads_pairs(self) -> bool:
        return True

    def _least(self, dtype: torch.dtype) -> float:
        """The squared norm up to which the first term is constant."""
        return max(self.effective_floor**2, torch.finfo(dtype).tiny)

    def _share(self, weight: Tensor, layout: Layout) -> float:
        """The coefficient of the L1 norm at strength 1."""
        if not self.strength:
            return 0.0
        unit = math.sqrt(weight.numel() // layout.blocks) if self.direction_scale == "sqrt_numel" else 1.0
        return self.direction_strength / (self.strength * unit)

    # --- hooks for `gonio.Penalty` ----------------------------------------------------------------

    def compiled(self, backend: str) -> AddGradient:
        add_ = compiled_log_norm(backend)

        def add_gradient_(
            grad: Tensor, weight: Tensor, layout: Layout, *, factor: float, state: Tensor | None = None
        ) -> Evaluation:
            few = layout.blocks <= _MOST_BLOCKS  # each is a call of its own
            plain = few and weight.is_contiguous() and grad.is_contiguous() and grad.dtype is weight.dtype
            if not plain or weight.dtype not in WIDE or is_sharded(weight):
                return self.add_gradient_(grad, weight, layout, factor=factor, state=state)
            share = self._share(weight, layout)
            numbers = [
                torch.tensor(number, dtype=weight.dtype, device="cpu")
                for number in (factor, self._least(weight.dtype), share)
            ]
            blocks = zip(*(x.detach().view(layout.blocks, -1).unbind() for x in (grad, weight)), strict=True)
            terms = [add_(target, x, *numbers) for target, x in blocks]
            return _evaluation(*_totals(terms), named=share > 0)

        return add_gradient_

    def reason_to_skip(self, weight: Tensor) -> str | None:
        if weight.is_meta or bool(whole((weight.detach() != 0).sum())):  # a shard alone may be empty or zero
            return None
        return "is zero at the start, where its logarithm is undefined"

    @torch.no_grad()
    def fitted_to(self, weight: Tensor, layout: Layout) -> ScaleShift:
        if weight.is_meta or self.floor is not None:
            return self
        squares = _sums(_blocks(weight, layout).float().square(), layout)
        return self.fitted(float(whole(squares).min().sqrt()))

    def remark(self, activation_after: Callable[[], str | None]) -> str:
        floor, rate = self.effective_floor, self.largest_rate
        said = f"constant below norm {floor:.3g}; safe for lr / (1 - momentum)² up to {rate:.3g}"
        activation = activation_after()
        if activation is None or activation in HOMOGENEOUS:
            return said
        return f"{said}; {activation} follows, which is not homogeneous: moving scale changes the function"

    def check_step(self, label: str, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            return
        rate = float(group["lr"]) / (1 - group["momentum"]) ** 2
        if rate > self.largest_rate * (1 + 1e-9):
            needed = 2 * (rate * self.strength * self.every) ** 0.5
            raise InvalidArgumentError(
                f"{label} holds a weight above norm {self.effective_floor:.3g}, which is safe for "
                f"lr / (1 - momentum)² up to {self.largest_rate:.3g}",
                f"lr={float(group['lr']):g}, momentum={group['momentum']:g}, hence {rate:.3g}",
                f"Lower the rate or the strength, or set floor={needed:.3g}.",
            )


def _blocks(weight: Tensor, layout: Layout) -> Tensor:
    """The weight, or (blocks, entries) where it is several; then a sharded one is gathered, as shards may cut them."""
    return weight if layout.blocks == 1 else whole(weight).reshape(layout.blocks, -1)


def _sums(x: Tensor, layout: Layout) -> Tensor:
    """The sum of a weight, or of each of its blocks (blocks, 1), as :func:`_blocks` gives them."""
    return x.sum() if layout.blocks == 1 else x.sum(1, keepdim=True)


def _terms(x: Tensor, layout: Layout, least: float, share: float) -> tuple[Tensor, Tensor]:
    """log √max(‖W‖², least) and share · ‖W‖₁/‖W‖, summed over the blocks."""
    square = _sums(x * x, layout)
    scale = 0.5 * square.clamp_min(least).log()
    zero = square <= torch.finfo(x.dtype).tiny
    inverse = square.masked_fill(zero, 1).rsqrt().masked_fill(zero, 0)
    return _totals([(scale, share * _sums(x.abs(), layout) * inverse)])


def _with_gradient(x: Tensor, layout: Layout, least: float, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_terms` and the gradient of their sum."""
    square = _sums(x * x, layout)
    absolute = _sums(x.abs(), layout) if share else torch.zeros_like(square)
    scale, direction, on_weight, on_sign = log_norm(square, absolute, least, share)
    gradient = x.sign().mul_(on_sign).addcmul_(x, on_weight) if share else x * on_weight
    return *_totals([(scale, direction)]), gradient


def _totals(terms: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sums of both terms over the blocks."""
    if len(terms) == 1 and terms[0][0].ndim == 0:
        return terms[0]
    scale, direction = (torch.stack(each).sum() for each in zip(*terms, strict=True))
    return scale, direction


def _evaluation(scale: Tensor, direction: Tensor, *, named: bool) -> Evaluation:
    """The evaluation from the sums of both terms."""
    if not named:
        return Evaluation(scale)
    return Evaluation(scale + direction, {"scale": scale.detach(), "direction": direction.detach()})
