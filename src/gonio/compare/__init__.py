"""Recipes × seeds, paired, with equal budget, honest statistics and the cost as a ratio."""

from __future__ import annotations

from gonio.compare import engines, tasks
from gonio.compare.dry_run import dry_run
from gonio.compare.engines import default_jobs
from gonio.compare.plan import Plan, RecipeEntry, Training
from gonio.compare.planning import BUILT_IN_RECIPES, make_plan
from gonio.compare.portrait import portrait
from gonio.compare.progress import Bar, Lines, Quiet, Watcher, watcher_for
from gonio.compare.results import BASELINE, VERDICTS, Effect, Ratio, Results, RunRecord
from gonio.compare.running import run
from gonio.compare.script import Run
from gonio.compare.script_planning import make_script_plan
from gonio.compare.self_testing import SelfTest, self_test, self_test_plan
from gonio.compare.several import Across, across
from gonio.compare.study import Study
from gonio.compare.task import ACCURACY, Metric, Split, Task, accuracy
from gonio.compare.threat import Threat

__all__ = [
    "ACCURACY",
    "BASELINE",
    "BUILT_IN_RECIPES",
    "VERDICTS",
    "Across",
    "Bar",
    "Effect",
    "Lines",
    "Metric",
    "Plan",
    "Quiet",
    "Ratio",
    "RecipeEntry",
    "Results",
    "Run",
    "RunRecord",
    "SelfTest",
    "Split",
    "Study",
    "Task",
    "Threat",
    "Training",
    "Watcher",
    "accuracy",
    "across",
    "default_jobs",
    "dry_run",
    "engines",
    "make_plan",
    "make_script_plan",
    "portrait",
    "run",
    "self_test",
    "self_test_plan",
    "tasks",
    "watcher_for",
]
