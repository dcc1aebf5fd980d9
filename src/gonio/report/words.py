"""Numbers and verdicts in words: one way to write each, for the page, the terminal and the exports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gonio.compare.results import Effect, Ratio, Results
from gonio.escaping import plain

__all__ = ["Mark", "Scale", "count", "headline", "mark", "others", "p_value", "partial", "ratio", "said", "seen"]


@dataclass(frozen=True)
class Mark:
    """How a verdict is shown: never by colour alone."""

    symbol: str
    tone: str


MARKS = {
    "helps": Mark("▲", "good"),
    "hurts": Mark("▼", "bad"),
    "no useful effect": Mark("=", "even"),
    "no evidence": Mark("?", "even"),
    "underpowered": Mark("…", "even"),
}


def mark(verdict: str) -> Mark:
    """The mark of a verdict; an unknown verdict gets a neutral one."""
    return MARKS.get(verdict, Mark("·", "even"))


@dataclass(frozen=True)
class Scale:
    """How scores and their differences are written.

    Example:
        >>> from gonio.report.words import Scale
        >>> scale = Scale(unit="points", decimals=2)
        >>> scale.signed(0.618), scale.interval(-0.1, 1.0)
        ('+0.62', '−0.10 to +1.00')
    """

    unit: str
    decimals: int

    @classmethod
    def of(cls, results: Results) -> Scale:
        """Differences of percentages are points; half of the smallest effect of interest has two digits."""
        unit = plain(results.plan.unit)
        grain = abs(results.plan.sesoi) or results.baseline_sd or 0.0  # a script may name no effect of interest
        decimals = 1 - math.floor(math.log10(grain / 2)) if grain > 0 and math.isfinite(grain) else 2
        return cls("points" if unit in ("percent", "%", "points") else unit, min(max(decimals, 0), 6))

    def score(self, value: float | None) -> str:
        """A score or a width, without a sign for positive values."""
        return "–" if value is None else f"{value:.{self.decimals}f}".replace("-", "−")

    def signed(self, value: float | None) -> str:
        """A difference, with its sign."""
        return "–" if value is None else f"{value:+.{self.decimals}f}".replace("-", "−")

    def interval(self, low: float | None, high: float | None) -> str:
        """An interval of differences; nothing where there is none."""
        return "" if low is None or high is None else f"{self.signed(low)} to {self.signed(high)}"


def p_value(p: float | None) -> str:
    """A p value with as many digits as mean something.

    Example:
        >>> from gonio.report.words import p_value
        >>> p_value(0.03125), p_value(0.00001), p_value(None)
        ('0.031', '< 0.001', '–')
    """
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def ratio(value: Ratio | None) -> str:
    """A cost as a factor.

    Example:
        >>> from gonio.compare.results import Ratio
        >>> from gonio.report.words import ratio
        >>> ratio(Ratio(1.084, 1.07, 1.1, 8)), ratio(None)
        ('×1.08', '–')
    """
    return "–" if value is None else f"×{value.median:.2f}"


def said(effect: Effect) -> str:
    """The verdict with what limits it: lost runs, and more than one change.

    Example:
        >>> from dataclasses import replace
        >>> from gonio.report.words import said
        >>> effect = gonio.report.example().effects[1]
        >>> said(effect), said(replace(effect, failed=2, changes=("init a", "swap b")))
        ('helps', 'helps (2 failed, confounded)')
    """
    lost = [f"{n} {word}" for n, word in ((effect.failed, "failed"), (effect.diverged, "diverged")) if n]
    limits = [*lost, *(["confounded"] if effect.confounded else [])]
    return f"{effect.verdict} ({', '.join(limits)})" if limits else effect.verdict


def count(n: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Example:
        >>> from gonio.report.words import count
        >>> count(1, "recipe"), count(3, "recipe")
        ('1 recipe', '3 recipes')
    """
    return f"{n} {one if n == 1 else many or one + 's'}"


def seen(results: Results) -> str:
    """How often the results were looked at and the study was added to, if either is more than once allows."""
    found = []
    if len(results.looks) > 1:
        found.append(f"looked at {len(results.looks)} times")
    if results.plan.history:
        found.append(f"added to {count(len(results.plan.history), 'time')} after a look")
    return " and ".join(found)


def headline(results: Results) -> str:
    """The outcome in one sentence: the strongest statement that the results allow."""
    effects, scale = results.effects, Scale.of(results)
    if not effects:
        return "There is no result to show yet."
    if len(effects) == 1:
        return _single(effects[0], scale)
    helps = [e for e in effects if e.verdict == "helps"]
    lead = helps or [e for e in effects if e.verdict == "hurts"]
    if not lead:
        return f"None of the {len(effects)} recipes is shown to help or to hurt: {_tally(effects)}."
    word = "help" if helps else "hurt"
    best = max(lead, key=lambda e: abs(e.mean or 0.0))
    if len(lead) == 1:
        return f"{plain(best.recipe)} {word}s: {_estimate(best, scale)}."
    most = f"most of all {plain(best.recipe)}: {_estimate(best, scale)}"
    return f"{len(lead)} of {len(effects)} recipes {word}, {most}."


def others(results: Results) -> str:
    """What the headline leaves out: the verdicts of the recipes that it does not speak of."""
    effects = results.effects
    named = {e.verdict for e in effects} & {"helps", "hurts"}
    lead = "helps" if "helps" in named else "hurts"
    rest = tuple(e for e in effects if e.verdict != lead)
    if len(effects) == 1 or not named or not rest:
        return ""
    return (
        f"{plain(rest[0].recipe)}: {plain(rest[0].verdict)}."
        if len(rest) == 1
        else f"Of the other {len(rest)}: {_tally(rest)}."
    )


def _tally(effects: tuple[Effect, ...]) -> str:
    words = Counter(e.verdict for e in effects)
    parts = [f"{n} {SHORT.get(verdict, f'with {verdict}')}" for verdict, n in words.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


SHORT = {"hurts": "hurting", "helps": "helping", "underpowered": "with too few seeds to tell"}


def _single(effect: Effect, scale: Scale) -> str:
    name = plain(effect.recipe)
    sentences = {
        "helps": f"{name} helps: {_estimate(effect, scale)}.",
        "hurts": f"{name} hurts: {_estimate(effect, scale)}.",
        "no useful effect": f"{name} has no useful effect: {_estimate(effect, scale)}.",
        "underpowered": f"Too few seeds to say whether {name} helps.",
    }
    return sentences.get(effect.verdict, f"No evidence that {name} helps or hurts: {_estimate(effect, scale)}.")


def _estimate(effect: Effect, scale: Scale) -> str:
    if effect.mean is None:
        return "no estimate"
    interval = scale.interval(effect.low, effect.high)
    tail = f" (95 % interval {interval})" if interval else ""
    return f"{scale.signed(effect.mean)} {scale.unit}{tail}"


def partial(results: Results) -> str:
    """What is missing from the numbers, in one sentence; empty if nothing is."""
    diverged = sum(run.status == "diverged" for run in results.runs)
    failed = sum(run.status == "failed" for run in results.runs)
    total = len(results.runs) + results.missing
    parts = []
    if diverged:
        parts.append(f"{diverged} of {count(total, 'run')} diverged and counted as the worst score")
    if failed:
        parts.append(f"{failed} of {count(total, 'run')} failed and left no score")
    if results.missing:
        parts.append(f"{results.missing} of {count(total, 'run')} have not ended yet")
    return f"{'; '.join(parts)}." if parts else ""
