"""Sums over the shards of weights: what FSDP2 and tensor parallelism divide is never gathered.

Each process computes from its shard a vector of sums, such as one of squares per filter with zeros for the filters of
other shards. The vectors of all weights lie in one tensor, which is added over the processes once. A filter costs 8
bytes there, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gonio.execution import is_sharded
from gonio.geometry import Layout
from gonio.geometry.blocks import NormSummary
from gonio.geometry.norms import computed_in, least_norm
from gonio.geometry.views import view_shape
from gonio.measuring.figures.tensor import TensorMeasurement, norm_figures
from gonio.measuring.reading.entry import TensorEntry, dtype_name
from gonio.messages import say

BLOCK = 1 << 22  # entries that are widened at once
SHARDED = say(
    "sharded: figures of angles and spectra need the whole weight (Tracker(gather=True) gathers one at a time)"
)
PARTIAL = say("sharded as sums that are not added yet")
CUT = say("sharded in a way that cuts filters of several matrices")

Sums = Callable[[], Tensor]


class ShardSums:
    """Vectors of sums of this process's shards; one reduction for all of them.

    Example:
        >>> from gonio.measuring.training.shards import ShardSums
        >>> sums = ShardSums()
        >>> total = sums.add(torch.ones(2), torch.tensor([2.0, 3.0]))
        >>> sums.reduce(); total()
        tensor([2., 3.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._parts: dict[Any, list[Tensor]] = {}
        self._groups: dict[Any, list[Any]] = {}
        self._totals: dict[Any, Tensor] = {}

    def add(self, like: Any, vector: Tensor) -> Sums:
        """Add a vector over the processes that share `like`; returns a function of the total, after :meth:`reduce`.

        Each process must call this for the same tensors in the same order.
        """
        mesh = like.device_mesh if is_sharded(like) else None
        key = (mesh, tuple(n for n, p in enumerate(like.placements) if cuts(p)) if mesh is not None else ())
        parts = self._parts.setdefault(key, [])
        first = sum(map(len, parts))
        parts.append(vector.detach().double().reshape(-1))
        size = len(parts[-1])
        if mesh is not None:
            self._groups[key] = [mesh.get_group(n) for n in key[1]]
        return lambda: self._totals[key][first : first + size]

    def reduce(self) -> None:
        """Add all vectors; a collective operation for each dimension of a mesh that shards, and no other."""
        for key, parts in self._parts.items():
            whole = torch.cat(parts)
            for group in self._groups.get(key, ()):
                dist.all_reduce(whole, group=group)
            self._totals[key] = whole
        self._parts = {}


def cuts(placement: Any) -> bool:
    """Whether a placement divides a tensor; `is_shard` says no of FSDP2's over tensor parallelism."""
    return not (placement.is_replicate() or placement.is_partial())


def local(tensor: Any) -> Tensor:
    """This process's part of a sharded tensor; any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def waits(weight: Any) -> bool:
    """Whether a DTensor is stored as sums of processes that are not added yet."""
    return any(placement.is_partial() for placement in weight.placements)


def why_not(weight: Any, layout: Layout | None) -> str:
    """Why sums over the shards of a weight do not give the norms of its filters; empty if they do."""
    if waits(weight):
        return PARTIAL
    if layout is None or (layout.transposed and layout.groups * layout.blocks > 1):
        return CUT
    return ""


def divided(weight: Any) -> bool:
    """Whether this process has a part of the tensor only; a replicated one is whole everywhere."""
    return is_sharded(weight) and not all(placement.is_replicate() for placement in weight.placements)


def of_rows(weight: Any, values: Tensor, layout: Layout) -> Tensor:
    """Numbers per filter of this process's shard in a vector of all filters, and 1 if their places are not known.

    Args:
        values: (filters of the shard, …).
    """
    axis = int(layout.transposed)
    total = weight.shape[axis]
    first, size = 0, total
    for dim, placement in enumerate(weight.placements if is_sharded(weight) else ()):
        if cuts(placement) and placement.dim % weight.ndim == axis:  # torch.chunk: equal pieces, shorter last ones
            step = -(-size // weight.device_mesh.size(dim))
            start = min(weight.device_mesh.get_local_rank(dim) * step, size)
            first, size = first + start, min(step, size - start)
    made = torch.zeros(total + 1, *values.shape[1:], dtype=torch.float64, device=values.device)
    if size == len(values):
        made[first : first + size] = values
    else:
        made[total] = 1.0  # another way to divide: every process has to know
    return made


def row_sums(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """Σ a·b over each filter of a shard, in float64."""
    axis = int(layout.transposed)
    a, b = (x.detach().movedim(axis, 0).flatten(1) for x in (a, b))
    made = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    step = max(BLOCK // max(a.shape[1], 1), 1)
    for start in range(0, len(a), step):
        rows = slice(start, start + step)
        made[rows] = (a[rows].double() * b[rows].double()).sum(1)
    return made


@torch.no_grad()
def norms_of_shards(entry: TensorEntry, weight: Any, sums: ShardSums) -> Callable[[], TensorMeasurement]:
    """The measurement of a sharded weight by sums over its shards, after these are added."""
    layout, reason = entry.layout, why_not(weight, entry.layout)
    row: dict[str, Any] = {"name": entry.name, "path": entry.path, "kind": entry.kind, "shape": tuple(weight.shape)}
    row |= {"notes": entry.notes, "dtype": dtype_name(weight.dtype), "entries": prod(weight.shape)}
    if reason or layout is None:
        return lambda: TensorMeasurement(**row, status="skipped", reason=reason)
    part = local(weight)
    bad = torch.tensor([float((~torch.isfinite(part)).sum())], dtype=torch.float64, device=part.device)
    found = sums.add(weight, torch.cat([of_rows(weight, row_sums(part, part, layout), layout), bad]))
    matrices = view_shape(weight.shape, layout)

    def measured() -> TensorMeasurement:
        *_, unknown, nonfinite = found().tolist()
        known = {**row, "nonfinite": int(nonfinite), **dict(zip(("groups", "filters", "dim"), matrices, strict=True))}
        if unknown:
            return TensorMeasurement(**known, status="skipped", reason=CUT)
        norms = found()[:-2].cpu().sqrt()
        norms = norms[torch.isfinite(norms)]
        norms = norms.masked_fill_(norms < least_norm(computed_in(weight.dtype)), 0)
        values = norm_figures(NormSummary.of(norms, matrices[-1])) if len(norms) else {}
        made = TensorMeasurement(**known, **values, status="measured")
        return replace(made, notes=(*made.notes, SHARDED))

    return measured
