"""The logits of a model's attention, read where they are computed while the model runs as it always does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.geometry.norms import full_precision
from gonio.messages import say
from gonio.surgery.blocks import Anatomy, Attention
from gonio.surgery.facts import only_reads
from gonio.surgery.products import MASKED, Product, Products

_ENTRIES = 2**24  # of the logits that are computed at once


class Observer(ABC):
    """What is told of the logits of one attention, in calls of its module; :func:`observing` adds it to a model."""

    def __init__(self, block: Attention) -> None:
        self.block = block
        self._running: list[_Reading | None] = []

    @abstractmethod
    def wants(self, module: nn.Module) -> bool:
        """Whether the call of the module that begins is read."""

    @abstractmethod
    def softmaxed(self, logits: Tensor, query: Tensor | None, key: Tensor | None) -> None:
        """Of a softmax, the logits (…, queries, keys) with all that was added, and what was multiplied, if known."""

    @abstractmethod
    def multiplied(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> None:
        """Of a fused kernel, the queries (…, queries, size), the keys as often as these, and its other arguments."""

    @only_reads
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """The hook before the forward."""
        mode = _Reading(self) if self.wants(module) and not torch.compiler.is_compiling() else None
        self._running.append(mode)
        if mode is not None:
            mode.__enter__()

    @only_reads
    def leave(self, *_: Any) -> None:
        """The hook after the forward."""
        mode = self._running.pop() if self._running else None
        if mode is not None:
            mode.__exit__(None, None, None)

    @only_reads
    def pause(self, *_: Any) -> None:
        """The hook before the forward of another attention inside of the module."""
        if self._running and self._running[-1] is not None:
            self._running[-1].paused += 1

    @only_reads
    def resume(self, *_: Any) -> None:
        """The hook after it."""
        if self._running and self._running[-1] is not None:
            self._running[-1].paused -= 1


def observing(
    observers: Sequence[Observer], modules: Mapping[str, nn.Module], found: Anatomy
) -> list[Callable[[], None]]:
    """Let observers be told of the logits of their attention, until the functions that are returned have been called.

    Args:
        modules: the model's, by path. `found`: its anatomy.
    """
    ends: list[Callable[[], None]] = []
    others = dict.fromkeys([block.around for block in found.attention] + list(found.unknown))
    for observer in observers:
        path = observer.block.around
        module = modules[path]
        ends.append(module.register_forward_pre_hook(observer).remove)
        ends.append(module.register_forward_hook(observer.leave, always_call=True).remove)
        for inner in [each for each in others if each != path and each.startswith(f"{path}." if path else "")]:
            ends.append(modules[inner].register_forward_pre_hook(observer.pause).remove)
            ends.append(modules[inner].register_forward_hook(observer.resume, always_call=True).remove)
    return ends


def why_not_observed(block: Attention) -> str | None:
    """Why the logits of a head of this attention cannot be told from others; None if they can."""
    if not block.alone:
        return say("it multiplies several queries and keys")
    if any(head != index % block.heads for index, head in enumerate(block.places[1])):
        return say("its heads and its batch are one dimension in which the heads come first")
    if block.kernel:
        return say("a registered kernel computes its logits, which cannot be read")
    return None


def by_index(values: Tensor, block: Attention) -> Tensor:
    """Values of queries and keys, without their last two dimensions, as (entries, indices that count heads)."""
    if not block.places[0]:
        return values.reshape(-1, 1)
    dims = [dim + 2 for dim in block.places[0]]
    last = values.movedim(dims, list(range(-len(dims), 0))).flatten(values.ndim - len(dims))
    return last.reshape(-1, last.shape[-1])


def by_head(values: Tensor, block: Attention, reduce: Literal["amax", "sum"]) -> Tensor | None:
    """Values by index, of which a head may have several, reduced to one of each head.

    None where batch and heads are one dimension, and the anatomy was found on one sample, which does not show their
    order.
    """
    places = block.places[1] or (0,)
    if places == tuple(range(len(values))):
        return values
    order = torch.tensor(places, device=values.device)
    if len(values) != len(order):  # batch and heads are one dimension, in the order of the example's
        if len(order) == block.heads:
            return None
        order = torch.arange(len(values), device=values.device) % block.heads
    heads = values.new_full((block.heads,), -math.inf if reduce == "amax" else 0.0)
    return heads.scatter_reduce_(0, order, values, reduce)


ONE_SAMPLE = say("batch and heads are one dimension, and the example has one sample, which does not show their order")


def logits_of(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The logits of a fused kernel, some queries at once, and what its mask adds to them.

    Those of pairs that the mask excludes are −∞.
    """
    length, keys = query.shape[-2], key.shape[-2]
    rows = rows_at_once(query[..., 0, 0].numel() * keys)
    for start in range(0, length, rows):
        logits = (query[..., start : start + rows, :].float() @ key.float().mT) * scale
        if causal:
            later = (
                torch.arange(keys, device=query.device) > torch.arange(start, length, device=query.device)[:rows, None]
            )
            logits = logits.masked_fill(later, -math.inf)
        part = None
        if mask is not None:
            part = mask[..., start : start + rows, :] if mask.shape[-2] == length else mask
            logits = logits.masked_fill(~part if part.dtype == torch.bool else part <= MASKED, -math.inf)
        yield logits, None if part is None or part.dtype == torch.bool else part


def rows_at_once(entries: int) -> int:
    """How many queries are looked at together, of which each has this number of logits."""
    return max(1, _ENTRIES // max(1, entries))


class _Reading(Products):
    """Reads the logits of the functions that an attention module calls."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer, self.paused = observer, 0

    def found(self, product: Product, args: Any, kwargs: Any) -> None:
        """The softmax has logits, a fused kernel has queries and keys."""
        if self.paused:
            return
        with torch.no_grad(), full_precision(product.query):
            if product.logits is not None:
                if product.logits.shape[-2] == product.query.shape[-2]:  # what lies between has not moved queries
                    self._observer.softmaxed(product.logits.detach(), product.query.detach(), product.key.detach())
                return
            given = [*args[3:], *[None] * (7 - len(args))]
            mask = kwargs.get("attn_mask", given[0])
            causal, scale = kwargs.get("is_causal", given[2]), kwargs.get("scale", given[3])
            query, key = product.query.detach(), product.key.detach()
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            self._observer.multiplied(query, key, mask, bool(causal), scale)

    def packed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch's attention, run with a softmax and a fused kernel that show what they are given."""
        given, heads = func.__globals__, kwargs.get("num_heads", args[4] if len(args) > 4 else 1)

        def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.paused:
                with torch.no_grad():
                    self._observer.softmaxed(x.detach().unflatten(0, (-1, heads)), None, None)
            return given["softmax"](x, *args, **kwargs)

        def attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.found(Product("", query, key), (query, key, *args), kwargs)
            return given["scaled_dot_product_attention"](query, key, *args, **kwargs)

        names = given | {"softmax": softmax, "scaled_dot_product_attention": attention}
        shown = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
        shown.__kwdefaults__ = func.__kwdefaults__
        names[func.__name__] = shown  # the function calls itself by this name where a default device is set
        return shown(*args, **kwargs)


def repeated(key: Tensor, query: Tensor) -> Tensor:
    """The keys of fewer heads, once for each head of the queries."""
    for dim in range(query.ndim - 2):
        if key.shape[dim] not in (1, query.shape[dim]):
            key = key.repeat_interleave(query.shape[dim] // key.shape[dim], dim)
    return key
