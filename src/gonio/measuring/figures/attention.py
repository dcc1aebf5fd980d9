"""The logits of attention heads on a batch: the largest one, the entropy of their softmax, and single tokens."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gonio.editing.where import modules_at
from gonio.errors import first_line
from gonio.geometry.norms import computed_in
from gonio.messages import say
from gonio.seeding import state_kept
from gonio.surgery import Anatomy, Attention
from gonio.surgery.equivalent import call
from gonio.surgery.observing import (
    ONE_SAMPLE,
    Observer,
    by_head,
    by_index,
    logits_of,
    observing,
    repeated,
    rows_at_once,
    why_not_observed,
)
from gonio.surgery.products import MASKED

ONE_TOKEN = 0.95  # the probability from which on a query attends to one token
EXCLUDED = MASKED / 2  # a mask of −10000 is added to logits of either sign


@dataclass(frozen=True)
class HeadLogits:
    """What one head attended to in a forward.

    Attributes:
        path: of the block. `head`: its number.
        largest_logit: over all queries and the keys that the mask allows them; without biases of positions that are
            added, as the bound is, where the scale of the products is known, and of fused kernels.
        entropy: of the softmax, in nats; the mean over the queries that have at least two keys.
        entropy_share: the mean entropy over the mean of its maximum ln n, for n allowed keys: 1 for equal
            probabilities, 0 for one token.
        one_token: the share of these queries of whose probability one token has at least 0.95.
    """

    path: str
    head: int
    largest_logit: float | None = None
    entropy: float | None = None
    entropy_share: float | None = None
    one_token: float | None = None


class LogitStatistics(Observer):
    """Adds up what one attention computes in the calls of its module in one mode; those of copies do not count."""

    def __init__(self, block: Attention, module: nn.Module | None, *, training: bool) -> None:
        super().__init__(block)
        self._module, self._training = None if module is None else weakref.ref(module), training
        self._broken = False
        self.why_not: str = say("its module calls no softmax and no fused kernel of torch in a forward")
        self._largest: Tensor | None = None
        self._sums: Tensor | None = None  # of entropies, of their maxima, of queries, and of those with one token

    def wants(self, module: nn.Module) -> bool:
        """In its mode."""
        mine = self._module is not None and self._module() is module
        return mine and module.training == self._training and not self._broken

    def softmaxed(self, logits: Tensor, query: Tensor | None, key: Tensor | None) -> None:
        """The products of queries and keys are those of the bound, without what is added to logits."""
        if self.block.logits is None or query is None or key is None:
            self._add((part, part) for part in _rows(logits))
        else:
            self._add(_split(logits, query, key, self.block.logits.scale))

    def multiplied(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> None:
        """As the kernel does."""
        parts = logits_of(query, repeated(key, query), mask, causal, scale)
        self._add((logits if added is None else logits + added, logits) for logits, added in parts)

    def _add(self, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Logits of some queries, as the softmax takes them, and those of which the largest is asked for."""
        try:
            self._sum(parts)
        except Exception as error:  # of an attention unlike that of the example; it must not end a training
            self.why_not = first_line(error, kind=True)
            self._broken = True

    def _sum(self, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
        for logits, products in parts:
            summed = self._by_head(torch.stack([each.double().sum(-1) for each in _of_queries(logits)]))
            largest = products.masked_fill(logits <= EXCLUDED, -math.inf).amax((-2, -1)).double()
            most = by_head(by_index(largest, self.block).amax(0), self.block, "amax")
            if most is None or summed is None:
                self.why_not = ONE_SAMPLE
                return
            self._largest = most if self._largest is None else torch.maximum(self._largest, most)
            self._sums = summed if self._sums is None else self._sums + summed

    def _by_head(self, sums: Tensor) -> Tensor | None:
        """Sums (figures, …) by the leading dimensions of queries, as (figures, heads)."""
        found = [by_head(by_index(each, self.block).sum(0), self.block, "sum") for each in sums]
        known = [each for each in found if each is not None]
        return torch.stack(known) if len(known) == len(found) else None

    def __deepcopy__(self, memo: Any) -> LogitStatistics:
        return LogitStatistics(self.block, None, training=self._training)

    def __reduce__(self) -> Any:
        return partial(LogitStatistics, training=self._training), (self.block, None)

    def figures(self) -> tuple[HeadLogits, ...]:
        """Of each head, from all calls so far; none if nothing was computed."""
        if self._broken or self._largest is None or self._sums is None:
            return ()
        made = []
        for head, (most, sums) in enumerate(zip(self._largest.tolist(), self._sums.T.tolist(), strict=True)):
            entropy, maximum, queries, single = sums
            figures = (entropy / queries, entropy / maximum, single / queries) if queries else (None, None, None)
            made.append(HeadLogits(self.block.path, head, most, *figures))
        return tuple(made)


def _rows(logits: Tensor) -> Iterator[Tensor]:
    """Some queries at once."""
    yield from logits.split(rows_at_once(logits[..., 0, :].numel()), -2)


def _split(logits: Tensor, query: Tensor, key: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Some queries' logits, and their products with the keys, scaled."""
    start = 0
    for part in _rows(logits):
        some = query[..., start : start + part.shape[-2], :]
        wide = computed_in(query.dtype)
        products = some.to(wide) @ key.to(wide).mT * scale
        yield part, products.reshape(part.shape)
        start += part.shape[-2]


def _of_queries(logits: Tensor) -> tuple[Tensor, ...]:
    """Of each query (…, queries): the entropy, its maximum, whether it has two keys, and whether it has one token.

    The others are 0 for a query that has no two keys.
    """
    shares = (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1)
    allowed = (logits > EXCLUDED).sum(-1)
    several = allowed > 1
    entropy = torch.special.entr(shares).sum(-1)
    single = shares.amax(-1) >= ONE_TOKEN
    zero = torch.zeros_like(entropy)
    maximum = allowed.clamp_min(1).to(entropy).log()
    return (
        torch.where(several, entropy, zero),
        torch.where(several, maximum, zero),
        several.to(entropy),
        (several & single).to(entropy),
    )


def observers_of(
    found: Anatomy, modules: Mapping[str, nn.Module], *, training: bool
) -> tuple[list[LogitStatistics], dict[str, str]]:
    """One for each attention whose logits can be read, and by path why those of the others cannot.

    Args:
        modules: the model's, by path. `training`: the mode of the forwards that count.
    """
    reasons: dict[str, str] = dict(found.unknown)
    reasons |= {block.path: why for block in found.attention if (why := why_not_observed(block)) is not None}
    able = {block.path: block for block in found.attention if block.path not in reasons}
    return [LogitStatistics(each, modules[each.around], training=training) for each in able.values()], reasons


@torch.no_grad()
def logits_on(model: nn.Module, batch: Any, found: Anatomy) -> tuple[tuple[HeadLogits, ...], dict[str, str]]:
    """The logits of all heads on a batch, and by path why those of an attention were not read.

    Args:
        model: in evaluation mode; it runs once. `found`: its anatomy.
    """
    modules = modules_at(model)
    observers, reasons = observers_of(found, modules, training=False)
    ends = observing(observers, modules, found)
    try:
        with state_kept():
            torch.default_generator.manual_seed(0)  # a model that draws random numbers draws the same ones every time
            call(model, batch)
    finally:
        for end in ends:
            end()
    made: list[HeadLogits] = []
    for observer in observers:
        figures = observer.figures()
        made += figures
        if not figures:
            reasons[observer.block.path] = observer.why_not
    return tuple(made), reasons
