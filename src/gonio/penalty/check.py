"""What a penalty and an optimizer do to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gonio.errors import InvalidArgumentError
from gonio.penalty.term import Term
from gonio.regularizers import ScaleShift, WeightRegularizer

__all__ = ["findings"]


def findings(terms: Sequence[Term], optimizer: torch.optim.Optimizer) -> list[str]:
    """Terms that the optimizer undoes, doubles or does not know, in words.

    Raises:
        InvalidArgumentError: if a step could overshoot: see :class:`gonio.regularizers.ScaleShift`.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return [finding for term in terms for finding in _of(term, groups, optimizer)]


def _of(term: Term, groups: dict[int, dict[str, Any]], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    known = [groups[id(p)] for p in term.slot.parameters() if id(p) in groups]
    if not known and not term.slot.frozen:
        yield f"{term.label}: the optimizer does not have this weight, so the term moves nothing here"
    regularizer = term.regularizer
    decayed = any(group.get("weight_decay", 0) for group in known)
    if decayed and isinstance(regularizer, WeightRegularizer) and regularizer.scale_only:
        yield f"{term.label}: the optimizer's weight decay shrinks this weight as well"
    if isinstance(regularizer, ScaleShift) and isinstance(optimizer, torch.optim.SGD):
        for group in known:
            _refuse_overshoot(term.label, regularizer, group)


def _refuse_overshoot(label: str, regularizer: ScaleShift, group: dict[str, Any]) -> None:
    rate = float(group["lr"]) / (1 - group["momentum"]) ** 2
    if rate > regularizer.largest_rate * (1 + 1e-9):
        needed = 2 * (rate * regularizer.strength * regularizer.every) ** 0.5
        raise InvalidArgumentError(
            f"{label} holds a weight above norm {regularizer.effective_floor:.3g}, which is safe for "
            f"lr / (1 - momentum)² up to {regularizer.largest_rate:.3g}",
            f"lr={float(group['lr']):g}, momentum={group['momentum']:g}, hence {rate:.3g}",
            f"Lower the rate or the strength, or set floor={needed:.3g}.",
        )
