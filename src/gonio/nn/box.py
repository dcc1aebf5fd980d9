"""Sums over the windows of a sliding kernel, by adding shifted slices: one dimension after the other.

For maps of few channels a convolution with ones is slower, its backward by far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

__all__ = ["box_spread", "box_sum"]


def box_sum(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The sum over every window, with zeros as padding: what a convolution with ones gives for each channel.

    Example:
        >>> from gonio.nn.box import box_sum
        >>> box_sum(torch.ones(1, 1, 4), [3], [1], [1], [1])
        tensor([[[2., 3., 3., 2.]]])
    """
    x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
    for dim, (taps, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        length = (x.shape[dim] - gap * (taps - 1) - 1) // step + 1
        x, *others = _slices(x, dim, taps, step, gap, length)
        for index, other in enumerate(others):
            x = x + other if index == 0 else x.add_(other)
    return x


def box_spread(
    x: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The transpose of :func:`box_sum`: each entry is added to all positions of its window, in a map of `size`.

    Example:
        >>> from gonio.nn.box import box_spread
        >>> box_spread(torch.tensor([[[1.0, 0.0, 10.0]]]), [5], [3], [2], [1], [1])
        tensor([[[ 1.,  1.,  0., 10., 10.]]])
    """
    for dim in reversed(range(2, x.dim())):
        taps, step, edge, gap = (option[dim - 2] for option in (kernel, stride, padding, dilation))
        shape = list(x.shape)
        shape[dim] = size[dim - 2] + 2 * edge
        into = x.new_zeros(shape)
        for window in _slices(into, dim, taps, step, gap, x.shape[dim]):
            window.add_(x)
        x = into.narrow(dim, edge, size[dim - 2])
    return x


def _slices(x: Tensor, dim: int, taps: int, step: int, gap: int, length: int) -> Iterator[Tensor]:
    """For each tap, the entries that it meets."""
    before = (slice(None),) * dim
    for start in range(0, taps * gap, gap):
        if step == 1:  # a third of the time of indexing, which counts on small maps
            yield x.narrow(dim, start, length)
        else:
            yield x[(*before, slice(start, start + (length - 1) * step + 1, step))]
