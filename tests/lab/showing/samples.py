"""Hand-made results for the tests of the report; no run behind them."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console, RenderableType

from gonio.lab.judging.results import Effect, Ratio, Results
from gonio.lab.plan import RecipeEntry, StudyPlan, TrainingConfig
from gonio.lab.record import RunRecord
from gonio.recipes import BASELINE


def printed(shown: RenderableType, *, width: int) -> str:
    """What a terminal of this width shows, without colours."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def geometry(layers: int, shift: float = 0.0, paths: tuple[str, ...] = ()) -> dict[str, Any]:
    """Angle counts of a bell around 90° + shift and five norm quantiles, per layer."""
    made = {}
    for i, path in enumerate(paths or [f"layer{i}.conv" for i in range(layers)]):
        counts = [round(900 * math.exp(-((5 * b - 87.5 - shift) ** 2) / (2 * (4 + i % 7) ** 2))) for b in range(36)]
        known = {"shape": [32, 16, 3, 3], "dim": 144, "filters": 32, "norms": [0.4, 0.8, 1.0 + 0.01 * shift, 1.2, 1.7]}
        made[path] = {**known, "angle_counts": counts}
    return {"layers": made, "norm_quantiles": [0, 0.25, 0.5, 0.75, 1], "angle_edges": list(range(0, 181, 5))}


def run(recipe: str, seed: int, *, status: str = "finished", epochs: int = 30, layers: int = 3, **changes: Any):
    done = status == "finished"
    ended = epochs if done else 4
    values: dict[str, Any] = {
        "score": 97.0 + 0.1 * seed if done else None,
        "best_epoch": epochs - 2 if done else None,
        "curve": {
            "train_loss": [2.3 * 0.9**e for e in range(ended - 1)] + [None if not done else 0.01],
            "val_score": [97 - 60 * 0.7**e + 0.1 * seed for e in range(ended)],
        },
        "geometry": geometry(layers, 3.0 * (recipe != BASELINE)) if done else {},
        "plan": "" if recipe == BASELINE else f"{recipe}: layer0.conv  init orthogonal_",
        "error": None if done else f"RuntimeError: broke at step {seed}\nsecond line",
    }
    return RunRecord(recipe, seed, status, **{**values, **changes})


def effect(recipe: str, *, mean: float | None = 0.6, half: float = 0.2, verdict: str = "helps", **changes: Any):
    values: dict[str, Any] = {
        "n": 8,
        "mean": mean,
        "low": None,
        "high": None,
        "p": 0.0078,
        "p_holm": 0.031,
        "rho": 0.7,
        "mde": 0.3,
        "verdict": verdict,
        "reason": "A reason.",
        "step_time": Ratio(1.084, 1.07, 1.1, 8),
        "memory": Ratio(1.02, 1.02, 1.02, 8),
    }
    if mean is not None:
        differences = tuple(mean + 0.05 * k for k in (-3, -1, 0, 1, 3))
        values |= {"low": mean - half, "high": mean + half, "differences": differences}
    return Effect(recipe, **{**values, **changes})


def plan(recipes: tuple[str, ...], seeds: int = 8, **changes: Any) -> StudyPlan:
    entries = [RecipeEntry(BASELINE, {}, "0" * 64)]
    entries += [RecipeEntry(r, {"name": r, "init": [{"use": "orthogonal_"}]}, "ab12" * 16) for r in recipes]
    values: dict[str, Any] = {
        "task": "digits",
        "model": "digits-cnn",
        "recipes": tuple(entries),
        "seeds": tuple(range(seeds)),
        "metric": "accuracy",
        "direction": "max",
        "unit": "percent",
        "data": "d4" * 32,
        "sesoi": 0.5,
        "training": TrainingConfig(epochs=30, batch_size=64, lr=0.1),
        "splits": {"train": 1078, "validation": 359, "test": 360},
    }
    return StudyPlan(**{**values, **changes})


def results(
    recipes: tuple[str, ...] = ("orthogonal-init", "decoupled-tanh"),
    *,
    seeds: int = 8,
    layers: int = 3,
    effects: tuple[Effect, ...] | None = None,
    runs: tuple[RunRecord, ...] | None = None,
    plan_changes: dict[str, Any] | None = None,
    **changes: Any,
) -> Results:
    verdicts = ("undecided", "helps", "hurts", "no useful effect", "not a fair test")
    if effects is None:
        means = (0.1, 0.6, -0.7, 0.0, 0.3)
        chosen = [(means[i % 5], verdicts[i % 5]) for i in range(len(recipes))]
        effects = tuple(effect(r, mean=m, verdict=v) for r, (m, v) in zip(recipes, chosen, strict=True))
    if runs is None:
        runs = tuple(run(r, s, layers=layers) for r in (BASELINE, *recipes) for s in range(seeds))
    values: dict[str, Any] = {
        "plan": plan(recipes, seeds, **(plan_changes or {})),
        "baseline_mean": 97.21,
        "baseline_sd": 0.24,
        "effects": effects,
        "runs": runs,
        "command": "gonio compare --seeds 8 -o study",
        "versions": {"gonio": "0.1.0", "torch": "2.13.0"},
        "notes": ("One test image is 0.28 points.",),
    }
    return Results(**{**values, **changes})
