"""From the scores of a claim's runs to its verdict: one number per seed, an exact test, Holm over all claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gonio.lab.judging.statistics import (
    ALPHA,
    counted,
    detectable,
    holm,
    least_p,
    paired_t,
    points,
    require_scipy,
    sign_flip,
)

VERDICTS = ("reproduced", "contradicted", "no useful effect", "undecided", "not tried")
_FEWEST = 3  # pairs below which nothing is judged, as in a comparison
_POWER_SEEDS = 1000  # the most seeds that "what it would take" names


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured for one claim.

    Attributes:
        values: the contrast of each seed that has a score for each arm.
        direction: what is claimed: `larger` than 0, `smaller`, or the `same`.
        sesoi: smallest effect of interest. unit: of the values.
        obstacle: why the runs cannot decide, whatever the numbers; empty if they can.
    """

    values: tuple[float, ...]
    direction: str
    sesoi: float
    unit: str
    obstacle: str = ""

    @property
    def p(self) -> float:
        """Two-sided sign-flip p; for the `same`, the p value of two one-sided t tests against ± sesoi."""
        if len(self.values) < _FEWEST:
            return 1.0
        return _equivalence_p(self.values, self.sesoi) if self.direction == "same" else sign_flip(self.values)


@dataclass(frozen=True)
class Judgement:
    """A verdict with its statistics.

    Attributes:
        verdict: one of :data:`VERDICTS`; reason: why, in one sentence.
        n: seeds. mean, low, high: of the contrast, with the 95 % interval; None for too few seeds.
        p_holm: after Holm over the claims of the run.
    """

    verdict: str
    reason: str
    n: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None


def contrasts(
    scores: Mapping[tuple[str, int], float], weights: Mapping[str, float], seeds: Sequence[int]
) -> dict[int, float]:
    """The weighted sum of the arms' scores, for each seed in which every arm has one.

    Example:
        >>> from gonio.lab.judging.verdict import contrasts
        >>> contrasts({("a", 0): 3.0, ("b", 0): 1.0, ("a", 1): 2.0}, {"a": 1, "b": -1}, [0, 1])
        {0: 2.0}
    """
    return {
        seed: math.fsum(weight * scores[arm, seed] for arm, weight in weights.items())
        for seed in seeds
        if all((arm, seed) in scores for arm in weights)
    }


def judge(found: Sequence[Evidence]) -> list[Judgement]:
    """The verdicts of all claims of one run; the p values are corrected for their number.

    For a claim that the contrast is larger (or smaller) than 0 the first rule that applies decides:

    1. *no useful effect*: the 95 % interval lies within ± the smallest effect of interest.
    2. *reproduced*: the corrected sign-flip p is below 0.05, the interval does not contain 0, and the effect has the
       claimed sign and at least the smallest size of interest. *contradicted*: the same with the other sign, of any
       size.
    3. *undecided*: everything else.

    For a claim that two things are the same: *reproduced* if the corrected p of the equivalence test is below 0.05,
    *contradicted* if the interval lies outside of ± the smallest effect of interest, else *undecided*.

    Example:
        >>> from gonio.lab.judging.verdict import Evidence, judge
        >>> seen = Evidence(values=(2.0, 3.0, 2.5, 2.2, 2.8, 3.1), direction="larger", sesoi=1.0, unit="%")
        >>> judge([seen])[0].verdict
        'reproduced'
    """
    adjusted = holm([seen.p for seen in found]).tolist() if found else []
    return [_judged(seen, p_holm, len(found)) for seen, p_holm in zip(found, adjusted, strict=True)]


def _judged(seen: Evidence, p_holm: float, claims: int) -> Judgement:
    n = len(seen.values)
    estimate = paired_t(seen.values) if n >= _FEWEST else None
    if estimate is None:
        return Judgement("undecided", f"There are {counted(n, 'seed')} with all runs, too few to judge.", n)
    verdict, reason = (_same if seen.direction == "same" else _directed)(seen, estimate, p_holm, claims)
    if seen.obstacle:
        verdict, reason = "undecided", seen.obstacle
    return Judgement(verdict, reason, n, *estimate, seen.p, p_holm)


def _directed(seen: Evidence, estimate: tuple[float, float, float], p_holm: float, claims: int) -> tuple[str, str]:
    mean, low, high = estimate
    sign = 1 if seen.direction == "larger" else -1
    clear = p_holm < ALPHA and not low <= 0 <= high
    agreeing = sum(math.copysign(1, mean) * value > 0 for value in seen.values)
    share = f"The sign is the same in {agreeing} of {len(seen.values)} seeds (p = {_p(p_holm)} after Holm)"
    if -seen.sesoi <= low and high <= seen.sesoi:
        real = "a real effect, but smaller than" if clear else "within"
        return "no useful effect", f"The interval lies within ±{_amount(seen)}: {real} the smallest effect of interest."
    if clear and sign * mean < 0:
        return "contradicted", f"{share}, and it is the opposite of the claimed one."
    if clear and abs(mean) >= seen.sesoi:
        return "reproduced", f"{share}."
    if clear:
        return "undecided", f"{share}, but the mean is smaller than {_amount(seen)}. {_remedy(seen, claims)}"
    return (
        "undecided",
        f"The interval contains 0, or p is too large (p = {_p(p_holm)} after Holm). {_remedy(seen, claims)}",
    )


def _same(seen: Evidence, estimate: tuple[float, float, float], p_holm: float, claims: int) -> tuple[str, str]:
    _, low, high = estimate
    if p_holm < ALPHA and -seen.sesoi <= low and high <= seen.sesoi:
        return "reproduced", f"The interval lies within ±{_amount(seen)} (equivalence p = {_p(p_holm)} after Holm)."
    if low > seen.sesoi or high < -seen.sesoi:
        return "contradicted", f"The interval lies outside of ±{_amount(seen)}."
    return "undecided", f"The interval is partly outside of ±{_amount(seen)}. {_remedy(seen, claims)}"


def _remedy(seen: Evidence, claims: int) -> str:
    """What it would take to decide: the number of seeds with which an effect of sesoi is found in 80 % of studies."""
    spread = statistics.stdev(seen.values)
    needed = next(
        (
            n
            for n in (*range(len(seen.values) + 1, 33), *range(40, _POWER_SEEDS, 20))
            if least_p(n) * claims < ALPHA and (_power_at(n, claims) or math.inf) * spread <= seen.sesoi
        ),
        None,
    )
    if needed is None:
        return f"More than {_POWER_SEEDS} seeds would decide about an effect of {_amount(seen)}."
    return f"About {needed} seeds would decide about an effect of {_amount(seen)}."


def _power_at(seeds: int, claims: int) -> float | None:
    """Detectable effect in standard deviations; by the t test alone above 16 pairs, which `detectable` does."""
    return detectable(seeds, claims) if seeds > 16 else 4.0 / math.sqrt(seeds)


def _equivalence_p(values: Sequence[float], sesoi: float) -> float:
    """The larger p of the one-sided t tests that the mean is above −sesoi and below sesoi."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    margin = sesoi - abs(mean)
    if error == 0:
        return 0.0 if margin > 0 else 1.0
    return float(require_scipy().t.sf(margin / error, len(values) - 1))


def _amount(seen: Evidence) -> str:
    return points(seen.sesoi, seen.unit)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"
