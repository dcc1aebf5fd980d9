"""When the runs of a claim are a fair test of it: rules that are checked before a verdict is given.

An identity is exempt. Every other claim must state what its experiment needs (:class:`Fair`), and its runs must show
it: every arm trains, the arms' scores agree where another quantity is compared, strengths are tried at several doses,
learning rates are tuned, training is long enough, and a control arm shows the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gonio.lab.claims.claim import CHOICE_SEEDS, FEWEST_DOSES, Arm, Claim, Experiment, TrainingFields
from gonio.lab.judging.statistics import ALPHA, half_width, points, sign_flip_rows
from gonio.lab.running.measures import MeasureSpec, measures
from gonio.messages import say

FEWEST_TRIALS = 8  # of the learning rate of each arm
FIELD_EXAMPLES = 10_000
_PAIRINGS = 400
_END = 0.95  # a tuned value further out than this part of the way to an end of its range is at the end
_Scores = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Runs:
    """Every number of a claim's runs that a verdict depends on.

    Attributes:
        scores: what the claim is about, by arm and seed; a diverged run has the worst score. unit: of them.
        reached: score of the task on the test split, by arm and seed; without those of diverged runs.
        reached_unit: of them.
        examples: in the training split; 0 if they were not recorded.
        searched: of each tuned arm, by setting, where in its range the best value lies: −1 at the low end, 1 at the
            high end.
        failures: of each arm with failed runs, why the first one failed.
    """

    scores: _Scores = field(default_factory=dict)
    unit: str = ""
    reached: _Scores = field(default_factory=dict)
    reached_unit: str = ""
    examples: int = 0
    searched: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Runs:
        """From plain data, whose seeds are text after JSON."""
        seeds = {
            name: {arm: {int(seed): value for seed, value in of.items()} for arm, of in data.get(name, {}).items()}
            for name in ("scores", "reached")
        }
        return cls(**{**data, **seeds})


def controlled(claim: Claim, setting: Experiment, *, epochs: int) -> tuple[Arm, ...]:
    """The arms of an experiment and its controls, which repeat the baseline.

    `again` draws other random numbers; `longer` trains twice as long. An identity needs none, a measure of the start
    and a claim about speed no longer training.

    Args:
        epochs: of the task, where neither experiment nor arm says otherwise.
    """
    if claim.scope == "identity":
        return setting.arms
    base = setting.baseline
    found = [*setting.arms, base.model_copy(update={"name": "again", "redraw": True, "of": "", "series": ""})]
    if not measures()[claim.measure].start and not claim.fair.speed:
        twice = 2 * (base.training.epochs or setting.training.epochs or epochs)
        training = TrainingFields(**{**base.training.model_dump(exclude_none=True), "epochs": twice})
        found.append(base.model_copy(update={"name": "longer", "training": training, "of": "", "series": ""}))
    return tuple(found)


def chosen(claim: Claim, setting: Experiment, runs: Runs) -> dict[str, str]:
    """The arm that is judged for each side with doses, by the runs of :data:`CHOICE_SEEDS` alone."""
    found = {}
    for side in dict.fromkeys(arm.of for arm in setting.arms if arm.of):
        doses = sorted((arm for arm in setting.arms if arm.of == side), key=lambda arm: arm.level or 0.0)
        found[side] = (_best if setting.choose == "best" else _strongest)(claim, setting, runs, doses).name
    return found


def _best(claim: Claim, setting: Experiment, runs: Runs, doses: Sequence[Arm]) -> Arm:
    """The dose with the best mean score, of equal ones the smallest; for a property the score of the task."""
    spec = measures()[claim.measure]
    if spec.kind == "property":
        scores, less = runs.reached, claim.fair.ceiling is not None
    else:
        scores, less = runs.scores, better_side(claim, spec) == "min"
    means = [mean_score(scores, arm.name, choice=True) for arm in doses]
    seen = [(-mean if less else mean, -at, arm) for at, (arm, mean) in enumerate(zip(doses, means, strict=True))
            if mean is not None]  # fmt: skip
    return max(seen, key=lambda each: each[:2])[2] if seen else doses[0]


def _strongest(claim: Claim, setting: Experiment, runs: Runs, doses: Sequence[Arm]) -> Arm:
    """The largest dose whose task score is as good as the baseline's within the margin; the smallest if none is."""
    base, margin = mean_score(runs.reached, setting.baseline.name, choice=True), claim.fair.margin or 0.0
    means = [(arm, mean_score(runs.reached, arm.name, choice=True)) for arm in doses]
    kept = [arm for arm, mean in means if base is not None and mean is not None and abs(mean - base) <= margin]
    return kept[-1] if kept else doses[0]


