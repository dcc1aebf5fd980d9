"""Results of a comparison as plain data, and how they follow from the stored runs.

Pages, tables and exports read nothing else. Scores are in the metric's own unit (accuracy: percent, so a difference
of 1 is one point). Every difference is recipe − baseline of the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from gonio.escaping import html_table
from gonio.lab.judging.statistics import (
    WORDS,
    Evidence,
    contrasts,
    correlation,
    deviation,
    improvement,
    judge,
    paired_t,
    signed,
)
from gonio.lab.plan import ATTACKS, RecipeEntry, StudyPlan
from gonio.lab.record import RunRecord
from gonio.messages import counted
from gonio.recipes import BASELINE


@dataclass(frozen=True)
class Ratio:
    """A cost relative to the baseline's: median of paired ratios with its quartiles; 1 is no extra cost."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Amount:
    """A property of a model, such as its number of parameters, and the baseline's."""

    baseline: float
    recipe: float

    @property
    def ratio(self) -> float:
        """Recipe over baseline."""
        return self.recipe / self.baseline


@dataclass(frozen=True)
class TimeToScore:
    """Time until a recipe reaches the baseline's last validation score.

    Attributes:
        n: pairs of runs with a learning curve each.
        reached: pairs in which the recipe reached that score.
        ratio: median over the pairs of the recipe's time over the baseline's, step time included; None if less
            than half reached it, or no step time was measured.
    """

    n: int
    reached: int
    ratio: float | None


@dataclass(frozen=True)
class RecipeTuning:
    """The tuning of one recipe.

    Attributes:
        trials: finished so far; failed, diverged: of these.
        defaults, chosen: values by name; `chosen` is empty before the last trial.
        score, default_score: validation score of the best trial and of the one with the defaults. The best of
            several is partly luck; the comparison uses other seeds.
        seconds: CPU seconds of all trials.
    """

    recipe: str
    trials: int
    failed: int
    diverged: int
    defaults: Mapping[str, float]
    chosen: Mapping[str, float]
    score: float | None
    default_score: float | None
    seconds: float


@dataclass(frozen=True)
class Robust:
    """Accuracy of one recipe's runs on disturbed inputs.

    Attributes:
        means: accuracy in percent by attack, mean over the seeds; a diverged run has 0.
        mean, low, high: mean paired difference of `worst` to the baseline, with its paired-t 95 % interval;
            None for the baseline and for too few pairs. Not corrected for several comparisons.
        n: runs that were attacked.
        signs: signs of gradient masking, with the number of runs that show each.
    """

    recipe: str
    means: Mapping[str, float]
    n: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    signs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SecondaryMetric:
    """A metric that decides nothing, of one recipe's runs.

    Attributes:
        metric, unit: its name and unit; a script's metrics have no unit.
        score: mean over the seeds with a finite value; None if there is none.
        n: pairs with the baseline in which both have a finite value.
        mean, low, high: mean paired difference to the baseline, with its paired-t 95 % interval; None for the
            baseline and for too few pairs. Not corrected for several comparisons.
    """

    recipe: str
    metric: str
    unit: str
    score: float | None
    n: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Effect:
    """One recipe against the baseline.

    Attributes:
        n: pairs of runs in which both have a score (a diverged run has the worst score).
        mean, low, high: mean paired difference and its paired-t 95 % interval; None if n is too small.
        p: exact two-sided sign-flip p value. p_holm: the same after Holm over all recipes of the study.
        rho: correlation of the paired scores over the seeds; None if undefined.
        mde: minimum detectable effect, at a power of 80 %; None if no effect can be detected.
        verdict: of the sentence "the recipe is better": `helps` if it is reproduced, `hurts` if it is contradicted,
            else one of :data:`gonio.lab.judging.statistics.VERDICTS`. `reason` says why, in one sentence.
        failed: runs of the recipe that failed; their pairs are left out. diverged: runs that diverged;
            they count as the worst score.
        improvement: probability that the recipe beats the baseline in one pair (ties count half).
        differences: the paired differences, in the order of `seeds`.
        changes: the recipe's changes, e.g. `("swap DecoupledConv2d",)`. With more than one the effect is
            confounded: it belongs to all of them together.
        parameters, flops: of the model, and of one training step.
        reach: time to the baseline's last validation score.
    """

    recipe: str
    n: int
    mean: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    rho: float | None
    mde: float | None
    verdict: str
    reason: str
    failed: int = 0
    diverged: int = 0
    improvement: float | None = None
    differences: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    step_time: Ratio | None = None
    memory: Ratio | None = None
    changes: tuple[str, ...] = ()
    parameters: Amount | None = None
    flops: Amount | None = None
    reach: TimeToScore | None = None

    @property
    def ties(self) -> int:
        """Pairs with equal scores."""
        return self.differences.count(0.0)

    @property
    def wins(self) -> int:
        """Pairs in which the recipe is better; ties do not count."""
        return round((self.improvement or 0.0) * self.n - self.ties / 2)

    @property
    def confounded(self) -> bool:
        """Whether the recipe differs from the baseline in more than one thing."""
        return len(self.changes) > 1


