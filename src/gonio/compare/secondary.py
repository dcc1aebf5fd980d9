"""What stands beside the verdict: confounding, how soon a recipe is there, and robustness."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gonio.compare.plan import Plan
from gonio.compare.results import BASELINE, Reach, Robust, RunRecord
from gonio.compare.robustness import ATTACKS
from gonio.compare.statistics import paired_t

__all__ = ["changes_of", "reach_of", "robust_of"]

_VERBS = ("init", "swap", "parametrize", "penalty")
_MEASURES = ("clean", *ATTACKS, "worst")


def changes_of(content: Mapping[str, Any]) -> tuple[str, ...]:
    """What a recipe changes: each verb with each thing that it uses, once.

    Example:
        >>> from gonio.compare.secondary import changes_of
        >>> changes_of(gonio.Recipe.load("decoupled-tanh").to_dict())
        ('swap DecoupledConv2d.from_conv',)
    """
    rules = [(verb, rule) for verb in _VERBS for rule in content.get(verb, ())]
    return tuple(dict.fromkeys(f"{verb} {rule['use']}" for verb, rule in rules if rule["use"] != "keep"))


def reach_of(plan: Plan, recipe: str, runs: Sequence[RunRecord], step_time: float | None) -> Reach | None:
    """When the recipe's validation score is where the baseline's ends; None without a pair of curves.

    Args:
        step_time: of the recipe over the baseline's; None if it was not measured.
    """
    curves = {(run.recipe, run.seed): run for run in runs if run.status != "failed"}
    pairs = [(curves.get((BASELINE, seed)), curves.get((recipe, seed))) for seed in plan.seeds]
    found = [
        _epochs(plan, base, ours)
        for base, ours in pairs
        if base is not None and ours is not None and base.status == "finished"
    ]
    if not found:
        return None
    reached = [ratio for ratio in found if math.isfinite(ratio)]
    middle = statistics.median(found)
    known = step_time is not None and math.isfinite(middle)
    return Reach(len(found), len(reached), middle * (step_time or 0.0) if known else None)


def _epochs(plan: Plan, base: RunRecord, ours: RunRecord) -> float:
    """Epochs until the baseline's last validation score, over the baseline's own; infinite if never."""
    scores = [score for score in base.curve.get("val_score", ()) if score is not None]
    if not scores:
        return math.inf
    own, other = (_first(plan, run.curve.get("val_score", ()), scores[-1]) for run in (base, ours))
    return other / own


def _first(plan: Plan, curve: Sequence[float | None], target: float) -> float:
    sign = 1 if plan.direction == "max" else -1
    reached = [i for i, s in enumerate(curve, start=1) if s is not None and sign * s >= sign * target]
    return float(reached[0]) if reached else math.inf


def robust_of(plan: Plan, runs: Sequence[RunRecord]) -> tuple[Robust, ...]:
    """One entry per recipe, the baseline first; empty if the study attacks no model."""
    if plan.threat is None:
        return ()
    judged = {(run.recipe, run.seed): run for run in runs if run.status != "failed"}
    return tuple(_robust(plan, entry.name, judged) for entry in plan.recipes)


def _robust(plan: Plan, recipe: str, judged: Mapping[tuple[str, int], RunRecord]) -> Robust:
    mine = [judged[recipe, seed] for seed in plan.seeds if (recipe, seed) in judged]
    means = {}
    for name in _MEASURES:
        if any(name in run.robustness for run in mine):
            means[name] = statistics.fmean(float(run.robustness.get(name, 0.0)) for run in mine)
    signs = Counter(_kind(sign) for run in mine for sign in run.robustness.get("signs", ()))
    both = [seed for seed in plan.seeds if (recipe, seed) in judged and (BASELINE, seed) in judged]
    differences = [_worst(judged[recipe, seed]) - _worst(judged[BASELINE, seed]) for seed in both]
    mean, low, high = (None, None, None) if recipe == BASELINE else paired_t(differences) or (None, None, None)
    return Robust(recipe, means, len(mine), mean, low, high, dict(signs))


def _worst(run: RunRecord) -> float:
    """A diverged model is right about nothing."""
    return float(run.robustness.get("worst", 0.0))


def _kind(sign: str) -> str:
    """A sign without the figures of its run."""
    return sign.partition(":")[0]
