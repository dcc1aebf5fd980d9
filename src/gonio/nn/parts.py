"""Work on a part of a tensor at a time, whose temporaries are small and stay in the cores' caches.

On CPU a pass over memory costs more than the arithmetic of most operations in it. A chain of them, run through
for one part of a tensor after the other, reads and writes main memory once. On other devices each operation
costs the time to start it, so parts are larger there, and save memory alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["in_parts", "parts"]

PART = 2**17  # entries of a part for each thread: half a MiB in float32, and as much for each temporary beside it
PART_ELSEWHERE = 2**24
FEWEST = 4  # parts, below which a tensor is not worth cutting


def parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors, cut alike along the samples; the first is the largest.

    A tensor of size 1 along the samples is handed out whole each time.
    """
    first = tensors[0]
    part = _part(first)
    if first.numel() < FEWEST * part or first.dim() == 1:
        yield tensors
    else:
        yield from _cut(tensors, 0, max(1, part * len(first) // first.numel()))


def in_parts(*tensors: Tensor, beside: tuple[Tensor, ...] = ()) -> Iterator[tuple[Tensor, ...]]:
    """`parts` for tensors in the grouped layout, cut along the first axis of positions too where samples are large.

    What is used `beside` them is not cut: it must broadcast along the samples, and prevents the second
    cut where it has positions.
    """
    positions = tensors[0].dim() > 3 and all(t.dim() <= 3 or t.shape[3] == 1 for t in beside)
    for piece in parts(*tensors):
        first = piece[0]
        if positions and first.numel() > 2 * _part(first):
            yield from _cut(piece, 3, max(1, _part(first) * first.shape[3] // first.numel()))
        else:
            yield piece


def _part(tensor: Tensor) -> int:
    return PART * torch.get_num_threads() if tensor.device.type == "cpu" else PART_ELSEWHERE


def _cut(tensors: tuple[Tensor, ...], dim: int, length: int) -> Iterator[tuple[Tensor, ...]]:
    size = tensors[0].shape[dim]
    for start in range(0, size, length):
        count = min(length, size - start)
        yield tuple(t.narrow(dim, start, count) if t.shape[dim] == size else t for t in tensors)