@dataclass(frozen=True)
class Results:
    """A study's outcome.

    Attributes:
        plan: what was decided before the first run.
        effects: one per recipe, in the plan's order, the baseline left out.
        runs: every run with a row, the baseline's first, by recipe and seed.
        missing: how many runs of the plan have no row yet.
        command: the command line that reproduces the study.
        notes: remarks that a reader needs to judge the numbers.
        looks: number of finished runs at each look at new results.
        tuning: one entry per recipe, the baseline first; empty without tuning.
        robustness: the same for disturbed inputs.
        further: one entry per further metric and recipe, the baseline first; empty if there is no such metric.
    """

    plan: StudyPlan
    baseline_mean: float | None
    baseline_sd: float | None
    effects: tuple[Effect, ...]
    runs: tuple[RunRecord, ...]
    command: str
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    missing: int = 0
    looks: tuple[int, ...] = ()
    tuning: tuple[RecipeTuning, ...] = ()
    robustness: tuple[Robust, ...] = ()
    further: tuple[SecondaryMetric, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The results as JSON-able data."""
        return {**asdict(self), "plan": self.plan.to_dict()}

    def __repr__(self) -> str:
        verdicts = "; ".join(f"{effect.recipe}: {effect.verdict}" for effect in self.effects)
        return f"<Results of {self.plan.task}: {len(self.runs)} runs, {self.missing} missing; {verdicts}>"

    def _repr_html_(self) -> str:
        unit = f" [{self.plan.unit}]" if self.plan.unit else ""
        rows = [
            (e.recipe, *("" if v is None else signed(v) for v in (e.mean, e.low, e.high)), e.verdict)
            for e in self.effects
        ]
        return html_table(
            f"{self.plan.task}, {self.plan.model}",
            ("recipe", f"difference{unit}", "from", "to", "verdict"),
            rows,
            self.notes,
        )

    @property
    def failed(self) -> int:
        """Number of runs that have no result: an exception, or a process that died. Diverged runs have one."""
        return sum(run.status == "failed" for run in self.runs)


# --- from stored runs to results ------------------------------------------------------------------------

# Recipe hash, kind, block, number: a ratio to the baseline for "step_time" and "memory"; for "parameters" and
# "flops" the model's own number, which is stored for the baseline too.
CostRow = tuple[str, str, int, float]


def summarise(
    plan: StudyPlan,
    runs: Sequence[RunRecord],
    costs: Sequence[CostRow],
    used: Sequence[Mapping[str, str]],
    looks: Sequence[int] = (),
) -> Results:
    """The results of a study, finished or not.

    Args:
        used: the distinct package versions of the runs.
        looks: number of finished runs at each look at new results.
    """
    costs = [*costs, *_script_costs(plan, runs)]
    scores = scores_of(plan, runs)
    differences = [_differences(plan, entry.name, scores) for entry in plan.recipes[1:]]
    baseline = [scores[BASELINE, seed] for seed in plan.seeds if (BASELINE, seed) in scores]
    untrained = untrained_baseline(plan, baseline)
    judged = judge([
        Evidence(
            values=tuple(each.values()), direction="larger" if plan.direction == "max" else "smaller",
            sesoi=plan.sesoi, unit=plan.unit, obstacle=untrained or "",
        )
        for each in differences
    ])  # fmt: skip
    effects = tuple(
        _effect(plan, entry, scores, [*each], seen, runs, costs)
        for entry, each, seen in zip(plan.recipes[1:], differences, judged, strict=True)
    )
    return Results(
        plan=plan,
        baseline_mean=float(np.mean(baseline)) if baseline else None,
        baseline_sd=float(deviation(np.array(baseline))) if len(baseline) > 1 else None,
        effects=effects,
        runs=tuple(runs),
        command=plan.command,
        versions=plan.versions,
        notes=(
            *([untrained] if untrained else []), *plan.notes, *_notes(plan, runs, effects, used, looks),
            *_notes_on_costs(plan, costs),
        ),
        missing=len(plan.grid) - len(runs),
        looks=tuple(looks),
        robustness=robust_of(plan, runs),
        further=_further(plan, runs),
    )  # fmt: skip


def scores_of(plan: StudyPlan, runs: Sequence[RunRecord]) -> dict[tuple[str, int], float]:
    """Score by recipe and seed; a diverged run has the worst score, a failed one none."""
    finished = [run.score for run in runs if run.score is not None]
    # for an unbounded metric a finished run may be worse than `worst`, the score of an uninformed model
    reached = finished if plan.worst is None else [*finished, plan.worst]
    worst = (min if plan.direction == "max" else max)(reached, default=None)
    found = {(run.recipe, run.seed): worst if run.status == "diverged" else run.score for run in runs}
    return {key: score for key, score in found.items() if score is not None}


def untrained_baseline(plan: StudyPlan, scores: Sequence[float]) -> str | None:
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


def _differences(plan: StudyPlan, recipe: str, scores: Mapping[tuple[str, int], float]) -> dict[int, float]:
    return contrasts(scores, {recipe: 1.0, BASELINE: -1.0}, plan.seeds)


def _effect(
    plan: StudyPlan,
    entry: RecipeEntry,
    scores: Mapping[tuple[str, int], float],
    seeds: Sequence[int],
    seen: Evidence,
    runs: Sequence[RunRecord],
    costs: Sequence[CostRow],
) -> Effect:
    statuses = [run.status for run in runs if run.recipe == entry.name]
    step_time = _ratio(costs, entry, "step_time")
    return Effect(
        recipe=entry.name,
        n=seen.n,
        mean=seen.mean,
        low=seen.low,
        high=seen.high,
        p=seen.p,
        p_holm=seen.p_holm,
        rho=correlation(*([scores[name, seed] for seed in seeds] for name in (entry.name, BASELINE))),
        mde=seen.mde,
        verdict=WORDS.get(seen.verdict, seen.verdict),
        reason=seen.reason,
        failed=statuses.count("failed"),
        diverged=statuses.count("diverged"),
        improvement=float(improvement(plan.sign * np.asarray(seen.values))) if seen.values else None,
        differences=seen.values,
        seeds=tuple(seeds),
        step_time=step_time,
        memory=_ratio(costs, entry, "memory"),
        changes=entry.changes,
        parameters=_amount(plan, costs, entry, "parameters"),
        flops=_amount(plan, costs, entry, "flops"),
        reach=reach_of(plan, entry.name, runs, step_time.median if step_time else None),
    )


def _ratio(costs: Sequence[CostRow], entry: RecipeEntry, kind: str) -> Ratio | None:
    found = [ratio for hash_, name, _, ratio in costs if (hash_, name) == (entry.hash, kind)]
    if not found:
        return None
    low, median, high = np.quantile(found, (0.25, 0.5, 0.75)).tolist()
    return Ratio(median, low, high, len(found))


def _script_costs(plan: StudyPlan, runs: Sequence[RunRecord]) -> list[CostRow]:
    """The ratios to the baseline, seed by seed, of what the runs of a script measured."""
    found = {(run.recipe, run.seed): run.costs for run in runs}
    return [
        (entry.hash, kind, seed, value / base[kind])
        for entry in plan.recipes[1:]
        for seed in plan.seeds
        for base in [found.get((BASELINE, seed), {})]
        for kind, value in found.get((entry.name, seed), {}).items()
        if base.get(kind)
    ]


def _amount(plan: StudyPlan, costs: Sequence[CostRow], entry: RecipeEntry, kind: str) -> Amount | None:
    found = {hash_: number for hash_, name, _, number in costs if name == kind}
    if entry.hash not in found or plan.baseline.hash not in found:
        return None
    return Amount(found[plan.baseline.hash], found[entry.hash])


def reach_of(plan: StudyPlan, recipe: str, runs: Sequence[RunRecord], step_time: float | None) -> TimeToScore | None:
    """Time until the recipe reaches the baseline's last validation score; None without a pair of curves.

    Args:
        step_time: of the recipe over the baseline's; None if it was not measured.
    """
    curves = {(run.recipe, run.seed): run for run in runs if run.status != "failed"}
    pairs = [(curves.get((BASELINE, seed)), curves.get((recipe, seed))) for seed in plan.seeds]
    found = [_epochs(plan, base, ours) for base, ours in pairs if base and ours and base.status == "finished"]
    if not found:
        return None
    middle = statistics.median(found)
    ratio = None if step_time is None or math.isinf(middle) else middle * step_time
    return TimeToScore(len(found), sum(map(math.isfinite, found)), ratio)


def _epochs(plan: StudyPlan, base: RunRecord, ours: RunRecord) -> float:
    """Epochs until the baseline's last validation score, over the baseline's own; infinite if never."""
    scores = [score for score in base.curve.get("val_score", ()) if score is not None]

    def first(run: RunRecord) -> float:
        curve = enumerate(run.curve.get("val_score", ()), start=1)
        reached = (i for i, score in curve if score is not None and plan.sign * score >= plan.sign * scores[-1])
        return float(next(reached, math.inf))

    return first(ours) / first(base) if scores else math.inf


def robust_of(plan: StudyPlan, runs: Sequence[RunRecord]) -> tuple[Robust, ...]:
    """One entry per recipe, the baseline first; empty if the study attacks no model."""
    judged = {(run.recipe, run.seed): run for run in runs if run.status != "failed"}
    return tuple(_robust(plan, entry.name, judged) for entry in plan.recipes) if plan.threat else ()


def _robust(plan: StudyPlan, recipe: str, judged: Mapping[tuple[str, int], RunRecord]) -> Robust:
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
    mean, low, high = paired_t([*_differences(plan, recipe, worst).values()]) or (None, None, None)
    return Robust(recipe, means, len(mine), mean, low, high, dict(signs))


def _notes(
    plan: StudyPlan,
    runs: Sequence[RunRecord],
    effects: Sequence[Effect],
    used: Sequence[Mapping[str, str]],
    looks: Sequence[int],
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
            f"After {counted(int(change['finished']), 'run')} had been done, {' and '.join(parts)} were added: "
            "the p values do not account for this second look."
        )
    unhelped = [effect.recipe for effect in effects if effect.rho is not None and effect.rho <= 0]
    if unhelped:
        notes.append(f"Pairing by seed did not reduce the noise for {', '.join(unhelped)} (correlation ≤ 0).")
    if len(used) > 1:
        names = sorted({name for v in used for name in v if len({u.get(name) for u in used}) > 1})
        notes.append(f"The runs were made with different versions of {', '.join(names)}.")
    if len(looks) > 1:
        times = f"{', '.join(map(str, looks[:-1]))} and {looks[-1]}"
        notes.append(
            f"The results were looked at {len(looks)} times, when there were {times} runs: "
            "the p values and intervals are those of one look."
        )
    return notes


_LEAST_COSTS = {"step_time": 5, "memory": 3}  # ratios of each recipe that are measured and stored together


def _notes_on_costs(plan: StudyPlan, costs: Sequence[CostRow]) -> list[str]:
    """The recipes with fewer cost ratios than are stored together: rows of the database are missing."""
    counts = Counter((hash_, kind) for hash_, kind, _, _ in costs)
    found = [
        (entry.name, kind, counts[entry.hash, kind])
        for entry in plan.recipes[1:]
        for kind, least in _LEAST_COSTS.items()
        if not plan.scripted and 0 < counts[entry.hash, kind] < least
    ]
    return [f"The cost ratios ({kind}) of {name} are incomplete: {counted(n, 'row')} left." for name, kind, n in found]


def _further(plan: StudyPlan, runs: Sequence[RunRecord]) -> tuple[SecondaryMetric, ...]:
    """The metrics that decide nothing: the task's, or those that a script logged."""
    names = dict.fromkeys([*plan.metrics, *(name for run in runs for name in run.metrics)])
    return tuple(_further_of(plan, name, entry.name, runs) for name in names for entry in plan.recipes)


def _further_of(plan: StudyPlan, metric: str, recipe: str, runs: Sequence[RunRecord]) -> SecondaryMetric:
    values = {(run.recipe, run.seed): run.metrics.get(metric) for run in runs}
    known = {key: value for key, value in values.items() if value is not None}
    own = [known[recipe, seed] for seed in plan.seeds if (recipe, seed) in known]
    found = SecondaryMetric(recipe, metric, plan.metrics.get(metric, ""), statistics.fmean(own) if own else None)
    if recipe == BASELINE:
        return found
    differences = [*_differences(plan, recipe, known).values()]
    mean, low, high = paired_t(differences) or (statistics.fmean(differences) if differences else None, None, None)
    return replace(found, n=len(differences), mean=mean, low=low, high=high)
