"""From stored runs to results: pairs, effects, verdicts, secondary figures and notes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gonio.compare.judging.results import UNTRAINED, Amount, Effect, Ratio, Reach, Results, Robust, RunRecord
from gonio.compare.judging.robustness import ATTACKS
from gonio.compare.judging.statistics import correlation, detectable, holm, improvement, paired_t, sign_flip
from gonio.compare.judging.verdict import Evidence, counted, judge
from gonio.compare.planning.plan import BASELINE, Plan, RecipeEntry

# Recipe hash, kind, block, number: a ratio to the baseline for "step_time" and "memory"; for "parameters" and
# "flops" the model's own number, which is stored for the baseline too.
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
        runs: the stored runs.
        costs: every measured ratio.
        used: the distinct package versions of the runs.
        looks: number of finished runs at each look at new results.
    """
    scores = scores_of(plan, runs)
    pairs = [_paired(scores, entry.name, plan.seeds) for entry in plan.recipes[1:]]
    adjusted = holm([sign_flip(pair.differences) for pair in pairs]).tolist()
    effects = tuple(
        _effect(plan, entry, pair, p_holm, runs, costs)
        for entry, pair, p_holm in zip(plan.recipes[1:], pairs, adjusted, strict=True)
    )
    baseline = [scores[BASELINE, seed] for seed in plan.seeds if (BASELINE, seed) in scores]
    untrained = untrained_baseline(plan, baseline)
    if untrained:
        effects = tuple(replace(effect, verdict=UNTRAINED, reason=untrained) for effect in effects)
    return Results(
        plan=plan,
        baseline_mean=float(np.mean(baseline)) if baseline else None,
        baseline_sd=float(np.std(baseline, ddof=1)) if len(baseline) > 1 else None,
        effects=effects,
        runs=tuple(runs),
        command=plan.command,
        versions=plan.versions,
        notes=(
            *([untrained] if untrained else []),
            *plan.notes,
            *_notes(plan, runs, effects, used),
            *_look_notes(looks),
        ),
        missing=len(plan.grid) - len(runs),
        looks=tuple(looks),
        robustness=robust_of(plan, runs),
    )


def scores_of(plan: Plan, runs: Sequence[RunRecord]) -> dict[tuple[str, int], float]:
    """Score by recipe and seed; a diverged run has the worst score, a failed one none."""
    finished = [run.score for run in runs if run.score is not None]
    # for an unbounded metric a finished run may be worse than `worst`, the score of an uninformed model
    reached = finished if plan.worst is None else [*finished, plan.worst]
    worst = (min if plan.direction == "max" else max)(reached, default=None)
    found = {(r.recipe, r.seed): worst if r.status == "diverged" else r.score for r in runs}
    return {key: score for key, score in found.items() if score is not None}


def untrained_baseline(plan: Plan, scores: Sequence[float]) -> str | None:
    """A sentence if the baseline is at chance level in every seed, else None; no recipe can then be judged.

    At chance level: no better than the best constant prediction, up to two standard errors of an accuracy on the
    test split, in each seed and on average.
    """
    if plan.chance is None or not scores:
        return None
    error = 0.0
    if plan.unit == "%":
        share = min(max(plan.chance / 100, 0.0), 1.0)
        error = 100 * math.sqrt(share * (1 - share) / max(1, plan.splits.get("test", 1)))
    gains = [plan.sign * (score - plan.chance) for score in scores]
    if max(gains) > 2 * error or statistics.fmean(gains) > 2 * error / math.sqrt(len(gains)):
        return None
    found, chance = (f"{value:.4g} {plan.unit}".strip() for value in (statistics.fmean(scores), plan.chance))
    return (
        f"The baseline does not train: its mean {plan.metric} is {found}, and a constant prediction has {chance}. "
        "Nothing can be compared with it; check the learning rate, the number of epochs and the data."
    )


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
    statuses = [run.status for run in runs if run.recipe == entry.name]
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
        failed=statuses.count("failed"),
        diverged=statuses.count("diverged"),
        improvement=improvement(seen.differences, plan.direction),
        differences=seen.differences,
        seeds=pairs.seeds,
        step_time=step_time,
        memory=_ratio(costs, entry, "memory"),
        changes=entry.changes,
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
        sign=plan.sign,
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