def better_side(claim: Claim, spec: MeasureSpec) -> str:
    """The better side of the scores, `max` or `min`: that of the measure, else the one that confirms the claim."""
    return spec.better or ("min" if claim.direction == "smaller" else "max")


def noise(setting: Experiment, runs: Runs) -> float | None:
    r"""Half of the 95 % interval that the contrast would have if nothing but the random numbers differed.

    With :math:`s` the standard deviation of `again` − baseline over n seeds, and :math:`w` the factors of the contrast:
    :math:`t_{n-1}\, s \sqrt{\sum w^2 / 2} / \sqrt n`. None without a control.
    """
    pairs = _paired(runs.scores, "again", setting.baseline.name)
    if len(pairs) < 3:
        return None
    scale = math.sqrt(sum(weight**2 for weight in setting.decisive.values()) / 2)
    return scale * float(half_width(np.asarray(pairs, dtype=np.float64)))


def false_verdicts(setting: Experiment, runs: Runs) -> float:
    """Share of 400 random parts of the baseline's runs that a sign-flip test calls different at 5 %.

    A part is half of the runs on each side, at most 24, of which all sign vectors are counted.
    """
    pool = [score for name in ("again", setting.baseline.name) for score in runs.scores.get(name, {}).values()]
    draw, half = np.random.Generator(np.random.PCG64(0)), min(len(pool) // 2, 24)
    mixed = np.array([draw.permutation(pool) for _ in range(_PAIRINGS)])
    rows = mixed[:, :half] - mixed[:, half : 2 * half]
    return float((sign_flip_rows(rows) < ALPHA).mean())


def _paired(scores: _Scores, first: str, second: str) -> list[float]:
    """Differences of two arms over the judged seeds."""
    one, other = scores.get(first, {}), scores.get(second, {})
    return [one[seed] - other[seed] for seed in sorted({*one} & {*other} - {*CHOICE_SEEDS})]


def mean_score(scores: _Scores, arm: str, *, choice: bool = False) -> float | None:
    """Mean of an arm over the judged seeds, or over those that choose a dose; None without one."""
    found = [score for seed, score in scores.get(arm, {}).items() if (seed in CHOICE_SEEDS) is choice]
    return statistics.fmean(found) if found else None


# --- the rules ----------------------------------------------------------------------------------------------------


def obstacle(claim: Claim, setting: Experiment, runs: Runs) -> str:
    """The first rule that the plan or the runs do not keep, in one sentence; empty if they are a fair test."""
    return _first({**PLANNED, **RULES}, claim, setting, runs)


def planned_obstacle(claim: Claim, setting: Experiment, *, examples: int) -> str:
    """The first rule that no runs of this plan could keep; known before the first one.

    Args:
        examples: in the training split.
    """
    return _first(PLANNED, claim, setting, Runs(examples=examples))


def _first(rules: Mapping[str, Callable[[_Seen], str]], claim: Claim, setting: Experiment, runs: Runs) -> str:
    if claim.scope == "identity":
        return ""
    seen = _Seen(claim, setting, runs, measures()[claim.measure])
    return next((said for rule in rules.values() if (said := rule(seen))), "")


@dataclass(frozen=True)
class _Seen:
    """What a rule looks at."""

    claim: Claim
    setting: Experiment
    runs: Runs
    spec: MeasureSpec

    @property
    def sides(self) -> tuple[str, ...]:
        """What the contrast compares: arms, and the names that the doses of an arm have in common."""
        return tuple(side for side, weight in self.setting.decisive.items() if weight)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms that are judged."""
        picked = chosen(self.claim, self.setting, self.runs)
        names = {picked.get(side, side) for side in self.sides}
        return tuple(arm for arm in self.setting.arms if arm.name in names)

    @property
    def reached(self) -> _Scores:
        """The task scores; those of the claim where it is about nothing else."""
        return self.runs.reached or (self.runs.scores if self.spec.kind == "task" else {})

    def mean_reached(self, arm: Arm) -> float | None:
        """Over the judged seeds; None if a run diverged or was not recorded."""
        lost = {*self.runs.scores.get(arm.name, {})} - {*self.reached.get(arm.name, {}), *CHOICE_SEEDS}
        return None if lost else mean_score(self.reached, arm.name)


def _states_bound(seen: _Seen) -> str:
    """The claim states the score that its arms must reach."""
    if seen.spec.start or (seen.claim.fair.floor, seen.claim.fair.ceiling) != (None, None):
        return ""
    return say("The claim states no score that its arms must reach (fair: floor, or ceiling where less is better).")


def _states_margin(seen: _Seen) -> str:
    """Where another quantity than the score is compared, the claim states how far the scores may differ."""
    if not _unequal_matters(seen) or seen.claim.fair.margin is not None:
        return ""
    return say("The claim states no margin within which the scores of its arms must agree (fair: margin).")


def _unequal_matters(seen: _Seen) -> bool:
    return not seen.spec.start and seen.spec.kind == "property" and not seen.claim.fair.unequal and len(seen.sides) > 1


def _enough_doses(seen: _Seen) -> str:
    """A penalty or a clip is tried at 6 doses or more, or its strength is tuned."""
    setting = seen.setting
    recipes = {arm.name: arm.built_recipe for arm in setting.arms if arm.name in seen.sides and not arm.of}
    fixed = [name for name, recipe in recipes.items() if recipe.penalty or recipe.clip_qk]
    if fixed and setting.tune < FEWEST_TRIALS:
        told = {"arm": fixed[0], "least": FEWEST_DOSES}
        return say("One strength of {arm} says nothing about others; give it {least} doses or more.", **told)
    counts = {side: sum(arm.of == side for arm in setting.arms) for side in seen.sides}
    few = [(side, count) for side, count in counts.items() if 0 < count < FEWEST_DOSES]
    if few:
        told = {"arm": few[0][0], "n": few[0][1], "least": FEWEST_DOSES}
        return say("{arm} has {n} doses; give it {least} or more.", **told)
    return ""


def _rates_matter(seen: _Seen) -> bool:
    return not (seen.spec.start or seen.spec.kind == "property" or seen.claim.fair.untuned)


def _enough_trials(seen: _Seen) -> str:
    """Every arm has as many trials of its learning rate."""
    if not _rates_matter(seen) or seen.setting.tune >= FEWEST_TRIALS:
        return ""
    return say(
        "The learning rate of each arm needs {least} trials or more (tune), or a reason (untuned).", least=FEWEST_TRIALS
    )


def _real(seen: _Seen) -> str:
    """A claim of field scope has that many training examples."""
    if seen.claim.scope != "field" or seen.runs.examples >= FIELD_EXAMPLES:
        return ""
    told = {"least": FIELD_EXAMPLES, "n": seen.runs.examples}
    return say("Field scope needs {least:,} training examples; found {n:,}.", **told)


def _trains(seen: _Seen) -> str:
    """Every arm trains, above a floor that the claim states; one of them where the claim is about training itself."""
    fair = seen.claim.fair
    if seen.spec.start:
        return ""
    if not seen.reached:
        return say("The task scores of its arms were not recorded; run it again.")
    below = [(arm.name, mean) for arm in seen.arms if not _passes(seen, mean := seen.mean_reached(arm))]
    if not below or (fair.untrained and len(below) < len(seen.arms)):
        return ""
    name, mean = below[0]
    if name in seen.runs.failures:
        return say("An arm failed: {name}: {error}", name=name, error=seen.runs.failures[name])
    bound = fair.floor if fair.floor is not None else fair.ceiling
    if mean is None:
        return say("An arm does not train: {name} diverges; the claim asks for {bound:g}.", name=name, bound=bound)
    score = f"{mean:.4g} {seen.runs.reached_unit or seen.runs.unit}".strip()
    return say(
        "An arm does not train: {name} reaches {score}; the claim asks for {bound:g}.",
        name=name, score=score, bound=bound,
    )  # fmt: skip


def _passes(seen: _Seen, mean: float | None) -> bool:
    floor, ceiling = seen.claim.fair.floor, seen.claim.fair.ceiling
    return mean is not None and (floor is None or mean >= floor) and (ceiling is None or mean <= ceiling)


def _equal_footing(seen: _Seen) -> str:
    """Where another quantity than the score is compared, the arms' scores agree within a margin."""
    margin = seen.claim.fair.margin
    if margin is None or not _unequal_matters(seen):
        return ""
    means = {arm.name: mean for arm in seen.arms if (mean := seen.mean_reached(arm)) is not None}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    if means[high] - means[low] <= margin:
        return ""
    gap = points(means[high] - means[low], seen.runs.reached_unit)
    return say(
        "The arms are not on an equal footing: {low} and {high} are {gap} apart, more than {margin:g}.",
        low=low, high=high, gap=gap, margin=margin,
    )  # fmt: skip


def _within_doses(seen: _Seen) -> str:
    """The best dose is not the largest."""
    for arm in (arm for arm in seen.arms if arm.of and seen.setting.choose == "best"):
        if arm.level == max(other.level or 0.0 for other in seen.setting.arms if other.of == arm.of):
            return say(
                "The best dose of {arm} is the largest, {level:g}; larger ones may be better still.",
                arm=arm.of, level=arm.level,
            )  # fmt: skip
    return ""


def _within_range(seen: _Seen) -> str:
    """The best learning rate of each arm lies inside of the range."""
    if not _rates_matter(seen):
        return ""
    for arm in seen.arms:
        for name, place in seen.runs.searched.get(arm.name, {}).items():
            if abs(place) > _END:
                told = {"name": name, "arm": arm.name}
                if place > 0:
                    return say(
                        "The best {name} of {arm} lies at the high end of its range; better ones may lie beyond.",
                        **told,
                    )
                return say(
                    "The best {name} of {arm} lies at the low end of its range; better ones may lie beyond.", **told
                )
    return ""


def _long_enough(seen: _Seen) -> str:
    """Twice the training changes the baseline by less than the smallest effect of interest."""
    if seen.spec.start or seen.claim.fair.speed:
        return ""
    gains = _paired(seen.runs.scores, "longer", seen.setting.baseline.name)
    if not gains:
        return say("It was not run with a control that trains longer; run it again.")
    change = statistics.fmean(gains)
    if abs(change) < seen.claim.sesoi:
        return ""
    moved, least = points(abs(change), seen.runs.unit), points(seen.claim.sesoi, seen.runs.unit)
    return say(
        "Training is too short: twice as long moves {arm} by {moved}, not below {least}.",
        arm=seen.setting.baseline.name, moved=moved, least=least,
    )  # fmt: skip


def _control(seen: _Seen) -> str:
    """The baseline was run again with other random numbers."""
    if _paired(seen.runs.scores, "again", seen.setting.baseline.name):
        return ""
    return say("It was not run with a control that draws other random numbers; run it again.")


# Those that follow from the plan, and those that only runs can keep or break.
PLANNED: Mapping[str, Callable[[_Seen], str]] = {
    "a score that arms must reach": _states_bound,
    "a margin of equal scores": _states_margin,
    "enough doses": _enough_doses,
    "enough trials": _enough_trials,
    "real size": _real,
}
RULES: Mapping[str, Callable[[_Seen], str]] = {
    "every arm trains": _trains,
    "equal footing": _equal_footing,
    "a best dose within the doses": _within_doses,
    "a best rate within its range": _within_range,
    "long enough": _long_enough,
    "a control": _control,
}
