"""From rows to results: pairs, effects, verdicts, and the notes that a reader needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.results import BASELINE, Amount, Effect, Ratio, Results, RunRecord
from gonio.compare.secondary import changes_of, reach_of, robust_of
from gonio.compare.statistics import correlation, detectable, holm, improvement, paired_t, sign_flip
from gonio.compare.verdict import Evidence, counted, judge

__all__ = ["CostRow", "scores_of", "summarise"]

# Recipe hash, kind, block, number: the ratio to the baseline's for "step_time" and "memory", and the model's own
# for "parameters" and "flops", which the baseline has too.
CostRow = tuple[str, str, int, float]


@dataclass(frozen=True)
class _Pairs:
    """The seeds for which a recipe and the baseline both have a score."""

    seeds: tuple[int, ...]
    ours: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def differences(self) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(self.ours, self.baseline, strict=True))


def summarise(
    plan: Plan,
    runs: Sequence[RunRecord],
    costs: Sequence[CostRow],
    used: Sequence[Mapping[str, str]],
    looks: Sequence[int] = (),
) -> Results:
    """The results of a study, finished or not.

    Args:
        runs: those that have a row.
        costs: every measured ratio.
        used: the distinct package versions that runs were made with.
        looks: how many runs there were each time that results were looked at.
    """
    scores = scores_of(plan, runs)
    pairs = [_paired(scores, entry.name, plan.seeds) for entry in plan.recipes[1:]]
    adjusted = holm([sign_flip(pair.differences) for pair in pairs])
    effects = tuple(
        _effect(plan, entry, pair, p_holm, runs, costs)
        for entry, pair, p_holm in zip(plan.recipes[1:], pairs, adjusted, strict=True)
    )
    baseline = [scores[BASELINE, seed] for seed in plan.seeds if (BASELINE, seed) in scores]
    return Results(
        plan=plan,
        baseline_mean=float(np.mean(baseline)) if baseline else None,
        baseline_sd=float(np.std(baseline, ddof=1)) if len(baseline) > 1 else None,
        effects=effects,
        runs=tuple(runs),
        command=plan.command,
        versions=plan.versions,
        notes=(*plan.notes, *_notes(plan, runs, effects, used), *_looks(looks)),
        missing=len(plan.grid) - len(runs),
        looks=tuple(looks),
        robustness=robust_of(plan, runs),
    )


def scores_of(plan: Plan, runs: Sequence[RunRecord]) -> dict[tuple[str, int], float]:
    """Score by recipe and seed; diverged runs have the worst, failed ones none."""
    finished = [run.score for run in runs if run.score is not None]
    bound = min if plan.direction == "max" else max
    # a metric without a bound may get worse than what a model that knows nothing has
    reached = finished if plan.worst is None else [*finished, plan.worst]
    worst = bound(reached, default=None)
    found = {(r.recipe, r.seed): worst if r.status == "diverged" else r.score for r in runs}
    return {key: score for key, score in found.items() if score is not None}


def _paired(scores: Mapping[tuple[str, int], float], recipe: str, seeds: Sequence[int]) -> _Pairs:
    both = tuple(seed for seed in seeds if (recipe, seed) in scores and (BASELINE, seed) in scores)
    ours = tuple(scores[recipe, seed] for seed in both)
    return _Pairs(both, ours, tuple(scores[BASELINE, seed] for seed in both))


def _effect(
    plan: Plan,
    entry: RecipeEntry,
    pairs: _Pairs,
    p_holm: float,
    runs: Sequence[RunRecord],
    costs: Sequence[CostRow],
) -> Effect:
    seen = _evidence(plan, pairs, p_holm)
    verdict, reason = judge(seen)
    mine = [run.status for run in runs if run.recipe == entry.name]
    step_time = _ratio(costs, entry, "step_time")
    return Effect(
        recipe=entry.name,
        n=seen.n,
        mean=seen.mean,
        low=seen.low,
        high=seen.high,
        p=sign_flip(seen.differences) if seen.n else None,
        p_holm=p_holm if seen.n else None,
        rho=correlation(pairs.ours, pairs.baseline),
        mde=seen.mde,
        verdict=verdict,
        reason=reason,
        failed=mine.count("failed"),
        diverged=mine.count("diverged"),
        improvement=improvement(seen.differences, plan.direction),
        differences=seen.differences,
        seeds=pairs.seeds,
        step_time=step_time,
        memory=_ratio(costs, entry, "memory"),
        changes=changes_of(entry.content),
        parameters=_amount(plan, costs, entry, "parameters"),
        flops=_amount(plan, costs, entry, "flops"),
        reach=reach_of(plan, entry.name, runs, step_time.median if step_time else None),
    )


def _evidence(plan: Plan, pairs: _Pairs, p_holm: float) -> Evidence:
    differences = pairs.differences
    single = differences[0] if len(differences) == 1 else None
    mean, low, high = paired_t(differences) or (single, None, None)
    comparisons = len(plan.recipes) - 1
    sds = detectable(len(differences), comparisons)
    return Evidence(
        differences=differences,
        mean=mean,
        low=low,
        high=high,
        p_holm=p_holm,
        mde=None if sds is None else sds * float(np.std(differences, ddof=1)),
        comparisons=comparisons,
        sesoi=plan.sesoi,
        sign=1 if plan.direction == "max" else -1,
        unit=plan.unit,
    )


def _ratio(costs: Sequence[CostRow], entry: RecipeEntry, kind: str) -> Ratio | None:
    found = [ratio for hash_, name, _, ratio in costs if (hash_, name) == (entry.hash, kind)]
    if not found:
        return None
    low, median, high = np.quantile(found, (0.25, 0.5, 0.75)).tolist()
    return Ratio(median, low, high, len(found))


def _amount(plan: Plan, costs: Sequence[CostRow], entry: RecipeEntry, kind: str) -> Amount | None:
    found = {hash_: number for hash_, name, _, number in costs if name == kind}
    if entry.hash not in found or plan.baseline.hash not in found:
        return None
    return Amount(found[plan.baseline.hash], found[entry.hash])


def _notes(
    plan: Plan, runs: Sequence[RunRecord], effects: Sequence[Effect], used: Sequence[Mapping[str, str]]
) -> list[str]:
    statuses = [run.status for run in runs]
    notes: list[str] = []
    missing, diverged, failed = len(plan.grid) - len(runs), statuses.count("diverged"), statuses.count("failed")
    if missing:
        notes.append(f"{counted(missing, 'run')} of {len(plan.grid)} to do; the verdicts are provisional.")
    if diverged:
        worst = f"{plan.worst:g} {plan.unit}".strip() if plan.worst is not None else "the worst finished run"
        notes.append(f"Diverged: {counted(diverged, 'run')}, with the score of the worst case: {worst}.")
    if failed:
        notes.append(f"Failed: {counted(failed, 'run')}, without a score; their pairs are left out.")
    notes += [_looked(change) for change in plan.history]
    unhelped = [effect.recipe for effect in effects if effect.rho is not None and effect.rho <= 0]
    if unhelped:
        notes.append(f"Pairing by seed did not reduce the noise for {', '.join(unhelped)} (correlation ≤ 0).")
    if len(used) > 1:
        names = sorted({name for v in used for name in v if len({u.get(name) for u in used}) > 1})
        notes.append(f"The runs were made with different versions of {', '.join(names)}.")
    return notes


def _looked(change: Mapping[str, object]) -> str:
    parts = [f"{key} {', '.join(map(str, value))}" for key in ("seeds", "recipes") if (value := change[key])]  # type: ignore[call-overload]
    return (
        f"After {change['finished']} runs had been done, {' and '.join(parts)} were added: "
        "the p values do not account for this second look."
    )


def _looks(looks: Sequence[int]) -> list[str]:
    if len(looks) < 2:
        return []
    times = f"{', '.join(map(str, looks[:-1]))} and {looks[-1]}"
    return [
        f"The results were looked at {len(looks)} times, when there were {times} runs: "
        "the p values and intervals are those of one look."
    ]
