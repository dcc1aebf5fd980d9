"""Statistics of paired scores: tests, intervals, power, and the verdict that follows from them.

Verdicts use the exact sign-flip test with Holm's correction over all recipes, and the paired t interval, whose
coverage holds for few seeds (a bootstrap's does not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gonio.errors import import_extra

Array = NDArray[np.float64]

ALPHA = 0.05
_POWER = 0.8
_EXACT = 24  # pairs up to which all sign vectors are enumerated: 2^23 sums, 64 MiB
_DRAWS = 1_000_000  # sign vectors that are drawn above that
_TIE = 1e-9  # sums that are equal in exact arithmetic differ by rounding; they count as equal
# Power is simulated up to 10 pairs, and up to 16 where α / m is fewer than 20 steps of the exact p value: these steps
# then cost more than 3 %.
_SIMULATED, _COARSE, _STEPS = 10, 16, 20
_STUDIES = 4000  # simulated for up to 10 pairs, fewer above; the standard error of a power of 80 % is 0.6 to 1.3 %
_ROWS = 100  # studies whose sums are held at the same time: 2^15 sums each, 26 MB


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


def half_width(differences: Array) -> Array:
    """Half of the paired t interval of 95 %, along the last axis."""
    n = differences.shape[-1]
    quantile = float(require_scipy().t.ppf(1 - ALPHA / 2, n - 1))
    return np.asarray(quantile * differences.std(axis=-1, ddof=1) / np.sqrt(n))


def sign_flip(differences: Sequence[float]) -> float:
    r"""Exact two-sided p value of "the sign of each difference is a coin toss".

    The share of the :math:`2^n` sign vectors :math:`s` with
    :math:`|\sum_i s_i d_i| \ge |\sum_i d_i|`. It assumes symmetry under the null hypothesis, not normality. Its
    smallest value is :math:`2 / 2^n`. Above 24 pairs it uses a million sign vectors, always the same ones.

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
    """The exact p value of each row, as :func:`sign_flip` gives it; up to 24 columns."""
    # The first sign is fixed: flipping every sign leaves |sum| as it is, so each sum stands for two.
    sums = rows[:, :1]
    for column in rows[:, 1:].T[:, :, None]:
        sums = np.concatenate((sums + column, sums - column), axis=1)
    bound = np.abs(rows.sum(axis=1)) - _TIE * np.abs(rows).sum(axis=1)
    return (np.abs(sums) >= bound[:, None]).mean(axis=1)


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
    return float(np.corrcoef(first, second)[0, 1])


