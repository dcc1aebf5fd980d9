"""Heads and movable scale of a checkpoint: its config.json says which tensors they are, and the file has the values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from gonio.errors import GonioError, first_line, listing
from gonio.measuring.figures.heads import heads_in
from gonio.measuring.figures.structure import MovableScale, Structure
from gonio.measuring.reading.entry import TensorEntry, numbers_of
from gonio.messages import counted
from gonio.surgery.equivalent import SameFunction
from gonio.surgery.movable import Movable
from gonio.surgery.planned import Planned, planned
from gonio.surgery.symmetries import block_symmetries

_HELD = 4  # tensors that were read last


class _Stored(Mapping[str, nn.Parameter]):
    """The tensors of a file with the shapes of those of a model, and finite values, read when they are asked for."""

    def __init__(self, plan: Planned, entries: Iterable[TensorEntry]) -> None:
        self._entries = {e.name: e for e in entries if e.load is not None and e.shape == plan.shape_of(e.name)}
        self._read = lru_cache(maxsize=_HELD)(self._loaded)

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _loaded(self, name: str) -> nn.Parameter:
        load = self._entries[name].load
        found = None if load is None else numbers_of(load()).tensor
        if found is None or not bool(torch.isfinite(found).all()):
            raise KeyError(name)
        return nn.Parameter(found, requires_grad=False)


@torch.no_grad()
def structure_of_checkpoint(path: Path, entries: Iterable[TensorEntry]) -> Structure:
    """The heads of a checkpoint, and the scale that can move in its blocks, by the anatomy of its folder.

    Raises:
        InvalidArgumentError, UnreadableFileError: without a `config.json`, and for a damaged one.
    """
    plan = planned(path)
    if isinstance(plan, str):
        return Structure(notes=(f"Blocks were not measured: {plan}.",))
    try:
        same = SameFunction(plan.model, None)
        if same.input is None:
            return Structure(notes=(f"Blocks were not measured: {same.why}.",))
        found = block_symmetries(plan.model, same.input, traced=False, taken=frozenset())
    except (GonioError, RuntimeError, ValueError, TypeError) as error:
        return Structure(notes=(f"Blocks were not measured: {first_line(error, kind=True)}.",))
    stored = _Stored(plan, entries)
    symmetries = plan.spread(found.symmetries)
    readable = {name for each in symmetries for name in each.tensors if name in stored}
    held = tuple(each for each in symmetries if readable.issuperset(each.tensors))
    left = {why: tuple((kind, at) for kind, of in places for at in plan.spread((of,)))
            for why, places in found.left.items()}  # fmt: skip
    blocks = replace(found, symmetries=held, parameters=stored, left=left)
    heads = () if found.anatomy is None else heads_in(plan.whole(found.anatomy), stored.get)
    missing = sorted({name for each in symmetries for name in each.tensors} - readable)
    notes: tuple[str, ...] = ()
    if missing:
        has = "is" if len(missing) == 1 else "are"
        said = f"{counted(len(missing), 'tensor')} of blocks {has} not in the file under the model's name"
        notes = (f"{said}: {listing(missing)}.",)
    return Structure(MovableScale.of(Movable([], blocks, "")), heads=heads, notes=notes)
