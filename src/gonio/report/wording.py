"""How numbers, verdicts and settings are written, on the page, in the terminal and in the exports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gonio.compare.judging.results import UNTRAINED, Amount, Effect, Ratio, Reach, Results, Tuned
from gonio.escaping import plain

# Symbol and tone: a verdict is never shown by colour alone.
_MARKS = {
    "helps": ("▲", "good"),
    "hurts": ("▼", "bad"),
    "no useful effect": ("=", "even"),
    "no evidence": ("?", "even"),
    "underpowered": ("…", "even"),
    UNTRAINED: ("!", "bad"),
}


def mark(verdict: str) -> tuple[str, str]:
    """The symbol and the tone (good, bad, even) of a verdict; neutral ones for an unknown verdict."""
    return _MARKS.get(verdict, ("·", "even"))


@dataclass(frozen=True)
class Scale:
    """How scores and their differences are written.

    Example:
        >>> from gonio.report.wording import Scale
        >>> scale = Scale(unit="points", decimals=2)
        >>> scale.signed(0.618), scale.interval(-0.1, 1.0)
        ('+0.62', '−0.10 to +1.00')
    """

    unit: str
    decimals: int

    @classmethod
    def of(cls, results: Results) -> Scale:
        """The scale of a study: differences of percentages are points; half of its smallest effect has two digits."""
        unit = plain(results.plan.unit)
        grain = abs(results.plan.sesoi) or results.baseline_sd or 0.0  # a script may have no effect of interest
        decimals = 1 - math.floor(math.log10(grain / 2)) if grain > 0 and math.isfinite(grain) else 2
        return cls("points" if unit in ("percent", "%", "points") else unit, min(max(decimals, 0), 6))

    def score(self, value: float | None) -> str:
        """A score or a width, without a sign for positive values."""
        return "–" if value is None else f"{value:.{self.decimals}f}".replace("-", "−")

    def signed(self, value: float | None) -> str:
        """A difference, with its sign."""
        return "–" if value is None else f"{value:+.{self.decimals}f}".replace("-", "−")

    def interval(self, low: float | None, high: float | None) -> str:
        """An interval of differences; empty if there is none."""
        return "" if low is None or high is None else f"{self.signed(low)} to {self.signed(high)}"


def p_value(p: float | None) -> str:
    """A p value with its significant digits."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def ratio(value: Ratio | None) -> str:
    """A cost as a factor."""
    return "–" if value is None else f"×{value.median:.2f}"


def rho(effect: Effect) -> str:
    """The correlation of the pairs."""
    return "–" if effect.rho is None else f"{effect.rho:.2f}".replace("-", "−")


def lost(runs: Effect | Tuned) -> list[str]:
    """The numbers of failed and of diverged runs, where there are any."""
    return [f"{n} {word}" for n, word in ((runs.failed, "failed"), (runs.diverged, "diverged")) if n]


def verdict_text(effect: Effect) -> str:
    """The verdict with its limits: lost runs, and more than one change."""
    limits = [*lost(effect), *(["confounded"] if effect.confounded else [])]
    return f"{effect.verdict} ({', '.join(limits)})" if limits else effect.verdict


