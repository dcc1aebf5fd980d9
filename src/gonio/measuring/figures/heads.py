"""Attention heads: the norms of the queries, keys, values and outputs of each, and how far each one moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import fsum, hypot, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import GonioError, first_line, listing
from gonio.execution import is_sharded
from gonio.geometry.attention import largest_product
from gonio.geometry.views import why_not_dense
from gonio.measuring.figures.attention import logits_on
from gonio.messages import say
from gonio.surgery import Anatomy, Attention, Part, anatomy
from gonio.surgery.blocks import Normalized
from gonio.surgery.equivalent import SameFunction
from gonio.surgery.graph import trace
from gonio.surgery.movable import may_attend

_MEASURED = 1e-3  # relative; to which the norms and factors of a block are measured
ROLES = ("query", "key", "value", "output")
Read = Callable[[str], Tensor | None]
"""A tensor by its name; None if it has no values to compute with."""


@dataclass(frozen=True)
class HeadMeasurement:
    """One head of an attention block.

    Attributes:
        path: of the block. `head`: its number. `kv_head`: that of its keys and values, which several heads may share.
        logit_bound: an upper bound of the absolute logits of the head on any input, by
            :func:`gonio.geometry.logit_bound`, without biases of positions that are added; None where the queries and
            keys are not computed from the results of known norms.
        largest_logit, entropy, entropy_share, one_token: on a batch, as ``HeadLogits`` says; None without one, and
            where the logits could not be read.
        query, key, value: the Frobenius norms of the rows that compute them, and `output` that of the columns that
            read the head. Rows of keys that all heads share are in the key of each.
    """

    path: str
    head: int
    kv_head: int
    query: float
    key: float
    value: float
    output: float
    logit_bound: float | None = None
    largest_logit: float | None = None
    entropy: float | None = None
    entropy_share: float | None = None
    one_token: float | None = None


ON_BATCH = ("largest_logit", "entropy", "entropy_share", "one_token")


@dataclass(frozen=True)
class HeadChange:
    """How far one head moved, as :class:`HeadMeasurement` names its parts.

    Attributes:
        relative: the norm of the difference over the norm before, of the four parts together.
        query, key, value, output: the same of each; None from a part that was 0.
    """

    path: str
    head: int
    kv_head: int
    relative: float | None
    query: float | None
    key: float | None
    value: float | None
    output: float | None


def heads_in(found: Anatomy, read: Read) -> tuple[HeadMeasurement, ...]:
    """The heads of the blocks whose tensors can be read."""
    norms, made = _Norms(read), []
    bounds: dict[int, list[float] | None] = {}
    for block, head, parts in _heads(found):
        values = [norms.of(parts[role]) for role in ROLES]
        if None not in values:
            if id(block) not in bounds:
                bounds[id(block)] = _logit_bounds(block, read)
            most = bounds[id(block)]
            bound = None if most is None else most[head]
            norm_of = dict(zip(ROLES, values, strict=True))
            made.append(HeadMeasurement(block.path, head, block.groups[head], logit_bound=bound, **norm_of))  # type: ignore[arg-type]
    return tuple(made)


def with_logits(
    heads: tuple[HeadMeasurement, ...], found: Anatomy, model: nn.Module, batch: Any
) -> tuple[tuple[HeadMeasurement, ...], tuple[str, ...]]:
    """The heads with what they attend to on a batch, and notes on the attention where that is not known.

    Args:
        model: in evaluation mode.
    """
    try:
        read, reasons = logits_on(model, batch, found)
    except Exception as error:  # the model can raise anything
        return heads, (say("Logits were not measured: {why}.", why=first_line(error, kind=True)),)
    at = {(each.path, each.head): {name: getattr(each, name) for name in ON_BATCH} for each in read}
    without = {path for path, _ in at} - {head.path for head in heads}
    reasons |= dict.fromkeys(without, say("its tensors have no values that can be read"))
    by_reason: dict[str, list[str]] = {}
    for path, why in reasons.items():
        by_reason.setdefault(why, []).append(path or say("the model"))
    notes = [
        say("Logits of {paths} were not measured: {why}.", paths=listing(paths, limit=3), why=why)
        for why, paths in by_reason.items()
    ]
    return tuple(replace(head, **at.get((head.path, head.head), {})) for head in heads), tuple(notes)


def head_changes(found: Anatomy, before: Read, change: Read) -> tuple[HeadChange, ...]:
    """How far each head moved, from readers of the tensors before and of their differences."""
    norms, moves, made = _Norms(before), _Norms(change), []
    for block, head, parts in _heads(found):
        was, moved = ([by.of(parts[role]) for role in ROLES] for by in (norms, moves))
        if None in was or None in moved:
            continue
        shares = [b / a if a else None for a, b in zip(was, moved, strict=True)]  # type: ignore[operator]
        whole = hypot(*was)  # type: ignore[arg-type]
        together = hypot(*moved) / whole if whole else None  # type: ignore[arg-type]
        made.append(HeadChange(block.path, head, block.groups[head], together, *shares))
    return tuple(made)


def _heads(found: Anatomy) -> Iterator[tuple[Attention, int, dict[str, tuple[Part, ...]]]]:
    for block in found.attention:
        for head, group in enumerate(block.groups):
            key = (*block.key[group], *block.shared_key)
            parts = (block.query[head], key, block.value[group], (block.output[head],))
            yield block, head, dict(zip(ROLES, parts, strict=True))


@torch.no_grad()
def _logit_bounds(block: Attention, read: Read) -> list[float] | None:
    """The largest logit of each head on any input; None where it is not known, or a tensor has no values."""
    if block.logits is None:
        return None
    stored: dict[str, Tensor | None] = {}

    def values(name: str) -> Tensor:
        if name not in stored:
            stored[name] = read(name)
        found = stored[name]
        if found is None or not bool(found.isfinite().all()):
            raise _NotKnown
        return found.detach()

    query, key = (_Side(each, values) for each in (block.logits.query, block.logits.key))
    try:
        keys = [key.of((*parts, *block.shared_key), n) for n, parts in enumerate(block.key)]
        pairs = [(query.of(parts, n), keys[block.groups[n]]) for n, parts in enumerate(block.query)]
    except _NotKnown:
        return None
    scale = abs(block.logits.scale) * (1 + _MEASURED)
    return [scale * float(largest_product(q, k, block.logits.turned)) for q, k in pairs]


class _NotKnown(Exception):
    """A tensor has no values, or others than the block's record says."""


