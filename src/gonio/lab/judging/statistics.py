"""Statistics of paired scores: tests, intervals, power, and the verdict that follows from them.

One engine judges comparisons and claims: the contrast {recipe: 1, baseline: −1} is the sentence "the recipe is better".
Verdicts use the exact sign-flip test with Holm's correction over a family of sentences, and the paired t interval,
whose coverage holds for few seeds (a bootstrap's does not).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gonio.errors import import_extra
from gonio.messages import Message, counted, fixed, joined, say

Array = NDArray[np.float64]

ALPHA = 0.05
_POWER = 0.8
_EXACT = 40  # pairs up to which all sign vectors count: 2^20 sums in memory, 8 MiB
_DRAWS = 1_000_000  # sign vectors that are drawn above that
_TIE = 1e-9  # sums that are equal in exact arithmetic differ by rounding; they count as equal
# Power is simulated up to 10 pairs, and up to 16 where α / m is fewer than 20 steps of the exact p value: these steps
# then cost more than 3 %.
_SIMULATED, _COARSE, _STEPS = 10, 16, 20
_STUDIES = 4000  # simulated for up to 10 pairs, fewer above; the standard error of a power of 80 % is 0.6 to 1.3 %


def paired_t(differences: Sequence[float]) -> tuple[float, float, float] | None:
    r"""Mean difference and its 95 % interval :math:`\bar d \pm t_{n-1}\, s / \sqrt n`; None for fewer than 2.

    References:
        Student, "The probable error of a mean", Biometrika 6, 1908.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) < 2:
        return None
    mean, half = float(d.mean()), float(half_width(d))
    return mean, mean - half, mean + half


def placed(low: float, high: float, margin: float) -> str:
    """What the 95 % interval of a mean difference, better above 0, says about harm.

    First non-inferiority, then improvement, from one interval and so without a correction [1]: `improved` if it lies
    above 0, `not inferior` if it lies above −`margin`, `inferior` if it lies below −`margin`, else `undecided`.

    Example:
        >>> from gonio.lab.judging.statistics import placed
        >>> [placed(low, high, 1.0) for low, high in ((1.8, 2.4), (-0.5, 0.4), (-5.2, -4.8), (-22.0, 22.0))]
        ['improved', 'not inferior', 'inferior', 'undecided']

    References:
        [1] G. Piaggio et al., "Reporting of noninferiority and equivalence randomized trials", JAMA 308, 2012.
    """
    if low > 0:
        return fixed("improved")
    if low >= -margin:
        return fixed("not inferior")
    return fixed("inferior") if high < -margin else fixed("undecided")


def half_width(differences: Array) -> Array:
    """Half of the paired t interval of 95 %, along the last axis."""
    n = differences.shape[-1]
    quantile = float(require_scipy().t.ppf(1 - ALPHA / 2, n - 1))
    return np.asarray(quantile * deviation(differences) / np.sqrt(n))


def deviation(values: Array) -> Array:
    """Sample standard deviation along the last axis; squares of very large or small numbers stay in range."""
    scaled, exponent = _in_range(values)
    return np.asarray(np.ldexp(scaled.std(axis=-1, ddof=1), exponent[..., 0]))


def _in_range(values: ArrayLike) -> tuple[Array, NDArray[np.int32]]:
    """The values of each row times a power of 2, which rounds nothing, so that the largest is about 1; its exponent."""
    given = np.asarray(values, dtype=np.float64)
    exponent = np.frexp(np.abs(given).max(axis=-1, keepdims=True))[1]
    return np.ldexp(given, -exponent), exponent


