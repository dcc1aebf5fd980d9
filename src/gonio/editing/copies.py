"""Copies of weights in a wider type that an optimizer trains in their place, so that a change of the weights is lost.

Optimizers for half precision have them: apex, DeepSpeed, TransformerEngine. Nothing in torch's interface tells of them;
their values do, because the weight is the copy, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gonio.editing.memory import has_address
from gonio.editing.wrappers import parameter_ids, with_inner
from gonio.execution import is_sharded

_COMPARED = 64  # entries, of a copy that may be longer than the weight


class Copies:
    """Looks after steps whether an optimizer trains copies of weights, until each has changed in so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._times: dict[int, int] = {}  # by the `id` of a weight: in how many steps it still is compared
        self._before: dict[int, tuple[Tensor, str]] = {}  # the entries that were compared, and where the copy was

    def left(self, parameter: Tensor) -> None:
        """Note the entries with which a weight goes into the next step."""
        if (known := self._before.get(id(parameter))) is not None:
            self._before[id(parameter)] = parameter.detach().clone(), known[1]

    def of(self, parameter: Tensor, optimizer: Any) -> str:
        """Where the copy of a weight is, once it was equal after two steps that changed the weight; else empty.

        To be called after a step, before anything else changes the weight; then :meth:`left`.
        """
        key = id(parameter)
        if is_sharded(parameter) or torch.finfo(parameter.dtype).bits >= 32:  # of shards, processes would have to agree
            return ""
        if self._times.setdefault(key, self._steps) == 0:
            return ""
        now, (before, place) = parameter.detach().clone(), self._before.get(key, (None, ""))
        if before is not None and torch.equal(before, now):
            return ""
        found = next((where for where, copy in _candidates(parameter, optimizer) if _rounds_to(copy, now)), "")
        self._times[key] -= 1
        self._before[key] = now, found
        if self._times[key] == 0:
            del self._before[key]
        return found if found and found == place else ""


def _candidates(parameter: Tensor, optimizer: Any) -> Iterator[tuple[str, Any]]:
    for each in with_inner(optimizer):
        states = getattr(each, "state", None)
        state = states.get(parameter, {}) if isinstance(states, Mapping) else {}
        for name, value in state.items() if isinstance(state, Mapping) else ():
            yield f"{name!r} in the state of the {type(each).__name__}", value
        for inner in _apart(each):
            for group in inner.param_groups:
                for copy in group["params"]:
                    yield f"in the {type(inner).__name__} of the {type(each).__name__}", copy


def _apart(optimizer: Any) -> list[Optimizer]:
    """The optimizers in the attributes of one that have none of its parameters."""
    values = vars(optimizer).values() if hasattr(optimizer, "__dict__") else ()
    mine = parameter_ids(optimizer)
    return [each for each in values if isinstance(each, Optimizer) and not mine & parameter_ids(each)]


def _rounds_to(copy: Any, weight: Tensor) -> bool:
    if not isinstance(copy, Tensor) or copy.shape != weight.shape or not copy.is_floating_point():
        return False
    wider = torch.finfo(copy.dtype).bits > torch.finfo(weight.dtype).bits
    return wider and torch.equal(copy.detach().to(weight), weight)


def holds_copies(optimizer: Any, weights: Iterable[Tensor], *, wider: bool = False) -> bool:
    """Whether the groups of an optimizer have other tensors that begin with the entries of a weight.

    Args:
        wider: whether only copies of a wider type count; others may be of a second model that began as this one did.

    Example:
        >>> from gonio.editing.copies import holds_copies
        >>> weight = torch.nn.Linear(8, 8, dtype=torch.bfloat16).weight
        >>> holds_copies(torch.optim.SGD([weight.detach().float().flatten()], lr=0.1), [weight], wider=True)
        True
    """
    there = [p.detach().flatten() for group in optimizer.param_groups for p in group["params"] if has_address(p)]
    starts = [(weight.numel(), weight.detach().flatten()[:_COMPARED]) for weight in weights if has_address(weight)]
    told = [(size, start) for size, start in starts if len(start) > 1 and not bool((start == start[0]).all())]
    return any(
        len(p) >= size and torch.equal(p[: len(start)].to(start), start)
        for size, start in told
        for p in there
        if not wider or p.dtype.itemsize > start.dtype.itemsize
    )
