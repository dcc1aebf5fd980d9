"""What the tables of a study show, as text in cells: markdown, LaTeX, the terminal and the page lay them out."""

from __future__ import annotations

from dataclasses import dataclass

from gonio.compare.results import Effect, Results
from gonio.report.sections import attacks_of, robust_rows, threat_words
from gonio.report.words import Scale, p_value, ratio, said

__all__ = ["Shown", "attacks", "evidence", "tables", "verdicts"]


@dataclass(frozen=True)
class Shown:
    """One table.

    Attributes:
        texts: columns of words; the others are numbers.
        notes: what a reader must know about it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Columns of numbers."""
        return tuple(i for i in range(len(self.head)) if i not in self.texts)


def tables(results: Results) -> tuple[Shown, ...]:
    """All of them, the verdicts first.

    Example:
        >>> from gonio.report.shown import tables
        >>> [table.title for table in tables(gonio.report.example())]
        ['Verdicts', 'Behind the verdicts']
    """
    found = (verdicts(results), evidence(results), attacks(results))
    return tuple(table for table in found if table is not None)


def verdicts(results: Results) -> Shown:
    """Effect, interval, p, verdict and cost of each recipe."""
    scale = Scale.of(results)
    head = ("recipe", f"effect in {scale.unit}", "95 % interval", "Holm p", "verdict", "step time", "memory")
    return Shown("Verdicts", head, tuple(_verdict(e, scale) for e in results.effects), (0, 4))


def _verdict(e: Effect, scale: Scale) -> tuple[str, ...]:
    numbers = (scale.signed(e.mean), scale.interval(e.low, e.high), p_value(e.p_holm))
    return (e.recipe, *numbers, said(e), ratio(e.step_time), ratio(e.memory))


def evidence(results: Results) -> Shown:
    """What a verdict rests on: pairs, lost runs, their correlation, and what would have been seen."""
    scale = Scale.of(results)
    head = ("recipe", "pairs", "failed", "diverged", "ρ of pairs", f"detectable, {scale.unit}", "pairs that are better")
    return Shown("Behind the verdicts", head, tuple(_evidence(e, scale) for e in results.effects))


def _evidence(e: Effect, scale: Scale) -> tuple[str, ...]:
    rho = "–" if e.rho is None else f"{e.rho:.2f}".replace("-", "−")
    better = "–" if e.improvement is None else f"{100 * e.improvement:.0f} %"
    return (e.recipe, str(e.n), str(e.failed), str(e.diverged), rho, scale.score(e.mde), better)


def attacks(results: Results) -> Shown | None:
    """Accuracy on disturbed inputs, the baseline first; None if no model was attacked."""
    rows = robust_rows(results, {effect.recipe: "" for effect in results.effects})
    if not rows:
        return None
    head = ("recipe", *(title for _, title in attacks_of(results)), "difference in the worst", "95 % interval")
    notes = [f"{threat_words(results)}. The difference is paired by seed, in points, and not corrected: no verdict."]
    notes += [f"{row.recipe}: {sign}" for row in rows for sign in row.signs]
    cells = tuple((row.recipe, *row.cells, row.mean, row.interval) for row in rows)
    return Shown("Right under attack, %", head, cells, notes=tuple(notes))
