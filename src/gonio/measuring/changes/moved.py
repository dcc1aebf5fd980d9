"""Weights of the base under other names: a conversion put layers or experts in another order, or copied one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gonio.errors import listing
from gonio.escaping import plain
from gonio.measuring.changes.pair import TensorDifference, norm_of
from gonio.measuring.changes.sources import TunedModel, values_of
from gonio.measuring.reading.entry import TensorEntry
from gonio.messages import Message, say

FAR = 0.5  # relative change from which a weight is looked for under other names; that of independent ones is 1.4
_NEAR, _NEAR_ROUNDED = 1e-9, 1e-4  # relative difference of the norms of equal weights, and of rounded ones
_TRIED = 4  # weights of about the same norm that are compared with one


def with_origins(
    rows: Sequence[TensorDifference], held: Mapping[str, TensorEntry], model: TunedModel
) -> list[TensorDifference]:
    """The rows; that of a weight whose values are those of another one in the base names it.

    Only weights that changed much, or that the base has not, are read again, and compared with those of the base that
    have their shape and norm.
    """
    far = {row.name: row.shape for row in rows if (row.relative or 0.0) > FAR and len(row.shape) > 1}
    new = [row.name for row in rows if row.name in model.entries and row.name not in held]
    far |= {name: shape for name in new if len(shape := model.entries[name].shape or ()) > 1}
    shapes = {*far.values()}
    known = [(row.norm, row.shape, row.name) for row in rows if row.norm and row.shape in shapes]
    gone = [row.name for row in rows if row.norm is None and row.name in held and held[row.name].shape in shapes]
    known += [(norm_of(before), tuple(before.shape), name) for name, before in _loaded(gone, held)]
    found = {name: origin for name, shape in far.items() if (origin := _origin(name, shape, known, held, model))}
    return [replace(row, moved_from=found[row.name]) if row.name in found else row for row in rows]


def copied(rows: Sequence[TensorDifference]) -> list[Message]:
    """A note on weights that the base has not under their names, and whose values are those of its weights."""
    new = [row for row in rows if row.moved_from and row.status == "not compared"]
    pairs = [
        say("{name} of {origin}", name=plain(row.path), origin=plain(row.moved_from.removesuffix(".weight")))
        for row in new
    ]
    said = say("only after, with the values of weights of the base: {pairs}", pairs=listing(pairs, limit=4))
    return [said] if new else []


def _origin(
    name: str,
    shape: tuple[int, ...],
    known: Sequence[tuple[float, tuple[int, ...], str]],
    held: Mapping[str, TensorEntry],
    model: TunedModel,
) -> str:
    """The name in the base of the weight with the values of this one after; empty if there is none."""
    after = values_of(model.entries[name], "after")
    norm = norm_of(after) if isinstance(after, Tensor) else 0.0
    if not isinstance(after, Tensor) or not norm:  # zeros come from nowhere
        return ""
    near = sorted((abs(n - norm), other) for n, each, other in known if each == shape and other != name)
    closest = [other for distance, other in near[:_TRIED] if distance <= _NEAR_ROUNDED * norm]
    return next((other for other, before in _loaded(closest, held) if _are_equal(before, after, norm)), "")


def _loaded(names: Sequence[str], held: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        values = values_of(held[name], "before")
        if isinstance(values, Tensor):
            yield name, values


def _are_equal(before: Tensor, after: Tensor, norm: float) -> bool:
    """Whether two tensors are equal, or one is the other in its dtype."""
    if before.dtype == after.dtype:
        return abs(norm_of(before) - norm) <= _NEAR * norm and torch.equal(before, after.to(before.device))
    after = after.to(before.device)
    return torch.equal(before.to(after.dtype), after) or torch.equal(after.to(before.dtype), before)
