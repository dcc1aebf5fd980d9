"""Gradients of many terms, added class by class."""

from __future__ import annotations

from collections.abc import Sequence

from gonio.penalty.term import WeightTerm
from gonio.regularizers import Evaluation, WeightRegularizer
from gonio.regularizers.additions import Addition

__all__ = ["add_gradients_"]

Pending = dict[type[WeightRegularizer], list[tuple[int, Addition]]]


def add_gradients_(terms: Sequence[tuple[WeightTerm, float]], backend: str | None) -> list[Evaluation]:
    """Add strength × the gradient of every term to `.grad` of what its weight is made from.

    Weights that a parametrization makes come one by one, so that only one of them exists at a time.
    """
    pending: Pending = {}
    found: dict[int, Evaluation] = {}
    for index, (term, strength) in enumerate(terms):
        addition = term.addition(strength)
        if addition is None:
            found[index] = term.add_through_(strength)
        else:
            pending.setdefault(type(addition.regularizer), []).append((index, addition))
    for kind, members in pending.items():
        evaluations = kind.add_gradients_([addition for _, addition in members], backend=backend)
        found.update(zip((index for index, _ in members), evaluations, strict=True))
    return [term.carry_on(found[index]) for index, (term, _) in enumerate(terms)]
