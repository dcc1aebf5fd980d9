"""The verdict table for a paper."""

from __future__ import annotations

from collections.abc import Sequence

from gonio.compare.results import Effect, Results
from gonio.foreign_text import tex_cell
from gonio.report.words import Scale, headline, p_value, ratio

__all__ = ["tabular", "to_latex"]


def to_latex(results: Results) -> str:
    r"""The verdict table as LaTeX with booktabs; names are escaped, so that none is a command.

    Example:
        >>> print(gonio.report.to_latex(gonio.report.example()).splitlines()[5])
        orthogonal-init & $+$0.10 & $+$0.00 to $+$0.20 & 0.50 & no useful effect & $\times$1.03 & $\times$1.00 \\
    """
    scale = Scale.of(results)
    head = ("recipe", f"effect in {scale.unit}", "95 % interval", "Holm p", "verdict", "step time", "memory")
    rows = [_cells(effect, scale) for effect in results.effects]
    notes = [f"% {tex_cell(note)}" for note in (headline(results), *results.notes)]
    return "\n".join([*tabular(head, rows, numbers=(1, 2, 3, 5, 6)), *notes]) + "\n"


def _cells(e: Effect, scale: Scale) -> tuple[str, ...]:
    numbers = (scale.signed(e.mean), scale.interval(e.low, e.high), p_value(e.p_holm))
    return (e.recipe, *numbers, e.verdict, ratio(e.step_time), ratio(e.memory))


def tabular(head: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int]) -> list[str]:
    """The lines of a table; columns in `numbers` are right-aligned."""
    columns = "".join("r" if i in numbers else "l" for i in range(len(head)))
    first, *rest = [" & ".join(map(tex_cell, row)) + r" \\" for row in (head, *rows)]
    begin = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return [*begin, first, r"\midrule", *rest, r"\bottomrule", r"\end{tabular}"]
