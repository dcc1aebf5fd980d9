"""Upper bounds of operator norms that hold for every input size, rounded up: the factors of a certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import cos, frexp, inf, pi, prod, sqrt

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gonio.geometry.conv_norm import conv_spectral_norm
from gonio.geometry.conv_operator import Taps, taps_of
from gonio.geometry.norms import Array, as_real, check_finite
from gonio.geometry.views import PLAIN, Layout

ROUNDING = 1e-9  # relative; float64 eigenvalues of matrices with 10⁵ rows are far closer
# Grid points per dimension and degree of the symbol, by the densest grid's frequencies times channels cubed up to which
# they are used: about 64, 256, 512 and more channels of a 3×3 kernel.
_DENSEST, _COARSEST = 24, 4
_POINTS = {_DENSEST: 1 << 28, 12: 1 << 34, 6: 1 << 37}
_SWEEPS = 20


def operator_norm_bound(weight: Array, *, layout: Layout = PLAIN) -> float:
    r"""Upper bound of the operator norm of a linear layer or convolution on every input size, rounded up.

    With the symbol :math:`F(\omega)` and :math:`F F^H = \sum_d G_d e^{i \omega d}`, the smaller of

    .. math::
        \Bigl(\lVert G_0 \rVert + \sum_{d \ne 0} \lVert G_d \rVert\Bigr)^{1/2} \quad\text{and}\quad
        \max_{\omega \in \text{grid}} \lVert F(\omega) \rVert \Bigl(\tfrac12 + \tfrac12
        \prod_j \cos(\pi r_j / N_j)^{-1}\Bigr)^{1/2}

    where :math:`r_j` is the degree of the symbol and :math:`N_j` the number of grid points per dimension: with M the
    largest square on the grid, :math:`F F^H - M/2` is at most M/2 there, and at most M/2 times the product elsewhere
    [1]. The first is exact for matrices, 1×1 and orthogonal convolutions. The second exceeds the norm by at most 0.5 %
    with a 3×3 kernel; by 2 % from 128, 8 % from 512 and 23 % from 1,024 channels, whose grids have fewer points. The
    bound holds for zero padding, for circular padding that continues the input by whole periods, and for transposed
    convolutions; reflected and replicated padding need a further factor.

    Raises: InvalidArgumentError if the weight is not finite, or is not that of a linear layer or convolution.

    Example:
        >>> gonio.geometry.operator_norm_bound(torch.diag(torch.tensor([1.0, -2.0])))
        2.000000002

    References: [1] H. Ehlich, K. Zeller, "Schwankung von Polynomen zwischen Gitterpunkten", Math. Z. 86, 1964.
    """
    weight = as_real(weight).detach().double()
    check_finite(weight, "operator_norm_bound")
    weight = weight.unsqueeze(-1) if weight.dim() == 2 else weight
    layout = replace(layout, padding_mode="zeros")
    if prod(layout.stride) == 1:
        layout = replace(layout, dilation=())  # only visits the pixels in another order
    taps = taps_of(weight, layout).smaller_side()
    largest = float(weight.abs().amax()) if weight.numel() else 0.0
    if not largest:
        return 0.0
    scale = 2.0 ** (frexp(largest)[1] - 1)  # the squares of 1e-200 and 1e200 leave the range of float64
    taps = replace(taps, matrices=taps.matrices / scale)
    by_gram, exact = _by_gram(taps)
    if exact:
        return _times(by_gram, scale)
    cost = taps.matrices.shape[0] * taps.matrices.shape[2] ** 3 * prod(_DENSEST * r or 1 for r in taps.reach) // 2
    points = next((points for points, limit in _POINTS.items() if cost <= limit), _COARSEST)
    grid = [max(8, points * r) if r else 1 for r in taps.reach]
    between = 1 / prod(cos(pi * r / n) for r, n in zip(taps.reach, grid, strict=True))
    stride, _ = layout.per_axis(len(grid))
    size = [max(8, points * r) * s for r, s in zip(taps.reach, stride, strict=True)]
    on_grid = float(conv_spectral_norm(weight / scale, size, layout=layout)) * sqrt((1 + between) / 2)
    return _times(min(by_gram, on_grid), scale)


def _times(bound: float, scale: float) -> float:
    """The bound of a weight that was divided by a power of 2, rounded up, also below the normal numbers."""
    return bound * (1 + ROUNDING) * scale + 5e-324


def _by_gram(taps: Taps) -> tuple[float, bool]:
    """The bound by the coefficients G_d, each by √(‖·‖_1 ‖·‖_∞) but for G_0, and whether it is exact up to rounding."""
    mean = torch.einsum("gtoi,gtpi->gop", taps.matrices, taps.matrices)
    top = torch.linalg.eigvalsh(mean)[:, -1].clamp(min=0)
    if not any(taps.reach):
        return sqrt(float(top.amax())), True
    total = taps.matrices.sum(1)
    if float((total @ total.mT - mean).abs().amax()) > 0.01 * float(top.amax()):
        return inf, False  # far from orthogonal: the sum of many norms says little
    groups, _, out, in_ = taps.matrices.shape
    grid = [2 * r + 1 for r in taps.reach]
    box = taps.matrices.new_zeros(groups, out, in_, *grid)
    box.permute(*range(3, box.dim()), 0, 1, 2)[taps.positions.unbind(1)] = taps.matrices.transpose(0, 1)
    symbol = torch.fft.fftn(box, dim=tuple(range(3, box.dim()))).flatten(3).permute(0, 3, 1, 2)
    gram = (symbol @ symbol.mH).unflatten(1, grid)
    parts = torch.fft.ifftn(gram, dim=tuple(range(1, 1 + len(grid)))).real.flatten(1, len(grid))
    rest = (parts.abs().sum(-1).amax(-1) * parts.abs().sum(-2).amax(-1)).sqrt()[:, 1:].sum(1)
    return sqrt(float((top + rest).amax())), float(rest.amax()) <= ROUNDING * float(top.amax())


@torch.enable_grad()
def nonnegative_norm(function: Callable[[Tensor], object], x: Tensor) -> float:
    r"""Upper bound of the norm of a linear map A with entries ≥ 0, such as averages and copies, by running it.

    .. math:: \lVert A \rVert^2 \le \max_i (A^\top A x)_i / x_i \quad \text{for every } x > 0

    (Collatz and Wielandt); x follows a power iteration from 1. A constant that the map adds does not count.

    Args:
        function: from a tensor to a tensor or several.
        x: of the shape that the map takes; its values do not matter.

    Returns: The bound, rounded up; infinity if the map shows that it is not linear with entries ≥ 0.

    Example:
        >>> from gonio.geometry.certified import nonnegative_norm
        >>> round(nonnegative_norm(nn.AvgPool2d(2), torch.ones(1, 3, 8, 8)), 6)
        0.5
    """

    def image(point: Tensor) -> Tensor:
        found = [y.flatten() for y in tree_leaves(function(point.clone())) if isinstance(y, Tensor)]
        return torch.cat(found) if found else point.new_zeros(0)

    point = torch.ones(x.shape, dtype=torch.float64, device=x.device)
    shift = image(torch.zeros_like(point)).detach()
    spikes = torch.zeros_like(point)
    spikes.view(-1)[::7] = 1  # negative entries show beside single points
    if not point.numel() or not shift.numel():
        return 0.0
    once = image(spikes) - shift
    twice = image(2 * spikes) - shift
    if not torch.allclose(twice, 2 * once) or bool((once < -1e-9 * once.abs().amax()).any()):
        return inf
    best = inf
    for _ in range(_SWEEPS):
        point.requires_grad_()
        made = image(point) - shift
        back = torch.autograd.grad(made, point, made.detach(), allow_unused=True)[0] if made.requires_grad else None
        if back is None:  # a constant map
            return 0.0
        ratios = back / point.detach()
        best = min(best, float(ratios.amax()))
        if float(ratios.amax() - ratios.amin()) <= ROUNDING * best:
            break
        point = (back / back.amax()).clamp(min=1e-4).detach()
    return sqrt(best) * (1 + ROUNDING)
