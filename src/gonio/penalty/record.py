"""What each term gave in a step, kept for logging."""

from __future__ import annotations

from gonio.penalty.term import Term
from gonio.regularizers import Evaluation

__all__ = ["Record"]


class Record:
    """Terms of one step; numbers are read off only when somebody asks."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, float, Evaluation]] = []

    def add(self, term: Term, strength: float, evaluation: Evaluation) -> None:
        """Keep what a term gave, without its graph."""
        if evaluation.value.requires_grad:
            terms = {name: part.detach() for name, part in evaluation.terms.items()}
            evaluation = Evaluation(evaluation.value.detach(), terms)
        self._entries.append((term.label, strength, evaluation))

    def values(self) -> dict[str, float]:
        """strength × value by label, with the name of the summand where there are several."""
        found = {}
        for label, strength, evaluation in self._entries:
            parts = {f"{label}/{name}": part for name, part in evaluation.terms.items()} or {label: evaluation.value}
            found.update({name: strength * float(part) for name, part in parts.items()})
        return found
