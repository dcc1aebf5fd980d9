"""Orthogonality of a convolution as a linear map on whole feature maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import pi
from typing import Any

import torch
from torch import Tensor

from gonio.geometry.norms import safe_norm, whole
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer
from gonio.regularizers.orthogonality import small_side

# Note [Shifts]
# The inner products of filters at all shifts τ are matrices C(τ), the convolution of the kernel with itself. Their
# transform is F(ω) F(ω)ᴴ, with the symbol F(ω) = Σ_t K_t e^{−iωt}. Shifts go from −r to r, r the reach of the kernel in
# steps of the stride, so a grid of 2r + 1 points per axis has them all: by Parseval Σ_τ ‖C(τ) − δ_τ I‖² is the mean of
# ‖F Fᴴ − I‖² over the grid. For 3×3 taps that is 13 products of complex matrices, of which 12 stand for their
# conjugates as well, instead of 225 of real ones. A stride makes input channels of its phases. If F has more rows than
# columns, ‖F Fᴴ − I‖² is ‖Fᴴ F − I‖² and the number of the further rows.


# By kernel, stride, dilation, dtype and device: made once, so that a step copies nothing to a device.
_WAVES: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}


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
        reach = cols * torch.Size(_per_axis(layout.stride, weight)).numel()
        return weight.new_tensor(layout.groups * max(0, rows - reach) ** 0.5)


def _distances(weight: Tensor, layout: Layout) -> Tensor:
    """The norm of all inner products of filters at every shift, less the identity, of each group; see Note [Shifts]."""
    parts, share = _symbols(weight, layout)
    excess = max(0, parts.shape[-2] - parts.shape[-1])
    real, imaginary = parts.mT if excess else parts
    both = torch.cat((real, imaginary), -1)
    crossed = imaginary @ real.mT
    eye = torch.eye(both.shape[-2], dtype=both.dtype, device=both.device)
    defects = torch.cat((both @ both.mT - eye, crossed - crossed.mT), -1)
    found = safe_norm(defects * share.sqrt()[:, None, None, None], (0, 2, 3))
    return (found.square() + excess).sqrt() if excess else found


def _symbols(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of F(ω), (2, frequencies, groups, out, in · phases), and the share of each frequency."""
    key = weight.shape[2:], _per_axis(layout.stride, weight), _per_axis(layout.dilation, weight)
    at = *key, weight.dtype, weight.device
    compiled = torch.compiler.is_compiling()  # asked first: a compiled graph would be guarded by what the table holds
    if not compiled and at in _WAVES:
        waves, share = _WAVES[at]
    else:
        waves, share = _waves(*key)
        waves, share = waves.to(weight), share.to(weight)
        if not compiled and type(waves) is Tensor:  # no fake tensors
            _WAVES[at] = waves, share
    filters = weight.unflatten(0, (layout.groups, -1)).flatten(3)
    return torch.einsum("cfpt,goit->cfgopi", waves, filters).flatten(-2), share


def _waves(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (2, frequencies, phases, taps), and the share of each frequency.

    One of two conjugate frequencies stands for both, with twice the share.
    """
    # at stride 1 all shifts of a dilated kernel are multiples of the dilation
    spread = [d if s > 1 else 1 for d, s in zip(dilation, stride, strict=True)]
    taps = [[i * d for i, d in zip(tap, spread, strict=True)] for tap in product(*map(range, kernel))]
    steps = [tuple(t // s for t, s in zip(tap, stride, strict=True)) for tap in taps]
    phases = [tuple(t % s for t, s in zip(tap, stride, strict=True)) for tap in taps]
    size = [2 * max(along) + 1 for along in zip(*steps, strict=True)]
    mirrored = {at: tuple(-i % n for i, n in zip(at, size, strict=True)) for at in product(*map(range, size))}
    half = [at for at, other in mirrored.items() if at <= other]
    points, moved, sizes = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (half, steps, size))
    angle = points * (2 * pi / sizes) @ moved.mT
    of_phase = [[float(phase == each) for phase in phases] for each in sorted(set(phases))]
    waves = torch.stack((angle.cos(), -angle.sin()))[:, :, None] * torch.tensor(of_phase, device="cpu")
    share = [(1.0 + (mirrored[each] != each)) / len(mirrored) for each in half]
    return waves, torch.tensor(share, dtype=torch.float64, device="cpu")


def _per_axis(values: tuple[int, ...], weight: Tensor) -> tuple[int, ...]:
    return values or (1,) * (weight.ndim - 2)
