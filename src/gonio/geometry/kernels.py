"""A fast form of filters of given norms, for eager execution on CPU; :func:`applies_to` chooses it.

It saves 15 % of a training step of a small network with weight norm, and 11 % with spheres (docs/benchmarks.md).
Elsewhere callers use plain operations. The private operation of torch is used in this file only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gonio.execution import ordinary_eager
from gonio.geometry.norms import least_norm, safe_norm

_LEAST = {dtype: least_norm(dtype) for dtype in (torch.float32, torch.float64)}


def applies_to(*tensors: Tensor) -> bool:
    """Whether :func:`rescaled` may be used."""
    return tensors[0].is_cpu and tensors[0].dtype in _LEAST and ordinary_eager(*tensors)


def rescaled(raw: Tensor, norms: Tensor) -> Tensor | None:
    """Filters on dim 0 scaled to `norms` by torch's kernel, which reads the weight once; None if a filter is zero.

    A filter is zero as in Note [Zero vectors] of :mod:`gonio.geometry.norms`. The kernel is NaN there, and its second
    derivative treats the norms as constants (gradgradcheck fails, torch 2.13): gradients that will be differentiated
    again are replaced by those of the formula.
    """
    if not raw.numel():  # the kernel divides by the number of filters and ends the process (torch 2.13)
        return None
    if raw.dim() == 4 and not raw.is_contiguous():  # channels_last: the order of a filter's entries does not matter
        found = rescaled(raw.permute(0, 2, 3, 1).contiguous(), norms)
        return None if found is None else found.permute(0, 3, 1, 2)
    raw = raw.contiguous()
    each = norms.view(-1, *(1,) * (raw.dim() - 1))
    weight, found = torch._weight_norm_interface(raw, each, 0)
    if not (found.numel() and found.min().item() > _LEAST[raw.dtype]):
        return None
    if weight.grad_fn is not None:
        weight.grad_fn.register_hook(_Differentiable(raw, each))
    return weight


class _Differentiable:
    """A hook after the backward of torch's kernel that replaces gradients that will be differentiated again.

    It is not an autograd function around the kernel, which would take as long as the kernel for small layers.
    """

    __slots__ = ("norms", "raw")

    def __init__(self, raw: Tensor, norms: Tensor) -> None:
        self.raw, self.norms = raw, norms

    def __call__(self, found: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            return None
        dims = tuple(range(1, self.raw.dim()))
        inverse = safe_norm(self.raw, dims, keepdim=True).reciprocal()
        direction = self.raw * inverse
        along = (grads[0] * direction).sum(dims, keepdim=True)
        of_raw = self.norms * inverse * (grads[0] - direction * along)
        return tuple(None if old is None else new for new, old in zip((of_raw, along), found, strict=True))
