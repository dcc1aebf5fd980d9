"""The parts of a transformer as data: which rows and columns of which tensors are heads, gates and experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from gonio.escaping import aligned
from gonio.messages import counted, fixed, joined, local, say
from gonio.surgery.recording import Part


@dataclass(frozen=True)
class Normalized:
    """What the queries or the keys of a block are computed from: the result of a norm, which bounds its length.

    Attributes:
        kind: "rms", or "layer" if the mean is taken out first; the length is then at most the square root of `count`.
        count: how many entries the norm normalises together.
        part: the gain, with the shift as its bias; None for ones and zeros.
        added: 0 or 1, which the norm adds to its gain.
        after: whether the norm follows the layer, so that its result is the query, or the queries of all heads.
        factor: by what the outputs of the rows, or the norm's result, are multiplied before the product.
    """

    kind: Literal["rms", "layer"]
    count: int
    part: Part | None
    added: float
    after: bool
    factor: float


@dataclass(frozen=True)
class Logits:
    """How logits are computed from the results of norms, without masks and biases of positions that are added.

    Attributes:
        query, key: what they are computed from.
        scale: by what the products are multiplied.
        turned: for each entry of a query the first one of those among which positions turn it; None for no positions.
    """

    query: Normalized
    key: Normalized
    scale: float
    turned: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Attention:
    """One attention block.

    Attributes:
        path: the module that multiplies queries and keys.
        query: for each head the rows that compute its queries.
        key, value: for each key/value head its rows.
        output: for each head the columns of the next layer that read it.
        groups: for each head the number of its key/value head.
        shared_key: rows that compute a part of the keys of every head.
        rotary: whether positions rotate pairs of a query's entries, and which; "" for no rotation, None for not known.
        normed: whether queries or keys pass a norm after their layer, so that the scale of the rows has no effect.
        scales: whether the logits are proportional to the outputs of the rows of a head's queries, and of its keys; not
            so behind a norm, a cap, or with a bias that depends on positions.
        linear: whether the products of queries and keys are proportional to the outputs of the rows of the queries, and
            of the keys, and what the next layer reads to those of the values; not so behind a norm.
        logits: of which norms' results the logits are computed, and how; None if that is not known.
    """

    path: str
    query: tuple[tuple[Part, ...], ...]
    key: tuple[tuple[Part, ...], ...]
    value: tuple[tuple[Part, ...], ...]
    output: tuple[Part, ...]
    groups: tuple[int, ...]
    shared_key: tuple[Part, ...] = ()
    rotary: Literal["", "half", "pairs"] | None = None
    normed: bool = False
    scales: tuple[bool, bool] = (False, False)
    linear: tuple[bool, bool, bool] = (False, False, False)
    logits: Logits | None = field(default=None, repr=False)
    # Where queries (…, tokens, size) count the heads: dimensions from the end, and the head of each index along them.
    places: tuple[tuple[int, ...], tuple[int, ...]] = field(default=((), ()), repr=False)
    alone: bool = field(default=True, repr=False)  # whether no other queries and keys are multiplied there
    kernel: bool = field(default=False, repr=False)  # whether a registered module computes it, by no function of torch
    around: str = field(default="", repr=False)  # the innermost module that runs that one and the softmax

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.query)

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values; fewer than heads if several share them."""
        return len(self.key)

    @property
    def head_size(self) -> int:
        """The number of rows of a head's queries."""
        return sum(part.count for part in self.query[0])

    def __str__(self) -> str:
        told = {"heads": counted(self.heads, "head"), "size": self.head_size, "kv": self.kv_heads}
        if self.kv_heads != self.heads:
            heads = say("{heads} of {size} on {kv} of keys and values", **told)
        else:
            heads = say("{heads} of {size}", **told)
        more = [say("rotary ({kind})", kind=fixed(self.rotary))] if self.rotary else []
        return local(joined([heads, *more, *([say("normed queries or keys")] if self.normed else [])]))


@dataclass(frozen=True)
class Mlp:
    """Layers of which one reads what an activation gives of the others, entry by entry.

    Attributes:
        path: the module that calls the last layer.
        up, down: the rows that compute the units, and the columns that read them.
        gate: the rows whose activation multiplies the outputs of `up`; None where there is none.
        experts: the number of experts in a stacked weight; 0 for no stack.
        degree: 1 if what `down` reads is proportional to the outputs of `up`, as with a gate or ReLU; 2 if to their
            squares, as with a squared ReLU; 0 for neither.
    """

    path: str
    up: Part
    down: Part
    gate: Part | None = None
    experts: int = 0
    degree: int = 0

    def __str__(self) -> str:
        units = say("{n} units", n=self.up.count)
        if self.experts:
            units = say("{n} experts of {units}", n=self.experts, units=units)
        return local(joined([units, *([say("gated")] if self.gate is not None else [])]))