def count(n: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def won(effect: Effect) -> str:
    """The pairs in which the recipe is better, of those that differ; ties are counted apart."""
    if effect.improvement is None:
        return "–"
    tied = f", {count(effect.ties, 'tie')}" if effect.ties else ""
    return f"{effect.wins} of {effect.n}{tied}"


def duration(seconds: float) -> str:
    """Seconds, or minutes from two minutes on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def added(amount: Amount | None) -> str:
    """The parameters or operations that a recipe adds, as a number and as a share of the baseline's."""
    if amount is None:
        return "–"
    more = amount.recipe - amount.baseline
    if more == 0:
        return "none"
    power = min(max(int(math.log10(abs(more)) // 3), 0), 4)
    share = f" ({100 * (amount.ratio - 1):+.1f} %)" if amount.baseline else ""
    number = f"{more / 1000**power:+.3g} {('', 'k', 'M', 'G', 'T')[power]}".rstrip()
    return f"{number}{share}".replace("-", "−")


def reached(reach: Reach | None) -> str:
    """Time to the baseline's last validation score."""
    if reach is None:
        return "–"
    outcome = "reached" if 2 * reach.reached > reach.n else "not reached"
    said = outcome if reach.ratio is None else f"×{reach.ratio:.2f}"
    return f"{said} (in {reach.reached} of {count(reach.n, 'seed')})"


def threat_text(results: Results) -> str:
    """How inputs were disturbed; empty if they were not."""
    threat = results.plan.threat
    if threat is None:
        return ""
    bounds = [f"{b:g}" for b in (threat.low, threat.high) if b is not None]
    inside = f", within {' to '.join(bounds)}" if len(bounds) == 2 else ""
    return (
        f"each input value changed by at most {threat.epsilon:.3g}{inside}; {count(threat.examples, 'example')}; "
        f"PGD with {count(threat.steps, 'step')} and {count(threat.restarts, 'restart')}"
    )


def tuning_text(results: Results) -> str:
    """Budget and space of tuning; empty without tuning."""
    tuning = results.plan.tuning
    if tuning is None:
        return ""
    return (
        f"{count(tuning.trials, 'trial')} per recipe on seed {tuning.seed}, sampler {tuning.sampler}; learning rate "
        f"within a factor of {tuning.rate_factor:g} of its default, strengths within {tuning.strength_factor:g}"
    )


def seen(results: Results) -> str:
    """How often the results were looked at, if more than once, and how often the study was extended afterwards."""
    looks, extended = len(results.looks), len(results.plan.history)
    found = [f"looked at {looks} times"] if looks > 1 else []
    found += [f"extended {count(extended, 'time')} after a look"] if extended else []
    return " and ".join(found)


def headline(results: Results) -> str:
    """The outcome in one sentence: the strongest statement that the results allow."""
    effects, scale = results.effects, Scale.of(results)
    if not effects:
        return "There are no results yet."
    if any(effect.verdict == UNTRAINED for effect in effects):
        return next(effect.reason for effect in effects if effect.verdict == UNTRAINED)
    if len(effects) == 1:
        return _single(effects[0], scale)
    helps, hurts = ([e for e in effects if e.verdict == verdict] for verdict in ("helps", "hurts"))
    lead, word = helps or hurts, "help" if helps else "hurt"
    if not lead:
        return f"None of the {len(effects)} recipes is shown to help or to hurt: {_tally(effects)}."
    best = max(lead, key=lambda e: abs(e.mean or 0.0))
    if len(lead) == 1:
        return f"{plain(best.recipe)} {word}s: {_estimate(best, scale)}."
    return f"{len(lead)} of {len(effects)} recipes {word}, most {plain(best.recipe)}: {_estimate(best, scale)}."


def others(results: Results) -> str:
    """The verdicts of the recipes that the headline does not mention."""
    verdicts = [e.verdict for e in results.effects]
    lead = "helps" if "helps" in verdicts else "hurts"
    rest = [e for e in results.effects if e.verdict != lead]
    if lead not in verdicts or not rest:
        return ""
    first = f"{plain(rest[0].recipe)}: {plain(rest[0].verdict)}."
    return first if len(rest) == 1 else f"Of the other {len(rest)}: {_tally(rest)}."


_SHORT = {"hurts": "hurting", "helps": "helping", "underpowered": "with too few seeds to tell"}


def _tally(effects: Sequence[Effect]) -> str:
    words = Counter(e.verdict for e in effects)
    *parts, last = [f"{n} {_SHORT.get(verdict, f'with {verdict}')}" for verdict, n in words.items()]
    return f"{', '.join(parts)} and {last}" if parts else last


def _single(effect: Effect, scale: Scale) -> str:
    name, estimate = plain(effect.recipe), _estimate(effect, scale)
    match effect.verdict:
        case "helps" | "hurts":
            return f"{name} {effect.verdict}: {estimate}."
        case "no useful effect":
            return f"{name} has no useful effect: {estimate}."
        case "underpowered":
            return f"Too few seeds to say whether {name} helps."
        case _:
            return f"No evidence that {name} helps or hurts: {estimate}."


def _estimate(effect: Effect, scale: Scale) -> str:
    if effect.mean is None:
        return "no estimate"
    interval = scale.interval(effect.low, effect.high)
    return f"{scale.signed(effect.mean)} {scale.unit}" + (f" (95 % interval {interval})" if interval else "")


def partial(results: Results) -> str:
    """The runs without a score, in one sentence; empty if there are none."""
    statuses = Counter(run.status for run in results.runs)
    total = count(len(results.runs) + results.missing, "run")
    fates = {
        "diverged and counted as the worst score": statuses["diverged"],
        "failed and left no score": statuses["failed"],
        "have not ended yet": results.missing,
    }
    parts = [f"{n} of {total} {fate}" for fate, n in fates.items() if n]
    return f"{'; '.join(parts)}." if parts else ""
