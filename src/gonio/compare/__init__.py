"""Recipes × seeds, paired, with equal budget, honest statistics and the cost as a ratio."""

from __future__ import annotations

from gonio.compare.plan import Plan, RecipeEntry, Training
from gonio.compare.results import BASELINE, VERDICTS, Effect, Ratio, Results, RunRecord

__all__ = [
    "BASELINE",
    "VERDICTS",
    "Effect",
    "Plan",
    "Ratio",
    "RecipeEntry",
    "Results",
    "RunRecord",
    "Training",
]