@dataclass(frozen=True)
class Anatomy:
    """The parts of a transformer. `str()` is a table.

    Attributes:
        attention: the attention blocks, in the order of execution.
        mlps: the feed-forward blocks.
        embeddings, heads, routers, norms: names of parameters: tables that are looked up, layers that compute an
            output, layers whose largest outputs are chosen, and gains of norms.
        ties: names of one parameter with several, the first one first.
        stacks: names of weights in three dimensions that are stacks of matrices, as for experts, and whether the inputs
            of a matrix come before its outputs.
        unknown: by path, why products of queries and keys there were not taken apart.
    """

    attention: tuple[Attention, ...]
    mlps: tuple[Mlp, ...]
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    routers: tuple[str, ...]
    norms: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]
    unknown: Mapping[str, str]
    stacks: tuple[tuple[str, bool], ...] = ()

    @cached_property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """By the name of a parameter, what it, or a part of it, is."""
        found: dict[str, dict[str, None]] = {}
        for block in self.attention:
            for role in ("query", "key", "value", "output", "shared_key"):
                name = "key" if role == "shared_key" else role
                for part in _flat(getattr(block, role)):
                    found.setdefault(part.tensor, {})[name] = None
        for mlp in self.mlps:
            if mlp.gate is not None:
                found.setdefault(mlp.gate.tensor, {})["gate"] = None
            found.setdefault(mlp.up.tensor, {})["up"] = None
            found.setdefault(mlp.down.tensor, {})["down"] = None
            for name in [n for n in (mlp.up.tensor, mlp.down.tensor) if mlp.experts]:
                found[name]["expert"] = None
        for role, names in (("embedding", self.embeddings), ("head", self.heads), ("router", self.routers),
                            ("norm gain", self.norms)):  # fmt: skip
            for name in names:
                found.setdefault(name, {})[role] = None
        return {name: tuple(roles) for name, roles in found.items()}

    def stored_transposed(self, tensor: str) -> bool:
        """Whether a stack of matrices has its inputs before its outputs."""
        return (tensor, True) in self.stacks

    def rows_of_units(self, tensor: str) -> int:
        """The number of rows of each of gate and up in a weight that computes both, one after the other; else 0."""
        for mlp in self.mlps:
            if mlp.gate is not None and {mlp.gate.tensor, mlp.up.tensor} == {tensor}:
                return mlp.up.count
        return 0

    def rows_of_heads(self, tensor: str) -> tuple[int, ...]:
        """The sizes of consecutive heads of a weight that computes several of queries, keys and values, in its order.

        The sizes repeat until all rows are cut; () for a weight of one role, and where other rows lie between.
        """
        if len([role for role in self.roles.get(tensor, ()) if role in ("query", "key", "value")]) < 2:
            return ()
        sizes = self._sizes_of_heads(tensor)
        if not sizes:
            return ()
        period = next(
            n for n in range(1, len(sizes) + 1) if len(sizes) % n == 0 and sizes == sizes[:n] * (len(sizes) // n)
        )
        return tuple(sizes[:period])

    def heads_in_rows(self, tensor: str, rows: int) -> int:
        """The number of consecutive heads of equal size that make up all rows of a weight; 0 for another weight.

        Example:
            >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
            >>> found = gonio.surgery.anatomy(attention, example=(torch.randn(1, 3, 8),) * 3)
            >>> found.heads_in_rows("in_proj_weight", 24), found.heads_in_rows("out_proj.weight", 8)
            (6, 0)
        """
        sizes = self._sizes_of_heads(tensor)
        if any(len(part.rows) > 1 for part in self._parts_of_heads(tensor)):
            return 0
        return len(sizes) if len(set(sizes)) == 1 and sum(sizes) == rows else 0

    def _sizes_of_heads(self, tensor: str) -> list[int]:
        """The numbers of rows of the heads of queries, keys and values from row 0 on; none where others lie between."""
        ranges = sorted(place for part in self._parts_of_heads(tensor) for place in part.rows)
        if not ranges or ranges[0][0] != 0 or any(a[1] != b[0] for a, b in itertools.pairwise(ranges)):
            return []
        return [stop - start for start, stop in ranges]

    def _parts_of_heads(self, tensor: str) -> set[Part]:
        roles = (role for block in self.attention for role in (block.query, block.key, block.value))
        return {part for role in roles for parts in role for part in parts if part.tensor == tensor}

    def __str__(self) -> str:
        rows = [(block.path, say("attention: {block}", block=str(block))) for block in self.attention]
        rows += [(mlp.path, say("MLP: {layers}", layers=str(mlp))) for mlp in self.mlps]
        rows += [(path, say("unknown: {reason}", reason=fixed(why))) for path, why in self.unknown.items()]
        rows += [(name, role) for role, names in ((say("embedding"), self.embeddings), (say("head"), self.heads),
                 (say("router"), self.routers)) for name in names]  # fmt: skip
        head = joined([counted(len(self.attention), "attention block"), counted(len(self.mlps), "MLP")])
        lines = aligned([(path or local("the model"), local(what)) for path, what in rows])
        ties = [local(say("tied: {names}", names=", ".join(names))) for names in self.ties]
        return "\n".join([local(head), *(f"  {line}" for line in (*lines, *ties))])


def _flat(parts: Any) -> Iterator[Part]:
    for part in parts:
        yield from (part,) if isinstance(part, Part) else _flat(part)
