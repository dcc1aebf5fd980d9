"""Parts of a transformer's weights: a matrix for each head, and the pairs of parts between which scale moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gonio.geometry.norms import whole
from gonio.geometry.views import Layout
from gonio.penalty.weights import WeightRef
from gonio.surgery import Anatomy, Attention, Mlp, Part

_NORMED = "its scale does not matter: a norm follows queries or keys"


@dataclass(frozen=True, eq=False)
class PartRef(WeightRef):
    """Rows of a weight, or columns as rows, in blocks of equal size, each of which is a matrix.

    Attributes:
        role: what the rows are.
        dim: the dimension of the weight that counts them.
        index: their numbers, block by block.
    """

    role: str = ""
    dim: int = 0
    index: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return f"{super().label}[{self.role}]"

    def tensor(self) -> Tensor:
        """The rows, (blocks · rows, inputs), differentiable."""
        weight = whole(super().tensor())
        rows = weight.new_tensor(self.index, dtype=torch.long)
        return weight.movedim(self.dim, 0).index_select(0, rows).flatten(1)

    def stored(self) -> None:
        """None: the part is computed from the parameter."""
        return

    @property
    def key(self) -> tuple[object, ...]:
        """What two references to the same numbers have in common."""
        return (*super().key, self.dim, self.index)


@dataclass(frozen=True)
class Cut:
    """How a part of a tensor is penalised.

    Attributes:
        blocks: the rows of each matrix.
        power: how often its logarithm counts in the invariant of its pair.
        skipped: why its scale has no effect, if so. `remark`: for the table.
    """

    tensor: str
    role: str
    dim: int
    blocks: tuple[tuple[int, ...], ...]
    power: int = 1
    skipped: str | None = None
    remark: str = ""


@dataclass(frozen=True)
class Cuts:
    """The parts of the weights of a model: of each head, or of the pairs between which scale moves."""

    found: Anatomy
    heads: dict[str, list[Cut]] = field(init=False)
    pairs: dict[str, list[Cut]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", _by_tensor(_of_heads(self.found)))
        object.__setattr__(self, "pairs", _by_tensor(_of_pairs(self.found)))

    def of(self, ref: WeightRef, *, pairs: bool) -> list[tuple[WeightRef, Cut | None]]:
        """The parts of a weight, and what is left of it; the weight itself where none is known."""
        cuts = (self.pairs if pairs else self.heads).get(ref.label, [])
        if not cuts:
            return [(ref, None)]
        found: list[tuple[WeightRef, Cut | None]] = [(_part(ref, cut), cut) for cut in cuts]
        (dim, *others) = dict.fromkeys(cut.dim for cut in cuts)
        used = {row for cut in cuts for rows in cut.blocks for row in rows}
        rest = tuple(row for row in range(ref.tensor().shape[dim]) if row not in used)
        return [*found, *([(_part(ref, Cut(ref.label, "rest", dim, (rest,))), None)] if rest and not others else [])]


def _part(ref: WeightRef, cut: Cut) -> PartRef:
    rows = tuple(row for block in cut.blocks for row in block)
    return PartRef(ref.path, ref.module, ref.name, Layout(blocks=len(cut.blocks)), cut.role, cut.dim, rows)


def _by_tensor(cuts: Iterable[Cut]) -> dict[str, list[Cut]]:
    """The cuts with matrices of equal size, once each, by the tensor."""
    found: dict[str, list[Cut]] = {}
    for cut in dict.fromkeys(cuts):
        if cut.blocks and len({len(rows) for rows in cut.blocks}) == 1:
            found.setdefault(cut.tensor, []).append(cut)
    return found


def _of_heads(found: Anatomy) -> Iterator[Cut]:
    """Queries, keys and values, head by head; an output keeps its filters, of which each reads all heads."""
    for block in found.attention:
        for role in ("query", "key", "value"):
            yield from _cut(role, getattr(block, role))


def _of_pairs(found: Anatomy) -> Iterator[Cut]:
    """Both sides of each pair between which scale moves; those of which it has no effect are skipped."""
    for block in found.attention:
        groups = range(block.kv_heads)
        query, output = ([_joined(parts, block, group) for group in groups] for parts in (
            block.query, [(part,) for part in block.output]))  # fmt: skip
        if block.normed:
            yield from (cut for role, parts in (("query", query), ("key", block.key))
                        for cut in _cut(role, parts, skipped=_NORMED))  # fmt: skip
        elif all(block.linear[:2]) and not block.shared_key:
            yield from _cut("query", query, remark="pair of queries and keys, by head")
            yield from _cut("key", block.key, remark="pair of queries and keys, by head")
        if block.linear[2]:
            yield from _cut("value", block.value, remark="pair of values and outputs, by head")
            yield from _cut("output", output, remark="pair of values and outputs, by head")
    yield from (cut for mlp in found.mlps if mlp.degree and not mlp.experts for cut in _of_units(mlp))


def _of_units(mlp: Mlp) -> Iterator[Cut]:
    for role, part, power in (("up", mlp.up, mlp.degree), ("down", mlp.down, 1)):
        rows = tuple((row,) for row in part.indices)
        yield Cut(part.tensor, role, part.dim, rows, power, remark="pair of up and down, by unit")


def _joined(heads: Iterable[tuple[Part, ...]], block: Attention, group: int) -> tuple[Part, ...]:
    """The parts of all heads that share keys and values."""
    mine = zip(heads, block.groups, strict=True)
    return tuple(part for parts, of in mine if of == group for part in parts)


def _cut(
    role: str, heads: Iterable[tuple[Part, ...]], *, skipped: str | None = None, remark: str = ""
) -> Iterator[Cut]:
    """One cut for each tensor and dimension, a matrix for each head."""
    places: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for parts in heads:
        mine: dict[tuple[str, int], list[int]] = {}
        for part in parts:
            mine.setdefault((part.tensor, part.dim), []).extend(part.indices)
        for place, rows in mine.items():
            places.setdefault(place, []).append(tuple(rows))
    for (tensor, dim), blocks in places.items():
        yield Cut(tensor, role, dim, tuple(blocks), skipped=skipped, remark=remark)