def improvement(differences: Sequence[float], direction: str) -> float | None:
    """Share of pairs in which the recipe is better; ties count half. None without pairs."""
    if not differences:
        return None
    sign = 1 if direction == "max" else -1
    return float(np.mean([(sign * d > 0) + 0.5 * (d == 0) for d in differences]))


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
        return _least(_simulated_power(pairs, alpha, _STUDIES), (0.0, 50.0), steps=20)
    found = _least(_t_power(pairs, alpha), (0.0, 50.0), steps=20)
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
        p = np.concatenate([sign_flip_rows(part) for part in np.array_split(rows, max(1, studies // _ROWS))])
        return float(((p < alpha) & (np.abs(rows.mean(axis=1)) > half_width(rows))).mean())

    return power


def _t_power(pairs: int, alpha: float) -> Callable[[float], float]:
    """Power of the two-sided t test as a function of the effect."""
    stats = require_scipy()
    bound = stats.t.ppf(1 - alpha / 2, pairs - 1)
    # The other tail adds nothing to the power of an effect worth detecting.
    return lambda effect: float(stats.nct.sf(bound, pairs - 1, effect * np.sqrt(pairs)))


def require_scipy() -> ModuleType:
    """`scipy.stats`, whose import takes 0.8 s; a MissingExtraError if scipy is not installed."""
    return import_extra("scipy.stats", "a comparison's statistics", package="scipy", extra="lab")


# --- the verdict ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The statistics of one recipe against the baseline.

    Attributes:
        differences: recipe − baseline, one per pair. mean, low, high: their mean and its interval.
        p_holm: sign-flip p after Holm. mde: minimum detectable effect. comparisons: recipes in the study.
        sesoi: smallest effect of interest. sign: 1 if larger is better, −1 otherwise. unit: of differences.
    """

    differences: tuple[float, ...]
    mean: float | None
    low: float | None
    high: float | None
    p_holm: float | None
    mde: float | None
    comparisons: int
    sesoi: float
    sign: int
    unit: str

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.differences)


def judge(seen: Evidence) -> tuple[str, str]:
    """The verdict and its reason. The first rule that applies decides:

    1. *helps* or *hurts*: the Holm-adjusted sign-flip p is below 0.05 and the interval does not contain 0.
    2. *no useful effect*: the whole interval lies within ± the smallest effect of interest.
    3. *no evidence*: neither, but an effect of that size would probably have been seen.
    4. *underpowered*: such an effect could well have been missed, or there are too few seeds to detect any effect.
    """
    # Scores are counts: two differences can be equal by chance, and their interval then has no width.
    if seen.n < 3 or seen.mean is None or seen.low is None or seen.high is None or seen.p_holm is None:
        pairs = ("is no pair", "is one pair", "are two pairs")[min(seen.n, 2)]
        return "underpowered", f"There {pairs} of runs, too few to tell a difference from the noise of seeds."
    interval = f"95 % interval {seen.low:+.2f} to {seen.high:+.2f}"
    if seen.p_holm < ALPHA and not seen.low <= 0 <= seen.high:
        return _clear(seen, seen.mean, interval)
    if max(abs(seen.low), abs(seen.high)) <= seen.sesoi:
        reason = f"The {interval} lies within ±{points(seen.sesoi, seen.unit)}, the smallest effect of interest."
        return "no useful effect", reason
    return _unclear(seen, seen.p_holm, interval)


def _clear(seen: Evidence, mean: float, interval: str) -> tuple[str, str]:
    sign = 1 if mean > 0 else -1
    word, verdict = ("Better", "helps") if sign == seen.sign else ("Worse", "hurts")
    count = sum(sign * difference > 0 for difference in seen.differences)
    reason = (
        f"{word} in {count} of {seen.n} seeds, by {mean:+.2f} on average ({interval}; p = {seen.p_holm:.3f} after Holm)"
    )
    if abs(mean) < seen.sesoi:
        reason += f"; real, but smaller than {points(seen.sesoi, seen.unit)}, the smallest effect of interest"
    return verdict, reason + "."


def _unclear(seen: Evidence, p_holm: float, interval: str) -> tuple[str, str]:
    sesoi = points(seen.sesoi, seen.unit)
    if seen.mde is None:
        least = min(1.0, least_p(seen.n) * seen.comparisons)
        recipes = counted(seen.comparisons, "recipe")
        reason = f"With {seen.n} pairs and {recipes}, the smallest possible p after Holm is {least:.2g}"
        return "underpowered", f"{reason}: too few seeds to detect any effect. Use {enough(seen.comparisons)} or more."
    found = f"p = {p_holm:.2f} after Holm, {interval}"
    mde = points(seen.mde, seen.unit)
    if not seen.sesoi:
        named = "no smallest effect of interest was named"
        return "no evidence", f"Effects from {mde} on would probably have been seen ({found}); {named}."
    if seen.mde <= seen.sesoi:
        return "no evidence", f"An effect of {sesoi} would probably have been seen ({found}; detectable: {mde})."
    return "underpowered", f"Only effects from {mde} on would probably have been seen, not {sesoi} ({found})."


def points(value: float, unit: str) -> str:
    """A difference with its unit; the difference of two percentages is in points."""
    if unit == "%":
        return f"{value:.3g} point" + ("" if value == 1 else "s")
    return f"{value:.3g} {unit}".strip()


def counted(count: int, noun: str) -> str:
    """A number with its noun, e.g. `1 run` and `2 runs`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def enough(comparisons: int) -> int:
    """The fewest seeds that can detect an effect among so many recipes."""
    return next(n for n in range(2, 64) if least_p(n) * max(1, comparisons) < ALPHA)
