"""Orthogonality of a convolution as a linear map on whole feature maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gonio.geometry.norms import safe_norm, whole
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer
from gonio.regularizers.orthogonality import small_side

_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


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
        overlaps = _overlaps(weight, layout)
        return Evaluation(safe_norm(overlaps, tuple(range(1, overlaps.ndim))).sum())

    def _lower_bound(self, weight: Tensor, layout: Layout) -> Tensor:
        if weight.shape[2:].numel() == 1:
            return weight.new_zeros(())
        rows, cols = weight.shape[0] // layout.groups, weight.shape[1]
        reach = cols * torch.Size(_per_axis(layout.stride, weight)).numel()
        return weight.new_tensor(layout.groups * max(0, rows - reach) ** 0.5)


def _overlaps(weight: Tensor, layout: Layout) -> Tensor:
    """Inner products of filters at every shift, less the identity: (groups, out, out, *shifts)."""
    stride, dilation = _per_axis(layout.stride, weight), _per_axis(layout.dilation, weight)
    extent = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    kernel = weight
    if set(dilation) != {1}:  # with its zeros written out
        kernel = weight.new_zeros(*weight.shape[:2], *extent)
        kernel[(slice(None), slice(None), *(slice(None, None, d) for d in dilation))] = weight
    padding = [(k - 1) // s * s for k, s in zip(extent, stride, strict=True)]
    rows = weight.shape[0] // layout.groups
    signal = kernel.unflatten(0, (layout.groups, rows)).transpose(0, 1).flatten(1, 2)
    out = _CONV[len(extent)](signal, kernel, stride=stride, padding=padding, groups=layout.groups)
    out = out.unflatten(1, (layout.groups, rows)).transpose(0, 1)
    eye = torch.eye(rows, dtype=out.dtype, device=out.device).view(rows, rows, *[1] * len(extent))
    for axis, (p, s) in enumerate(zip(padding, stride, strict=True)):
        eye = functional.pad(eye, [0, 0] * (len(extent) - 1 - axis) + [p // s, p // s])
    return out - eye


def _per_axis(values: tuple[int, ...], weight: Tensor) -> tuple[int, ...]:
    return values or (1,) * (weight.ndim - 2)
