"""Results of a comparison as plain data; pages, tables and exports read nothing else.

Scores are in the metric's own unit (accuracy: percent, so a difference of 1 is one point). Every
difference is recipe − baseline of the same seed; `Results.plan.direction` says whether more is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gonio.compare.planning.plan import Plan

STATUSES = ("finished", "diverged", "failed")
UNTRAINED = "the baseline does not train"
VERDICTS = ("helps", "hurts", "no useful effect", "no evidence", "underpowered", UNTRAINED)


@dataclass(frozen=True)
class RunRecord:
    """One recipe × one seed, as it ended.

    Attributes:
        recipe: the recipe's name; "baseline" for the unchanged model.
        status: `finished`; `diverged` (NaN or Inf in a loss or output); `failed` (an exception, or the process died).
        score: test score at the epoch with the best validation score; None unless finished.
        best_epoch: that epoch, counted from 0.
        curve: `train_loss` (task loss without penalty) and `val_score`, one number per epoch; a
            non-finite number is None.
        geometry: `{"layers": {path: {"shape", "dim", "filters", "norms", "angle_counts"}},
            "norm_quantiles": [0, .25, .5, .75, 1], "angle_edges": [0, 2, …, 180]}` of the scored model.
            `norms` are quantiles of the filter norms; `angle_counts` a histogram of the pairwise filter angles in
            degrees; `dim` the length of a filter. Empty unless finished.
        plan: the recipe's plan for this model, layer by layer; "" for the baseline.
        settings: tuned values of the recipe, by name; empty without tuning.
        robustness: accuracy in percent on disturbed inputs, see
            :func:`gonio.compare.judging.robustness.robustness`; empty if the study does not attack models.
        error: why the run diverged or failed.
        seconds: CPU seconds of the run's process; ignored when records are compared.
    """

    recipe: str
    seed: int
    status: str
    score: float | None = None
    best_epoch: int | None = None
    curve: Mapping[str, list[float | None]] = field(default_factory=dict)
    geometry: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    error: str | None = None
    seconds: float | None = field(default=None, compare=False)
    settings: Mapping[str, float] = field(default_factory=dict)
    robustness: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-able data."""
        return asdict(self)


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
class Reach:
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
class Tuned:
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
            None for the baseline and for too few pairs. Exploratory: not corrected for several comparisons.
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
class Effect:
    """One recipe against the baseline.

    Attributes:
        n: pairs of runs in which both have a score (a diverged run has the worst score).
        mean, low, high: mean paired difference and its paired-t 95 % interval; None if n is too small.
        p: exact two-sided sign-flip p value. p_holm: the same after Holm over all recipes of the study.
        rho: correlation of the paired scores over the seeds; None if undefined.
        mde: minimum detectable effect, at a power of 80 %; None if no effect can be detected.
        verdict: one of :data:`VERDICTS`; `reason` says why, in one sentence.
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
    reach: Reach | None = None

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
    """

    plan: Plan
    baseline_mean: float | None
    baseline_sd: float | None
    effects: tuple[Effect, ...]
    runs: tuple[RunRecord, ...]
    command: str
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    missing: int = 0
    looks: tuple[int, ...] = ()
    tuning: tuple[Tuned, ...] = ()
    robustness: tuple[Robust, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The results as JSON-able data."""
        return {**asdict(self), "plan": self.plan.to_dict()}

    @property
    def failed(self) -> int:
        """Number of runs that have no result: an exception, or a process that died. Diverged runs have one."""
        return sum(run.status == "failed" for run in self.runs)