def sign_flip(differences: Sequence[float]) -> float:
    r"""Exact two-sided p value of "the sign of each difference is a coin toss".

    The share of the :math:`2^n` sign vectors :math:`s` with
    :math:`|\sum_i s_i d_i| \ge |\sum_i d_i|`. It assumes symmetry under the null hypothesis, not normality. Its
    smallest value is :math:`2 / 2^n`. Above 40 pairs it uses a million sign vectors, always the same ones.

    References:
        R. A. Fisher, "The Design of Experiments", 1935, §21.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) == 0:
        return 1.0
    if len(d) <= _EXACT:
        return float(sign_flip_rows(d[None])[0])
    draw = np.random.Generator(np.random.PCG64(0))
    bound = abs(d.sum()) - _TIE * np.abs(d).sum()
    signs = (draw.integers(0, 2, (_DRAWS // 100, len(d))) * 2 - 1 for _ in range(100))
    hits = sum(int((np.abs(part @ d) >= bound).sum()) for part in signs)
    return (hits + 1) / (_DRAWS + 1)


def sign_flip_rows(rows: Array) -> Array:
    """The exact p value of each row, as :func:`sign_flip` gives it; up to 40 columns.

    The sums of one half of a row are searched among those of the other half, which takes :math:`2^{n/2}` numbers
    where all sums would be :math:`2^n`.

    References:
        E. Horowitz and S. Sahni, "Computing partitions with applications to the knapsack problem", J. ACM 21, 1974.
    """
    # The first sign is fixed: flipping every sign leaves |sum| as it is, so each sum stands for two.
    middle = rows.shape[1] // 2
    first, second = rows[:, :1], np.zeros((len(rows), 1))
    for column in rows[:, 1 : middle + 1].T[:, :, None]:
        first = np.concatenate((first + column, first - column), axis=1)
    for column in rows[:, middle + 1 :].T[:, :, None]:
        second = np.concatenate((second + column, second - column), axis=1)
    second.sort(axis=1)
    bounds = np.abs(rows.sum(axis=1)) - _TIE * np.abs(rows).sum(axis=1)
    inside = [
        np.maximum(0, other.searchsorted(bound - one) - other.searchsorted(-bound - one, side="right")).sum()
        for one, other, bound in zip(first, second, bounds, strict=True)
    ]
    total = first.shape[1] * second.shape[1]
    return np.asarray((total - np.array(inside, dtype=np.int64)) / total)


def least_p(pairs: int) -> float:
    """The smallest p value that the sign-flip test can give."""
    return min(1.0, 2.0 ** (1 - pairs))


def holm(p_values: ArrayLike) -> Array:
    """Adjusted p values: comparing each with α keeps the probability of any false finding at α.

    Shape:
        - ``p_values``: (recipes, ...), corrected along the first axis; output: the same.

    References:
        S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6, 1979.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = p.argsort(axis=0, kind="stable")
    ranks = np.arange(len(p), 0, -1).reshape(-1, *(1,) * (p.ndim - 1))
    stepped = np.maximum.accumulate(np.minimum(1.0, ranks * np.take_along_axis(p, order, axis=0)), axis=0)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, stepped, axis=0)
    return adjusted


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson correlation over the pairs; None for fewer than 3 or no variance."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return float(np.corrcoef(_in_range(first)[0], _in_range(second)[0])[0, 1])


def improvement(gains: ArrayLike) -> Array:
    """Share of the pairs, along the last axis, in which the recipe is better (above 0); ties count half."""
    found = np.asarray(gains)
    return np.asarray(((found > 0) + 0.5 * (found == 0)).mean(axis=-1))


