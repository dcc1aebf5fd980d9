"""Imbalance of scale between the layers of a chain, and the squared norm that it wastes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import Array, widen, widest

# Activations with φ(cx) = cφ(x) for c > 0, and none. (ReLU6, which counts as "relu" for gains, is not.)
HOMOGENEOUS = frozenset({"relu", "leaky_relu", "linear"})


def least_scale(weights: Iterable[Array]) -> Tensor:
    r"""Smallest sum of squared norms over all rescalings :math:`\gamma_l` of the layers whose product is 1.

    .. math::
        \min_{\prod\gamma_l = 1} \sum_l \lVert \gamma_l W_l \rVert^2 = L \Big(\prod_l \lVert W_l \rVert^2\Big)^{1/L}

    attained when all norms are equal. In a network with positively homogeneous activations all these weights, with
    biases scaled by the cumulative product, compute the same function. The gradient at one layer grows as the inverse
    of its norm and overflows float16 for a layer far smaller than the others.

    Raises: InvalidArgumentError if there is no weight.

    Example:
        >>> gonio.geometry.least_scale([torch.tensor([4.0]), torch.tensor([1.0])])
        tensor(8.)

    References: [1] Z. Liu et al., "Improve generalization and robustness of neural networks via weight scale shifting
        invariant regularizations", 2020, §3. https://arxiv.org/abs/2008.02965
    """
    logs, dtype = _log_squares(weights, "least_scale")
    return (len(logs) * logs.mean().exp()).to(dtype)


def scale_imbalance(weights: Iterable[Array]) -> Tensor:
    r"""Squared norm that moving scale between layers would save: the *wasted* L2.

    .. math:: \sum_l \lVert W_l \rVert^2 - L \Big(\prod_l \lVert W_l \rVert^2\Big)^{1/L} \ge 0

    0 exactly if all layers have the same norm. The L2 penalty of a positively homogeneous chain can be lowered by that
    much without changing its function. `weights` are one tensor per layer, of any shapes; tied weights once.

    Returns: A scalar in float32 at least, differentiable. If a layer is zero, the sum of the squared norms.
    Invariances: Permuting layers; not rescaling them.
    Raises: InvalidArgumentError if there is no weight.

    Example:
        >>> gonio.geometry.scale_imbalance([torch.tensor([4.0]), torch.tensor([1.0])])
        tensor(9.)

    References: [1] As :func:`least_scale`, whose equation (4) misprints each norm of the minimum as the sum.
    """
    logs, dtype = _log_squares(weights, "scale_imbalance")
    zero = torch.isneginf(logs)
    known = logs.masked_fill(zero, 0)
    # Σ s − L·m with s = m·exp(δ) and Σ δ = 0: 0 for equal norms of any size, where the difference would be rounding.
    root, apart = (known.mean() / 2).exp(), known - known.mean()  # m of float64 weights may overflow, its root does not
    wasted = root * (torch.expm1(apart) - apart).sum().clamp(min=0) * root
    return torch.where(zero.any(), logs.exp().sum(), wasted).to(dtype)


def _log_squares(weights: Iterable[Array], function: str) -> tuple[Tensor, torch.dtype]:
    """The logarithms of squared norms in float64, −∞ for a layer that is zero, and the dtype of the result."""
    wide = [widen(w) for w in weights]
    if not wide:
        raise InvalidArgumentError(f"{function}() needs at least one weight", "none", "Pass the weights of a chain.")
    dtype = torch.float64 if any(w.dtype == torch.float64 for w in wide) else torch.float32
    return torch.stack([_log_square(w.to(widest(w))) for w in wide]), dtype


def _log_square(weight: Tensor) -> Tensor:
    largest = weight.detach().abs().amax() if weight.numel() else weight.new_zeros(())
    scale = largest.masked_fill(largest == 0, 1)  # the square of 1e200 overflows
    square = (weight / scale).square().sum()
    return square.masked_fill(largest == 0, 1).log().masked_fill(largest == 0, -torch.inf) + 2 * scale.log()
