"""The tables of a study, as text in cells; markdown, LaTeX, the terminal and the page lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gonio.compare.judging.results import Effect, Results, Robust
from gonio.compare.planning.plan import BASELINE
from gonio.report import wording as say
from gonio.report.wording import Scale, count

ATTACKS = {
    "clean": "undisturbed",
    "noise": "noise",
    "transfer": "transfer",
    "fgsm": "FGSM",
    "pgd": "PGD",
    "smoothed": "smoothed PGD",
    "worst": "worst of all",
}


@dataclass(frozen=True)
class Table:
    """One table; the first column names the recipe.

    Attributes:
        texts: columns of words; the others are numbers.
        notes: remarks that a reader needs.
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


def tables(results: Results) -> tuple[Table, ...]:
    """The tables of every export, the verdicts first; without those that have no row."""
    attacked = attacks(results)
    return (verdicts(results), evidence(results), *([attacked] if attacked.rows else []))


def verdicts(results: Results) -> Table:
    """Effect, interval, p, verdict and cost of each recipe."""
    scale = Scale.of(results)

    def row(e: Effect) -> tuple[str, ...]:
        numbers = (scale.signed(e.mean), scale.interval(e.low, e.high), say.p_value(e.p_holm))
        return (e.recipe, *numbers, say.verdict_text(e), say.ratio(e.step_time), say.ratio(e.memory))

    head = ("recipe", f"effect in {scale.unit}", "95 % interval", "Holm p", "verdict", "step time", "memory")
    return Table("Verdicts", head, tuple(map(row, results.effects)), (0, 4))


def evidence(results: Results) -> Table:
    """The evidence of each verdict: pairs, lost runs, correlation of the pairs and minimum detectable effect."""
    scale = Scale.of(results)

    def row(e: Effect) -> tuple[str, ...]:
        return (e.recipe, str(e.n), str(e.failed), str(e.diverged), say.rho(e), scale.score(e.mde), say.won(e))

    detectable = f"detectable effect, {scale.unit}"
    head = ("recipe", "pairs", "failed", "diverged", "pair correlation", detectable, "seeds won")
    return Table("Evidence", head, tuple(map(row, results.effects)))


def attacks(results: Results) -> Table:
    """Accuracy on disturbed inputs, the baseline first; without rows if no model was attacked."""
    made = [name for name in ATTACKS if any(name in robust.means for robust in results.robustness)]
    points = Scale("points", 1)

    def row(robust: Robust) -> tuple[str, ...]:
        cells = [f"{robust.means[name]:.1f}" if name in robust.means else "–" for name in made]
        mean = "" if robust.recipe == BASELINE else points.signed(robust.mean)
        return (robust.recipe, *cells, mean, points.interval(robust.low, robust.high))

    head = ("recipe", *(ATTACKS[name] for name in made), "difference in the worst", "95 % interval")
    remark = "The difference is in points, paired by seed and not corrected for the number of recipes: no verdict."
    signs = [f"{recipe}: {sign}" for recipe, found in hidden_gradients(results).items() for sign in found]
    rows = tuple(map(row, results.robustness)) if made else ()
    return Table("Accuracy under attack, %", head, rows, notes=(f"{say.threat_text(results)}. {remark}", *signs))


def hidden_gradients(results: Results) -> dict[str, list[str]]:
    """By recipe, the signs that gradients hide a weakness."""
    return {
        robust.recipe: [f"{sign} (in {n} of {count(robust.n, 'run')})" for sign, n in robust.signs.items()]
        for robust in results.robustness
        if robust.signs
    }


def costs(results: Results) -> Table:
    """Parameters, FLOPs, time to the baseline's score and CPU time; without rows if nothing was measured."""

    def row(e: Effect) -> tuple[str, ...]:
        trials = sum(tuned.seconds for tuned in results.tuning if tuned.recipe == e.recipe)
        whole = trials + sum(run.seconds or 0.0 for run in results.runs if run.recipe == e.recipe)
        cpu = f"{say.duration(whole)}, {say.duration(trials)} of it tuning" if trials else say.duration(whole)
        return (e.recipe, say.added(e.parameters), say.added(e.flops), say.reached(e.reach), cpu)

    head = ("recipe", "parameters added", "FLOPs added per step", "time to the baseline's last validation score")
    measured = any(e.parameters or e.flops or e.reach for e in results.effects)
    return Table("Costs", (*head, "CPU time of the study"), tuple(map(row, results.effects)) if measured else ())


def tuning(results: Results) -> Table:
    """The settings that tuning chose, the baseline first; without rows if there was no tuning."""
    scale, rows = Scale.of(results), []
    for t in results.tuning:
        lost = ", ".join(say.lost(t))
        trials = f"{t.trials} ({lost})" if lost else f"{t.trials}"
        scores = (scale.score(t.default_score), scale.score(t.score))
        values = (_values(t.defaults), _values(t.chosen) or "not yet")
        rows.append((t.recipe, trials, *values, *scores, say.duration(t.seconds)))
    head = ("recipe", "trials", "defaults", "chosen", "validation, defaults", "validation, chosen", "CPU time")
    return Table("Tuning", head, tuple(rows), (0, 2, 3))


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())
