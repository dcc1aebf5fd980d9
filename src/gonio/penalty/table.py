"""A penalty in words: what reads what, and what was left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields

from gonio.penalty.binding import Binding
from gonio.penalty.term import OutputTerm, Term
from gonio.regularizers import Regularizer, ScaleShift

__all__ = ["table"]


def table(terms: Sequence[Term], skipped: Sequence[Binding], remarks: Sequence[str]) -> str:
    """One line per term, then what was skipped, then remarks."""
    rows = [(term.label.split("/")[0], describe(term.regularizer), _state_of(term)) for term in terms]
    rows += [(b.slot.label, describe(b.regularizer), f"skipped: {b.skipped}") for b in skipped]
    width = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {a:<{width[0]}}  {b:<{width[1]}}  {c}".rstrip() for a, b, c in rows]
    head = f"Penalty: {len(terms)} term{'s' if len(terms) != 1 else ''}, {len(skipped)} skipped"
    return "\n".join([head, *lines, *(f"  note: {remark}" for remark in remarks)])


def describe(regularizer: Regularizer) -> str:
    """A regularizer as it would be written, without what is left at its default."""
    given = [f"{regularizer.strength:g}"]
    for field in fields(regularizer):
        value = getattr(regularizer, field.name)
        if field.name != "strength" and field.default is not MISSING and value != field.default:
            given.append(f"{field.name}={value!r}")
    return f"{type(regularizer).__name__}({', '.join(given)})"


def _state_of(term: Term) -> str:
    if term.slot.frozen:
        return "frozen: passed over"
    if isinstance(term.regularizer, ScaleShift):
        floor, rate = term.regularizer.effective_floor, term.regularizer.largest_rate
        also = f"; {term.note}" if term.note else ""
        return f"constant below norm {floor:.3g}; safe for lr / (1 - momentum)² up to {rate:.3g}{also}"
    if isinstance(term, OutputTerm):
        width = term.slot.tensor().shape[1 if term.slot.layout.transposed else 0]
        if term.samples is not None and term.samples < width:
            return (
                f"{term.samples} samples for {width} filters: their angles cannot all be told apart, and the "
                f"spread does not fall below {1 / term.samples:.2g}"
            )
    return ""
