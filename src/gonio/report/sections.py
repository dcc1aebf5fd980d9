"""The page's tables beside the verdict: what it costs, what tuning chose, and what disturbed inputs do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

from gonio.compare.results import BASELINE, Amount, Effect, Reach, Results, Robust, Tuned
from gonio.report.words import Scale, count

__all__ = [
    "ATTACK_NAMES",
    "attacks_of",
    "badge",
    "cost_rows",
    "reach_words",
    "robust_rows",
    "threat_words",
    "tuning_rows",
    "tuning_words",
]

ATTACK_NAMES = {
    "clean": "undisturbed",
    "noise": "noise",
    "transfer": "transfer",
    "fgsm": "FGSM",
    "pgd": "PGD",
    "smoothed": "smoothed PGD",
    "worst": "worst of all",
}


def cost_rows(results: Results, colors: Mapping[str, str]) -> list[SimpleNamespace]:
    """Parameters, FLOPs, time to the baseline's score and CPU time, by recipe; empty if nothing was measured."""
    effects = results.effects
    if not any(e.parameters or e.flops or e.reach for e in effects):
        return []
    return [
        SimpleNamespace(
            recipe=e.recipe, color=colors[e.recipe], parameters=_added(e.parameters), flops=_added(e.flops),
            reach=reach_words(e.reach), cpu=_cpu(results, e.recipe),
        )
        for e in effects
    ]  # fmt: skip


def _added(amount: Amount | None) -> str:
    """What is added, in numbers and as a share."""
    if amount is None:
        return "–"
    more = amount.recipe - amount.baseline
    if more == 0:
        return "none"
    share = f" ({100 * (amount.ratio - 1):+.1f} %)" if amount.baseline else ""
    return f"{_short(more)}{share}".replace("-", "−")


def _short(number: float) -> str:
    """A count of things with at most three digits and a prefix."""
    power = min(max(int(math.log10(abs(number)) // 3), 0), 4) if number else 0
    return f"{number / 1000**power:+.3g} {('', 'k', 'M', 'G', 'T')[power]}".rstrip()


def reach_words(reach: Reach | None) -> str:
    """Time to the baseline's last validation score.

    Example:
        >>> from gonio.compare.results import Reach
        >>> from gonio.report.sections import reach_words
        >>> reach_words(Reach(8, 7, 0.914)), reach_words(Reach(8, 2, None))
        ('×0.91 (in 7 of 8 seeds)', 'not reached (in 2 of 8 seeds)')
    """
    if reach is None:
        return "–"
    said = f"×{reach.ratio:.2f}" if reach.ratio is not None else "reached" if _mostly(reach) else "not reached"
    return f"{said} (in {reach.reached} of {count(reach.n, 'seed')})"


def _mostly(reach: Reach) -> bool:
    return 2 * reach.reached > reach.n


def _cpu(results: Results, recipe: str) -> str:
    """CPU time of all runs and trials of a recipe."""
    runs = sum(run.seconds or 0.0 for run in results.runs if run.recipe == recipe)
    trials = sum(tuned.seconds for tuned in results.tuning if tuned.recipe == recipe)
    words = f"{_minutes(runs + trials)}"
    return f"{words}, {_minutes(trials)} of it tuning" if trials else words


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def tuning_rows(results: Results, colors: Mapping[str, str]) -> list[SimpleNamespace]:
    """One row per recipe, the baseline first; empty without tuning."""
    scale = Scale.of(results)
    every = {BASELINE: "base", **colors}
    return [_tuning_row(tuned, every.get(tuned.recipe, "base"), scale) for tuned in results.tuning]


def _tuning_row(tuned: Tuned, color: str, scale: Scale) -> SimpleNamespace:
    lost = [f"{n} {word}" for n, word in ((tuned.failed, "failed"), (tuned.diverged, "diverged")) if n]
    return SimpleNamespace(
        recipe=tuned.recipe, color=color,
        trials=f"{tuned.trials}" + (f" ({', '.join(lost)})" if lost else ""),
        chosen=_values(tuned.chosen) or "not yet", defaults=_values(tuned.defaults),
        score=scale.score(tuned.score), default_score=scale.score(tuned.default_score),
        seconds=_minutes(tuned.seconds),
    )  # fmt: skip


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def attacks_of(results: Results) -> list[tuple[str, str]]:
    """The attacks that were made, with their names for readers."""
    found = [name for robust in results.robustness for name in robust.means]
    return [(name, title) for name, title in ATTACK_NAMES.items() if name in found]


def robust_rows(results: Results, colors: Mapping[str, str]) -> list[SimpleNamespace]:
    """One row per recipe, the baseline first; empty if no model was attacked."""
    names = [name for name, _ in attacks_of(results)]
    every = {BASELINE: "base", **colors}
    return [_robust_row(robust, every.get(robust.recipe, "base"), names) for robust in results.robustness if names]


def _robust_row(robust: Robust, color: str, names: list[str]) -> SimpleNamespace:
    points = Scale("points", 1)
    cells = [f"{robust.means[name]:.1f}" if name in robust.means else "–" for name in names]
    return SimpleNamespace(
        recipe=robust.recipe, color=color, cells=cells, n=robust.n,
        mean="" if robust.recipe == BASELINE else points.signed(robust.mean),
        interval=points.interval(robust.low, robust.high),
        signs=[f"{sign} (in {n} of {count(robust.n, 'run')})" for sign, n in robust.signs.items()],
    )  # fmt: skip


def threat_words(results: Results) -> str:
    """How inputs were disturbed, in one sentence; empty if they were not."""
    threat = results.plan.threat
    if threat is None:
        return ""
    bounds = [f"{b:g}" for b in (threat.low, threat.high) if b is not None]
    inside = f", within {' to '.join(bounds)}" if len(bounds) == 2 else ""
    return (
        f"each number of an input moved by at most {threat.epsilon:.3g}{inside}; {count(threat.examples, 'example')}; "
        f"PGD with {count(threat.steps, 'step')} and {count(threat.restarts, 'restart')}"
    )


def tuning_words(results: Results) -> str:
    """Budget and space of tuning, in one sentence; empty without tuning."""
    tuning = results.plan.tuning
    if tuning is None:
        return ""
    return (
        f"{count(tuning.trials, 'trial')} per recipe on seed {tuning.seed}, sampler {tuning.sampler}; learning rate "
        f"within a factor of {tuning.rate_factor:g} of its default, strengths within {tuning.strength_factor:g}"
    )


def badge(effect: Effect) -> str:
    """What is confounded, in words; empty if nothing is."""
    return f"confounded: {', '.join(effect.changes)}" if effect.confounded else ""