# --- secondary figures ------------------------------------------------------------------------------


def reach_of(plan: Plan, recipe: str, runs: Sequence[RunRecord], step_time: float | None) -> Reach | None:
    """Time until the recipe reaches the baseline's last validation score; None without a pair of curves.

    Args:
        step_time: of the recipe over the baseline's; None if it was not measured.
    """
    curves = {(run.recipe, run.seed): run for run in runs if run.status != "failed"}
    pairs = [(curves.get((BASELINE, seed)), curves.get((recipe, seed))) for seed in plan.seeds]
    found = [
        _epochs(plan, base, ours)
        for base, ours in pairs
        if base is not None and ours is not None and base.status == "finished"
    ]
    if not found:
        return None
    middle = statistics.median(found)
    ratio = None if step_time is None or math.isinf(middle) else middle * step_time
    return Reach(len(found), sum(map(math.isfinite, found)), ratio)


def _epochs(plan: Plan, base: RunRecord, ours: RunRecord) -> float:
    """Epochs until the baseline's last validation score, over the baseline's own; infinite if never."""
    scores = [score for score in base.curve.get("val_score", ()) if score is not None]

    def first(run: RunRecord) -> float:
        curve = enumerate(run.curve.get("val_score", ()), start=1)
        reached = (i for i, score in curve if score is not None and plan.sign * score >= plan.sign * scores[-1])
        return float(next(reached, math.inf))

    return first(ours) / first(base) if scores else math.inf


def robust_of(plan: Plan, runs: Sequence[RunRecord]) -> tuple[Robust, ...]:
    """One entry per recipe, the baseline first; empty if the study attacks no model."""
    if plan.threat is None:
        return ()
    judged = {(run.recipe, run.seed): run for run in runs if run.status != "failed"}
    return tuple(_robust(plan, entry.name, judged) for entry in plan.recipes)


def _robust(plan: Plan, recipe: str, judged: Mapping[tuple[str, int], RunRecord]) -> Robust:
    mine = [judged[recipe, seed] for seed in plan.seeds if (recipe, seed) in judged]
    means = {
        name: statistics.fmean(float(run.robustness.get(name, 0.0)) for run in mine)
        for name in ("clean", *ATTACKS, "worst")
        if any(name in run.robustness for run in mine)
    }
    # a sign without the figures of its run
    signs = Counter(sign.partition(":")[0] for run in mine for sign in run.robustness.get("signs", ()))
    if recipe == BASELINE:
        return Robust(recipe, means, len(mine), signs=dict(signs))
    # a diverged model has no right answer
    worst = {key: float(run.robustness.get("worst", 0.0)) for key, run in judged.items()}
    both = [seed for seed in plan.seeds if (recipe, seed) in worst and (BASELINE, seed) in worst]
    mean, low, high = paired_t([worst[recipe, seed] - worst[BASELINE, seed] for seed in both]) or (None, None, None)
    return Robust(recipe, means, len(mine), mean, low, high, dict(signs))


# --- notes ------------------------------------------------------------------------------------------


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
    for change in plan.history:
        parts = [f"{key} {', '.join(map(str, value))}" for key in ("seeds", "recipes") if (value := change[key])]
        notes.append(
            f"After {change['finished']} runs had been done, {' and '.join(parts)} were added: "
            "the p values do not account for this second look."
        )
    unhelped = [effect.recipe for effect in effects if effect.rho is not None and effect.rho <= 0]
    if unhelped:
        notes.append(f"Pairing by seed did not reduce the noise for {', '.join(unhelped)} (correlation ≤ 0).")
    if len(used) > 1:
        names = sorted({name for v in used for name in v if len({u.get(name) for u in used}) > 1})
        notes.append(f"The runs were made with different versions of {', '.join(names)}.")
    return notes


def _look_notes(looks: Sequence[int]) -> list[str]:
    if len(looks) < 2:
        return []
    times = f"{', '.join(map(str, looks[:-1]))} and {looks[-1]}"
    return [
        f"The results were looked at {len(looks)} times, when there were {times} runs: "
        "the p values and intervals are those of one look."
    ]
