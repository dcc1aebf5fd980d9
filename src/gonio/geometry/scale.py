"""How unevenly scale is spread over the layers of a chain, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import widen, widest

__all__ = ["least_scale", "scale_imbalance"]


def least_scale(weights: Iterable[Tensor]) -> Tensor:
    r"""Least sum of squared norms among all ways to move scale between the layers.

    .. math::
        \min_{\prod\gamma_l = 1} \sum_l \lVert \gamma_l W_l \rVert^2 = L \Big(\prod_l \lVert W_l \rVert^2\Big)^{1/L}

    attained when all norms are equal (AM–GM). In a network with positively homogeneous activations all these
    weights, with biases scaled by the cumulative product, compute the same function. The gradient at one layer
    grows as the inverse of its norm: beyond float16 for a layer far smaller than the others.

    Raises:
        InvalidArgumentError: if there is no weight.

    Example:
        >>> gonio.geometry.least_scale([torch.tensor([4.0]), torch.tensor([1.0])])
        tensor(8.)

    References:
        [1] Z. Liu et al., "Improve generalization and robustness of neural networks via weight scale shifting
        invariant regularizations", 2020, §3. https://arxiv.org/abs/2008.02965
    """
    squares, dtype = _squares(weights, "least_scale")
    return (len(squares) * _geometric_mean(squares)).to(dtype)


def scale_imbalance(weights: Iterable[Tensor]) -> Tensor:
    r"""Squared norm that moving scale between layers would save: the *wasted* L2.

    .. math:: \sum_l \lVert W_l \rVert^2 - L \Big(\prod_l \lVert W_l \rVert^2\Big)^{1/L} \ge 0

    0 exactly when all layers have the same norm. Weight decay can be lowered by that much without changing
    the function of a positively homogeneous chain, which is why L2 alone says little about it.

    Args:
        weights: one tensor per layer, of any shapes; tied weights once.

    Returns:
        A scalar in float32 at least, differentiable. If a layer is zero, all of the rest is waste.

    Invariances:
        Permuting layers; not rescaling them, which is the point.

    Raises:
        InvalidArgumentError: if there is no weight.

    Example:
        >>> gonio.geometry.scale_imbalance([torch.tensor([4.0]), torch.tensor([1.0])])
        tensor(9.)
        >>> gonio.geometry.scale_imbalance([torch.tensor([2.0]), torch.tensor([2.0])])
        tensor(0.)

    References:
        [1] As :func:`least_scale`, whose equation (4) misprints each norm of the minimum as the sum.
    """
    squares, dtype = _squares(weights, "scale_imbalance")
    return (squares.sum() - len(squares) * _geometric_mean(squares)).clamp_min(0).to(dtype)


def _squares(weights: Iterable[Tensor], function: str) -> tuple[Tensor, torch.dtype]:
    """Squared norms in float64, where they do not overflow and differences keep their digits; the result's dtype."""
    wide = [widen(w) for w in weights]
    if not wide:
        raise InvalidArgumentError(f"{function}() needs at least one weight", "none", "Pass the weights of a chain.")
    dtype = torch.float64 if any(w.dtype == torch.float64 for w in wide) else torch.float32
    return torch.stack([w.to(widest(w)).square().sum() for w in wide]), dtype


def _geometric_mean(squares: Tensor) -> Tensor:
    zero = (squares == 0).any()
    return squares.masked_fill(squares == 0, 1).log().mean().exp() * ~zero