@functools.lru_cache(maxsize=256)
def detectable(pairs: int, comparisons: int) -> float | None:
    r"""Minimum detectable effect, at a power of 80 %, in standard deviations of the differences; None if there is none.

    An effect is detected if the sign-flip p value passes Holm's first and hardest step, :math:`p < α / m`, and the
    95 % interval does not contain 0. With few pairs, or many recipes, the exact test is weaker than the t test, because
    its p values are multiples of :math:`2^{1-n}`; the power is then simulated with normal differences, always the same
    ones. Otherwise it is the power of the t test at :math:`α / m`.

    Args:
        comparisons: number of recipes, m.
    """
    alpha = ALPHA / max(1, comparisons)
    if least_p(pairs) >= alpha:
        return None
    if pairs <= _SIMULATED:
        return _least(_simulated_power(pairs, alpha, _STUDIES), (0.0, _HUGE), steps=20)
    found = _least(_t_power(pairs, alpha), (0.0, _HUGE), steps=20)
    if pairs > _COARSE or alpha >= _STEPS * least_p(pairs):
        return found
    studies = _STUDIES // (2 if pairs <= 12 else 4)
    return _least(_simulated_power(pairs, alpha, studies), (0.95 * found, 1.5 * found), steps=8)


def _least(power_of: Callable[[float], float], bounds: tuple[float, float], *, steps: int) -> float:
    """The smallest effect with a power of 80 %, by bisection."""
    low, high = bounds
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(middle) >= _POWER else (middle, high)
    return high


def _simulated_power(pairs: int, alpha: float, studies: int) -> Callable[[float], float]:
    """Power as a function of the effect, over the same simulated noise for every effect."""
    noise = np.random.Generator(np.random.PCG64(1)).standard_normal((studies, pairs))

    def power(effect: float) -> float:
        rows = noise + effect
        return float(((sign_flip_rows(rows) < alpha) & (np.abs(rows.mean(axis=1)) > half_width(rows))).mean())

    return power


def _t_power(pairs: int | NDArray[np.int64], alpha: float) -> Callable[[float], Any]:
    """Power of the two-sided t test as a function of the effect, for one number of pairs or several."""
    stats = require_scipy()
    bound = stats.t.ppf(1 - alpha / 2, pairs - 1)
    # The other tail adds nothing to the power of an effect worth detecting.
    return lambda effect: stats.nct.sf(bound, pairs - 1, effect * np.sqrt(pairs))


def require_scipy() -> ModuleType:
    """`scipy.stats`, whose import takes 0.8 s; a MissingExtraError if scipy is not installed."""
    return import_extra("scipy.stats", "a comparison's statistics", package="scipy", extra="lab")


# --- the verdict ----------------------------------------------------------------------------------------

