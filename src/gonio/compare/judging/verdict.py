"""From the statistics of one recipe to its verdict, with the reason in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from gonio.compare.judging.statistics import ALPHA, least_p


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The statistics of one recipe against the baseline.

    Attributes:
        differences: recipe − baseline, one per pair. mean, low, high: their mean and its interval.
        p_holm: sign-flip p after Holm. mde: minimum detectable effect.
        comparisons: recipes in the study. sesoi: smallest effect of interest. sign: 1 if larger is
            better, −1 otherwise. unit: of differences.
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
    word = "Better" if sign == seen.sign else "Worse"
    count = sum(sign * difference > 0 for difference in seen.differences)
    reason = (
        f"{word} in {count} of {seen.n} seeds, by {mean:+.2f} on average ({interval}; p = {seen.p_holm:.3f} after Holm)"
    )
    if abs(mean) < seen.sesoi:
        reason += f"; real, but smaller than {points(seen.sesoi, seen.unit)}, the smallest effect of interest"
    return ("helps" if sign == seen.sign else "hurts"), reason + "."


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
    """A difference with its unit; the difference of two percentages is in points.

    Example:
        >>> from gonio.compare.judging.verdict import points
        >>> points(1.0, "%"), points(0.25, "")
        ('1 point', '0.25')
    """
    if unit == "%":
        return f"{value:.3g} point" + ("" if value == 1 else "s")
    return f"{value:.3g} {unit}".strip()


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> from gonio.compare.judging.verdict import counted
        >>> counted(1, "run"), counted(2, "run")
        ('1 run', '2 runs')
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


def enough(comparisons: int) -> int:
    """The fewest seeds that can detect an effect among so many recipes.

    Example:
        >>> from gonio.compare.judging.verdict import enough
        >>> enough(1), enough(5)
        (6, 8)
    """
    return next(n for n in range(2, 64) if least_p(n) * max(1, comparisons) < ALPHA)
