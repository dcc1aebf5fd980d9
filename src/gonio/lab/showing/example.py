"""A small made-up study, to look at the page and the tables before there are results of one's own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from gonio.lab.judging.results import Effect, Ratio, Results
from gonio.lab.plan import RecipeEntry, StudyPlan, TrainingConfig
from gonio.lab.record import RunRecord
from gonio.recipes import BASELINE

RECIPES = {"orthogonal-init": 0.1, "decoupled-tanh": 0.9}
SEEDS = tuple(range(8))
EDGES = list(range(0, 181, 5))


def example() -> Results:
    """The results of a study that never ran: two recipes, eight seeds, invented numbers, and always the same.

    Example:
        >>> [(effect.recipe, effect.verdict) for effect in gonio.lab.showing.example().effects]
        [('orthogonal-init', 'no useful effect'), ('decoupled-tanh', 'helps')]
    """
    names = (BASELINE, *RECIPES)
    entries = tuple(RecipeEntry(name, {"name": name} if name != BASELINE else {}, "0" * 64) for name in names)
    plan = StudyPlan(
        task="example", model="example", recipes=entries, seeds=SEEDS, metric="accuracy", direction="max", unit="%",
        training=TrainingConfig(epochs=20, batch_size=64, lr=0.05), data="0" * 64, sesoi=0.5,
        splits={"train": 600, "validation": 200, "test": 200},
    )  # fmt: skip
    return Results(
        plan=plan,
        baseline_mean=95.0,
        baseline_sd=0.3,
        effects=tuple(_effect(name, gain) for name, gain in RECIPES.items()),
        runs=tuple(_run(name, seed) for name in names for seed in SEEDS),
        command="gonio compare orthogonal-init decoupled-tanh --seeds 8",
        versions={},
        notes=("Every number on this page is invented.",),
    )


def _effect(recipe: str, gain: float) -> Effect:
    helps = gain > 0.5
    differences = tuple(round(gain + 0.12 * math.sin(2.3 * seed), 3) for seed in SEEDS)
    mean = sum(differences) / len(differences)
    where = "above 0" if helps else "inside ±0.5 points"
    return Effect(
        recipe, n=len(SEEDS), mean=mean, low=mean - 0.1, high=mean + 0.1, p=0.0078 if helps else 0.5,
        p_holm=0.0156 if helps else 0.5, rho=0.8, mde=0.2, verdict="helps" if helps else "no useful effect",
        reason=f"The 95 % interval lies {where}.", differences=differences, seeds=SEEDS,
        step_time=Ratio(1 + gain / 3, 0.98 + gain / 3, 1.03 + gain / 3, 8), memory=Ratio(1.0, 1.0, 1.0, 8),
    )  # fmt: skip


def _run(recipe: str, seed: int) -> RunRecord:
    gain = RECIPES.get(recipe, 0.0)
    score = 95 + 0.3 * math.sin(1.7 * seed) + gain
    losses: list[float | None] = [round(2.3 * 0.8**epoch + 0.01, 4) for epoch in range(20)]
    scores: list[float | None] = [round(score - 60 * 0.7**epoch, 3) for epoch in range(20)]
    return RunRecord(
        recipe, seed, "finished", score=round(score, 3), best_epoch=18,
        curve={"train_loss": losses, "val_score": scores},
        geometry=_geometry(gain), plan="" if recipe == BASELINE else f"{recipe}: conv",
    )  # fmt: skip


def _geometry(gain: float) -> dict[str, Any]:
    middles = [(low + high) / 2 for low, high in pairwise(EDGES)]
    counts = [round(800 * math.exp(-((middle - 90 + 4 * gain) ** 2) / 60)) for middle in middles]
    norms = [round(size * (1 + gain / 4), 3) for size in (0.6, 0.8, 1.0, 1.2, 1.5)]
    conv = {"shape": [32, 16, 3, 3], "dim": 144, "filters": 32, "norms": norms, "angle_counts": counts}
    return {"layers": {"conv": conv}, "norm_quantiles": [0, 0.25, 0.5, 0.75, 1], "angle_edges": EDGES}