VERDICTS = (
    "reproduced", "contradicted", "no useful effect", "undecided", "too noisy", "not a fair test", "not tried",
)  # fmt: skip
# A recipe is compared with the baseline by the sentence "the recipe is better"; its verdicts have these words.
WORDS = {"reproduced": "helps", "contradicted": "hurts"}
_UNITS = {
    "points": (say("point"), say("points")),
    "degrees": (say("degree"), say("degrees")),
    "decades": (say("decade"), say("decades")),
    "octaves": (say("octave"), say("octaves")),
    "nats": (say("nat"), say("nats")),
    "bits": (say("bit"), say("bits")),
}  # of measures: 1 of them, and several
_HUGE = 50.0  # standard deviations, an effect that every seed shows
_FEWEST = 3  # pairs below which nothing is judged
_MOST_SEEDS = 1000  # that an undecided verdict recommends


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured for one sentence, and, once :func:`judge` has seen it, the verdict.

    Attributes:
        values: the contrast, one number per seed with a score for every arm, e.g. recipe − baseline.
        direction: what the sentence says of its mean: `larger` than 0, `smaller`, or the `same`.
        sesoi: smallest effect of interest; 0: none was named. unit: of the values.
        obstacle: why the runs are no fair test, whatever the numbers; empty if they are one.
        noise: half of the 95 % interval of this contrast if nothing but the random numbers differed, from a control
            run; None: there is none.
        verdict: one of :data:`VERDICTS`; `reason` says why, in one sentence.
        mean, low, high: of the values, with the paired t interval of 95 %; None for too few values.
        p: two-sided sign-flip p value; for the `same` that of a t test of the mean against ± `sesoi`. p_holm: after
            Holm over the family that was judged together.
        mde: minimum detectable effect at a power of 80 %; None if no effect can be detected.
    """

    values: tuple[float, ...]
    direction: str
    sesoi: float
    unit: str
    obstacle: str = ""
    noise: float | None = None
    verdict: str = ""
    reason: str = ""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    mde: float | None = None

    @property
    def n(self) -> int:
        """Number of values."""
        return len(self.values)


def contrasts(
    scores: Mapping[tuple[str, int], float], weights: Mapping[str, float], seeds: Sequence[int]
) -> dict[int, float]:
    """The weighted sum of the arms' scores, for each seed in which every arm has one.

    Example:
        >>> from gonio.lab.judging.statistics import contrasts
        >>> contrasts({("a", 0): 3.0, ("b", 0): 1.0, ("a", 1): 2.0}, {"a": 1, "b": -1}, [0, 1])
        {0: 2.0}
    """
    return {
        seed: math.fsum(weight * scores[arm, seed] for arm, weight in weights.items())
        for seed in seeds
        if all((arm, seed) in scores for arm in weights)
    }


def judge(family: Sequence[Evidence], *, size: int | None = None, exact: bool = False) -> list[Evidence]:
    """The evidence of one family of sentences with its verdicts; p values are corrected for the size of the family.

    Args:
        size: of the family, if it has members without evidence; they count with p = 1, as those with an obstacle do.
        exact: the values are no sample with noise but an identity, computed several times; so equal ones are enough.

    The first rule that applies decides:

    1. *not a fair test*: the evidence names an obstacle.
    2. *undecided*: there are fewer than 3 values.
    3. *no useful effect* (unless the sentence is one of equality): the 95 % interval lies within ± `sesoi`. Equal
       values have an interval without width; they need as many seeds as the sign-flip test, 6.
    4. *reproduced*: the corrected p is below 0.05, the interval excludes 0, and the mean has the claimed sign and at
       least the size of `sesoi`. *contradicted*: the same with the other sign, of any size. A sentence of equality
       is reproduced if the corrected p is below 0.05 and the mean lies within ± `sesoi`, and contradicted if it lies
       outside; the p of equal values is the least of the sign-flip test.
    5. *too noisy*: the noise of a control is larger than `sesoi`.
    6. *undecided*: everything else.

    Example:
        >>> from gonio.lab.judging.statistics import Evidence, judge
        >>> seen = Evidence(values=(2.0, 3.0, 2.5, 2.2, 2.8, 3.1), direction="larger", sesoi=1.0, unit="%")
        >>> judge([seen])[0].verdict
        'reproduced'
    """
    raw = [_p_value(seen, exact=exact) for seen in family]
    size = max(len(raw), size or 0)
    counted_in = [1.0 if seen.obstacle else p for seen, p in zip(family, raw, strict=True)]
    adjusted = holm([*counted_in, *[1.0] * (size - len(raw))]).tolist()[: len(raw)] if raw else []
    found = [_judged(seen, p, p_holm, size, exact) for seen, p, p_holm in zip(family, raw, adjusted, strict=True)]
    return [_too_noisy(seen) for seen in found]


def _too_noisy(seen: Evidence) -> Evidence:
    """An undecided sentence whose control differs from itself by more than what is of interest."""
    if seen.verdict != "undecided" or seen.noise is None or not seen.sesoi or seen.noise <= seen.sesoi:
        return seen
    noise, sesoi = points(seen.noise, seen.unit), points(seen.sesoi, seen.unit)
    why = say(
        "With other random numbers alone the interval would be ±{noise}, wider than ±{sesoi}. {reason}",
        noise=noise, sesoi=sesoi, reason=seen.reason,
    )  # fmt: skip
    return replace(seen, verdict="too noisy", reason=why)


def _p_value(seen: Evidence, *, exact: bool) -> float:
    if seen.direction != "same":
        return sign_flip(seen.values)
    return 1.0 if seen.n < _FEWEST else _equivalence_p(seen.values, seen.sesoi, exact=exact)


def _equivalence_p(values: Sequence[float], sesoi: float, *, exact: bool) -> float:
    """Two-sided p value of "the mean is ± sesoi"; below 0.05 the 95 % interval is wholly within or wholly outside.

    Equal values, e.g. counts of few examples, do not show how large the noise is, which the t test needs. The sign-flip
    test of their distance from ± sesoi does not: all lie on one side, which gives its smallest p.
    """
    mean, error = float(np.mean(values)), float(deviation(np.array(values))) / math.sqrt(len(values))
    margin = abs(sesoi - abs(mean))
    if margin == 0:
        return 1.0
    if error <= _TIE * margin:
        return 0.0 if exact else least_p(len(values))
    return min(1.0, 2 * float(require_scipy().t.sf(margin / error, len(values) - 1)))


def _judged(seen: Evidence, p: float, p_holm: float, size: int, exact: bool) -> Evidence:
    n = seen.n
    mean, low, high = paired_t(seen.values) or (seen.values[0] if n else None, None, None)
    sds = detectable(n, size) if n >= _FEWEST else None
    mde = None if sds is None else sds * statistics.stdev(seen.values)
    found = replace(
        seen, mean=mean, low=low, high=high, mde=mde, p=p if n else None, p_holm=p_holm if n else None
    )  # fmt: skip
    if seen.obstacle:
        verdict, reason = "not a fair test", seen.obstacle
    elif n < _FEWEST or mean is None or low is None or high is None:
        told = {"are": "is" if n == 1 else "are", "seeds": counted(n, "seed")}
        verdict, reason = "undecided", say("There {are} {seeds} with all runs, too few.", **told)
    elif seen.direction == "same":
        verdict, reason = _same(found, mean, low, high, size)
    else:
        verdict, reason = _directed(found, mean, low, high, size, exact)
    return replace(found, verdict=verdict, reason=reason)


def _directed(seen: Evidence, mean: float, low: float, high: float, size: int, exact: bool) -> tuple[str, Message]:
    clear = (seen.p_holm or 0.0) < ALPHA and not low <= 0 <= high
    sesoi = points(seen.sesoi, seen.unit)
    # an interval without width, of few equal values, does not show the noise
    known = exact or high - low > 2 * _TIE * seen.sesoi or least_p(seen.n) < ALPHA
    if known and seen.sesoi and -seen.sesoi <= low and high <= seen.sesoi:
        if clear:
            return "no useful effect", say(
                "The 95 % interval lies within ±{sesoi}, the smallest effect of interest; "
                "the effect is real, but smaller.",
                sesoi=sesoi,
            )
        return "no useful effect", say(
            "The 95 % interval lies within ±{sesoi}, the smallest effect of interest.", sesoi=sesoi
        )
    if not clear:
        return "undecided", _undecided(seen, low, high, size)
    told = {
        "same": sum(np.sign(value) == np.sign(mean) for value in seen.values), "n": seen.n, "mean": f"{abs(mean):.3g}",
        "interval": _interval(low, high), "p": _p_text(seen),
    }  # fmt: skip
    if mean > 0:
        found = say("Larger in {same} of {n} seeds, by {mean} on average (95 % interval {interval}; {p})", **told)
    else:
        found = say("Smaller in {same} of {n} seeds, by {mean} on average (95 % interval {interval}; {p})", **told)
    if (mean > 0) != (seen.direction == "larger"):
        return "contradicted", say("{found}.", found=found)
    if abs(mean) >= seen.sesoi:
        return "reproduced", say("{found}.", found=found)
    small = say("{found}, but the mean is below {sesoi}.", found=found, sesoi=sesoi)
    return "undecided", joined([small, *_remedy(seen, size)], " ")


def _same(seen: Evidence, mean: float, low: float, high: float, size: int) -> tuple[str, Message]:
    told = {"sesoi": points(seen.sesoi, seen.unit), "p": _p_text(seen)}
    within = say("The 95 % interval lies within ±{sesoi} ({p}).", **told)
    outside = say("The 95 % interval lies outside of ±{sesoi} ({p}).", **told)
    if (seen.p_holm or 0.0) < ALPHA:
        return ("reproduced", within) if abs(mean) < seen.sesoi else ("contradicted", outside)
    where = say("The 95 % interval lies partly outside of ±{sesoi} ({p}).", **told)
    if max(-low, high) <= seen.sesoi:
        where = within
    elif low > seen.sesoi or high < -seen.sesoi:
        where = outside
    return "undecided", joined([where, *_remedy(seen, size)], " ")


def _undecided(seen: Evidence, low: float, high: float, size: int) -> Message:
    """Which effects the study could have seen."""
    found = say("95 % interval {interval}, {p}", interval=_interval(low, high), p=_p_text(seen))
    if least_p(seen.n) * size >= ALPHA or seen.mde is None:
        return say(
            "With {seeds} and {comparisons} the smallest p after Holm is {least}: "
            "use {enough} seeds or more ({found}).",
            seeds=counted(seen.n, "seed"), comparisons=counted(size, "comparison"),
            least=f"{min(1.0, least_p(seen.n) * size):.2g}", enough=enough(size), found=found,
        )  # fmt: skip
    told = {"sesoi": points(seen.sesoi, seen.unit), "mde": points(seen.mde, seen.unit), "found": found}
    if not seen.sesoi:
        return say(
            "Effects from {mde} on would have been seen; no smallest effect of interest is named ({found}).", **told
        )
    if seen.mde <= seen.sesoi:
        return say("An effect of {sesoi} would probably have been seen ({found}; detectable: {mde}).", **told)
    only = say("Only effects from {mde} on would probably have been seen, not {sesoi} ({found}).", **told)
    return joined([only, *_remedy(seen, size)], " ")


def _remedy(seen: Evidence, size: int) -> list[Message]:
    """The number of seeds with which an effect of sesoi is found in 80 % of studies, by the t test."""
    if not seen.sesoi:
        return []
    effect, alpha = min(seen.sesoi / max(statistics.stdev(seen.values), 1e-300), _HUGE), ALPHA / size
    seeds = np.array([*range(seen.n + 1, 33), *range(40, _MOST_SEEDS, 20)])
    found = seeds[(2.0 ** (1 - seeds) < alpha) & (_t_power(seeds, alpha)(effect) >= _POWER)]
    if len(found):
        return [say("About {n} seeds would decide.", n=int(found[0]))]
    return [say("More than {n} seeds would be needed.", n=_MOST_SEEDS)]


def signed(value: float) -> str:
    """A difference in three digits with its sign; the exponent keeps its hyphen."""
    return f"{value:+.3g}".replace("-", "−").replace("e−", "e-")


def _interval(low: float, high: float) -> Message:
    return say("{low} to {high}", low=signed(low), high=signed(high))


def _p_text(seen: Evidence) -> Message:
    p = seen.p_holm or 0.0
    return say("p {p} after Holm", p=f"= {p:.3f}" if p >= 0.001 else "< 0.001")


def points(value: float, unit: str) -> Message:
    """A difference with its unit; the difference of two percentages is in points."""
    return sized(f"{value:.3g}", "points" if unit == "%" else unit)


def sized(size: str, unit: str) -> Message:
    """A number with its unit, which is singular for 1 and has a name in other languages."""
    one, several = _UNITS.get(unit, (fixed(unit), fixed(unit)))
    return joined([fixed(size), *([one if size == "1" else several] if unit else [])], " ")


def enough(comparisons: int) -> int:
    """The fewest seeds that can detect an effect among so many recipes."""
    return next(n for n in range(2, 64) if least_p(n) * max(1, comparisons) < ALPHA)
