"""Orthogonality of a convolution as a linear map on whole feature maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, pi, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gonio.geometry.norms import safe_norm, small_side, whole
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer

# Note [Products of taps]
# The inner products of filters at all shifts τ are matrices C(τ) = Σ_t K_{t+τ} K_tᵀ, the coefficients of the polynomial
# K(z) K(1/z)ᵀ with K(z) = Σ_t K_t z^t. Shifts go from −r to r, r the reach of the kernel in steps of the stride, so its
# values at 2r + 1 points per axis determine them. A value is one product of two sums of taps, and that at 1/z is its
# transpose: 13 products of real matrices for 3×3 taps (25 points) instead of 225, of which 12 stand for two points.
# A stride splits the taps by their place in a block of pixels: such phases read different pixels, so that their C(τ)
# add up, and each has a smaller reach of its own (3×3 taps with stride 2: 10 products).
#
# Up to r = 2 the points are 1, 0, ∞, −2 and −1/2; at 0 and ∞ the value is the first or the last coefficient. The
# coefficients of more real points grow like those of Lagrange's interpolation, so that longer kernels are evaluated on
# the unit circle, where the values are F(ω) F(ω)ᴴ and by Parseval Σ_τ ‖C(τ) − δ_τ I‖² is the mean of ‖F Fᴴ − I‖². With
# F = R + iJ the real matrix R (R + J)ᵀ + J (J − R)ᵀ has the same norm: real part plus imaginary part of F Fᴴ, one of
# them symmetric and the other not.
#
# If K has more outputs than inputs, ‖C − δ I‖² is that of Σ_t K_tᵀ K_{t+τ}, and the number of the further outputs.

_POINTS = (1.0, 0.0, inf, -2.0, -0.5)
_INVERSE = {1.0: 1.0, 0.0: inf, inf: 0.0, -2.0: -0.5, -0.5: -2.0}
Steps = Sequence[Sequence[int]]  # of each tap along each axis


class _Form(NamedTuple):
    """How the inner products at all shifts are made of products of sums of taps; see Note [Products of taps].

    Attributes:
        left, right: coefficients of the taps in the two sides of each product, (products, taps).
        mixed: coefficients of the products in the results, and below them those of their transposes,
            (2 · results, products).
        centre: coefficient of the identity that is subtracted from each result.
    """

    left: Tensor
    right: Tensor
    mixed: Tensor
    centre: Tensor


# By kernel, stride, dilation, dtype and device: made once, so that a step copies nothing to a device.
_FORMS: dict[tuple[Any, ...], _Form] = {}


@dataclass(frozen=True, kw_only=True)
class ConvOrthogonality(WeightRegularizer):
    r"""Distance of a convolution, as a linear map on feature maps, from one with orthonormal rows.

    .. math:: \lVert \operatorname{conv}(K, K;\; \text{stride } S, \text{padding } P) - I_{\text{centre}} \rVert_F,
              \qquad P = \lfloor (k - 1) / S \rfloor \cdot S

    The entries are the inner products of every two filters at every shift at which their footprints overlap on
    the map (circular padding, or away from the border): 0 means that the map preserves the norm of the signal
    that its outputs span. Filters that are orthogonal as flat vectors (:class:`Orthogonality`) need not be so
    when shifted. Per group, added over groups.

    A 1×1 kernel and a linear layer are plain matrices, taken on their smaller side. Of a transposed convolution its
    adjoint is penalised, the convolution with the same kernel. With more outputs than inputs times :math:`\prod S` the
    rows cannot be orthonormal; see :meth:`excess`. The paper's code has a strength of 0.1, and 0.5 in its examples.

    Invariances:
        Permutations and flips of filters, rotations of the input channels. Not the filters' scale.

    Example:
        >>> box = torch.full((1, 1, 1, 4), 0.5)  # a unit vector, but not orthogonal to its own shifts
        >>> gonio.regularizers.ConvOrthogonality(1.0)(box)
        tensor(1.3229)

    References:
        [1] J. Wang, Y. Chen, R. Chakraborty, S. X. Yu, "Orthogonal convolutional neural networks", CVPR 2020,
        §3.2–3.4. https://arxiv.org/abs/1911.12207

    Differs:
        As in the paper's code, the norm is not squared. That code takes square kernels with a padding given by
        hand, and a list of layers by name.
    """

    # Here and not by a decorator: it imports torch's compiler, which takes longer than all of gonio.
    def __post_init__(self) -> None:
        super().__post_init__()
        torch.compiler.assume_constant_result(_made)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        torch.compiler.assume_constant_result(_made)

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        weight = whole(weight)  # a convolution with a shard of the kernel would be silently wrong
        if weight.shape[2:].numel() == 1:
            a = small_side(matrix_view(weight, layout))
            gram = a @ a.mT - torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
            return Evaluation(safe_norm(gram, (-2, -1)).sum())
        return Evaluation(_distances(weight, layout).sum())

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        if weight.shape[2:].numel() == 1:
            return weight.new_zeros(())
        rows, cols = weight.shape[0] // layout.groups, weight.shape[1]
        reach = cols * torch.Size(layout.per_axis(weight.ndim - 2)[0]).numel()
        return weight.new_tensor(layout.groups * max(0, rows - reach) ** 0.5)


def _distances(weight: Tensor, layout: Layout) -> Tensor:
    """The norm of all inner products of filters at every shift, less the identity, of each group."""
    form, groups = _form(weight, layout), layout.groups
    filters = weight.reshape(-1, weight.shape[2:].numel()).mT.contiguous()  # whose gradient is a product of long rows
    left, right = ((side @ filters).view(len(side), groups, -1, weight.shape[1]) for side in (form.left, form.right))
    excess = max(0, left.shape[2] - left.shape[3]) if prod(layout.stride) == 1 else 0
    products = left.mT @ right if excess else left @ right.mT
    own, turned = (form.mixed @ products.flatten(1)).view(2, -1, *products.shape[1:]).unbind()
    defects = own + turned.mT
    defects.diagonal(dim1=-2, dim2=-1).sub_(form.centre[:, None, None])
    found = safe_norm(defects, (0, 2, 3))
    return (found.square() + excess).sqrt() if excess else found


def _form(weight: Tensor, layout: Layout) -> _Form:
    """The form for a kernel of this geometry, in its dtype and on its device."""
    key = weight.shape[2:], *layout.per_axis(weight.ndim - 2)
    at = *key, weight.dtype, weight.device
    compiled = torch.compiler.is_compiling()  # asked first: a compiled graph would be guarded by what the table holds
    if not compiled and at in _FORMS:
        return _FORMS[at]
    left, right, mixed, centre = _made(*key)
    form = _Form(left.to(weight), right.to(weight), mixed.to(weight), centre.to(weight))
    if not compiled and type(form.left) is Tensor:  # no fake tensors
        _FORMS[at] = form
    return form


def _made(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> _Form:
    """The products of all phases one after the other: numbers of the geometry, not a part of a compiled graph."""
    # at stride 1 all shifts of a dilated kernel are multiples of the dilation
    spread = [d if s > 1 else 1 for d, s in zip(dilation, stride, strict=True)]
    taps = [[i * d for i, d in zip(tap, spread, strict=True)] for tap in product(*map(range, kernel))]
    phases = [tuple(t % s for t, s in zip(tap, stride, strict=True)) for tap in taps]
    steps = [tuple(t // s for t, s in zip(tap, stride, strict=True)) for tap in taps]
    reach = [max(along) for along in zip(*steps, strict=True)]
    make = _at_real_points if 2 * max(reach) < len(_POINTS) else _on_the_circle
    parts = []
    for phase in sorted(set(phases)):
        members = [at for at, each in enumerate(phases) if each == phase]
        left, right, mixed, centre = make([steps[at] for at in members], reach)
        sides = torch.zeros(2, len(left), len(taps), dtype=torch.float64, device="cpu")
        sides[:, :, members] = torch.stack((left, right))
        parts.append((*sides, mixed))
    lefts, rights, mixes = zip(*parts, strict=True)
    return _Form(torch.cat(lefts), torch.cat(rights), torch.cat(mixes, 1), centre)


def _at_real_points(steps: Steps, reach: Sequence[int]) -> _Form:
    """One product for two points that are inverse to each other, one result for two opposite shifts."""
    own = [max(along) for along in zip(*steps, strict=True)]
    points = list(product(*(_POINTS[: 2 * r + 1] for r in own)))
    inverses = [tuple(_INVERSE[z] for z in point) for point in points]
    shifts = list(product(*(range(-r, r + 1) for r in own)))
    none = [0] * len(own)
    sides = [_matrix([[_power(z, step, none, own) for step in steps] for z in at]) for at in (points, inverses)]
    values = [[_power(z, shift, shifts[0], own) for shift in shifts] for z in points]
    by_value = torch.linalg.inv(_matrix(values))  # of each shift's matrix in the values, (shifts, points)
    partners = [points.index(other) for other in inverses]
    kept = [at for at, other in enumerate(partners) if at <= other]
    double = _matrix([float(partners[at] != at) for at in kept])
    wanted = list(product(*(range(-r, r + 1) for r in reach)))
    half = len(wanted) // 2  # of two opposite shifts the first; the last is the centre
    rows = torch.zeros(2, half + 1, len(kept), dtype=torch.float64, device="cpu")
    for row, shift in enumerate(wanted[: half + 1]):
        if shift in shifts:
            found = by_value[shifts.index(shift)] * (2**0.5 if row < half else 1.0)
            rows[0, row], rows[1, row] = found[kept], found[[partners[at] for at in kept]] * double
    return _Form(sides[0][kept], sides[1][kept], rows.flatten(0, 1), _matrix([0.0] * half + [1.0]))


def _power(point: Sequence[float], powers: Sequence[int], lowest: Sequence[int], highest: Sequence[int]) -> float:
    """The monomial at a point; at 0 and ∞ that with the lowest and the highest power is 1 and all others are 0."""
    axes = zip(point, powers, lowest, highest, strict=True)
    return prod(float(t == (low if z == 0 else high)) if z in (0, inf) else z**t for z, t, low, high in axes)


def _on_the_circle(steps: Steps, reach: Sequence[int]) -> _Form:
    """Two products for one of two conjugate frequencies, which has twice the share."""
    size = [2 * r + 1 for r in reach]
    mirrored = {at: tuple(-i % n for i, n in zip(at, size, strict=True)) for at in product(*map(range, size))}
    half = [at for at, other in mirrored.items() if at <= other]
    angle = _matrix(half) * (2 * pi / _matrix(size)) @ _matrix(steps).mT
    real, imaginary = angle.cos(), -angle.sin()
    share = _matrix([(1.0 + (mirrored[each] != each)) / len(mirrored) for each in half]).sqrt()
    own = torch.diag(share).repeat(1, 2)
    sides = torch.cat((real, imaginary)), torch.cat((real + imaginary, imaginary - real))
    return _Form(*sides, torch.cat((own, torch.zeros_like(own))), share)


def _matrix(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