@dataclass(frozen=True)
class _Side:
    """The queries or the keys of a block as maps of unit balls."""

    norm: Normalized
    values: Callable[[str], Tensor]

    def of(self, parts: tuple[Part, ...], number: int) -> tuple[Tensor, Tensor]:
        """The map of a head and what it adds, as :func:`gonio.geometry.attention.largest_product` takes them."""
        gain, shift = self._of_norm()
        if self.norm.after:
            rows = sum(part.count for part in parts)
            if self.norm.count != rows:  # over all heads
                gain, shift = (t[number * rows : (number + 1) * rows] for t in (gain, shift))
            weight, constant = torch.diag(gain), shift
        else:
            weight = torch.cat([self._rows(part) for part in parts])
            if weight.shape[-1] != self.norm.count:
                raise _NotKnown
            constant = weight @ shift + torch.cat([self._bias(part, weight) for part in parts])
            weight = weight * gain
        if self.norm.kind == "layer" and weight.shape[-1] == self.norm.count:
            weight = weight - weight.mean(-1, keepdim=True)
        factor = self.norm.factor
        return weight[None] * (factor * sqrt(self.norm.count)), constant[None] * factor

    def _of_norm(self) -> tuple[Tensor, Tensor]:
        part = self.norm.part
        if part is None:
            ones = torch.ones(self.norm.count, dtype=torch.float64, device="cpu")
            return ones, torch.zeros_like(ones)
        gain = self.values(part.tensor).double() + self.norm.added
        return gain, self.values(part.bias).double() if part.bias else torch.zeros_like(gain)

    def _rows(self, part: Part) -> Tensor:
        weight = self.values(part.tensor).movedim(part.dim, 0)
        return weight[part.indices].flatten(1).double()

    def _bias(self, part: Part, like: Tensor) -> Tensor:
        if not part.bias:
            return like.new_zeros(part.count)
        return self.values(part.bias)[[n + part.bias_start for n in part.indices]].double()


class _Norms:
    """Norms of parts; each tensor is read once along each of its dimensions."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._squares: dict[tuple[str, int], Tensor | None] = {}

    def of(self, parts: tuple[Part, ...]) -> float | None:
        """The norm of these parts together; None if a tensor has no values."""
        sums = []
        for part in parts:
            key = (part.tensor, part.dim)
            if key not in self._squares:
                self._squares[key] = self._along(*key)
            if (squares := self._squares[key]) is None:
                return None
            sums.append(float(squares[part.indices].sum()))
        return sqrt(fsum(sums))

    @torch.no_grad()
    def _along(self, tensor: str, dim: int) -> Tensor | None:
        weight = self._read(tensor)
        if weight is None:
            return None
        others = [d for d in range(weight.ndim) if d != dim]
        return torch.linalg.vector_norm(weight.detach(), dim=others, dtype=torch.float64).square().cpu()


def parameters_of(model: nn.Module) -> Read:
    """A reader of a model's parameters."""
    own = dict(model.named_parameters())

    def read(name: str) -> Tensor | None:
        found = own.get(name)
        return None if found is None or is_sharded(found) or why_not_dense(found) is not None else found.detach()

    return read


def anatomy_of(model: nn.Module) -> Anatomy | None:
    """The anatomy of a model that may have attention, on a generated input.

    None where it has none or nothing can run it.
    """
    graph = trace(model, training=False)
    if not may_attend(graph):
        return None
    given = SameFunction(model, None)
    if given.input is None:
        return None
    try:
        return anatomy(model, example=given.input)
    except (GonioError, RuntimeError):  # derivatives of a model of one's own
        return None


def input_of(model: nn.Module, batch: Any) -> SameFunction:
    """An input that the model takes: a generated one, which is small, or the batch."""
    same = SameFunction(model, None)
    return same if same.input is not None or batch is None else SameFunction(model, batch)
