"""Compare recipes with a baseline: paired runs over seeds, equal budget, honest statistics, cost as a ratio."""

from gonio.compare import engines, tasks
from gonio.compare.engines import default_jobs
from gonio.compare.judging.filter_summary import filter_summary
from gonio.compare.judging.multi_task import Across, across
from gonio.compare.judging.results import VERDICTS, Effect, Ratio, Results, RunRecord
from gonio.compare.judging.self_test import SelfTest, self_test, self_test_plan
from gonio.compare.planning.dry_run import dry_run
from gonio.compare.planning.plan import BASELINE, AttackConfig, Plan, RecipeEntry, Training
from gonio.compare.planning.planner import BUILT_IN_RECIPES, make_plan, make_script_plan
from gonio.compare.running.scheduler import Bar, Lines, Quiet, Watcher, run, watcher_for
from gonio.compare.running.scripts import Run
from gonio.compare.running.study import Study
from gonio.compare.tasks.task import ACCURACY, Metric, Split, Task, accuracy

__all__ = [
    "ACCURACY",
    "BASELINE",
    "BUILT_IN_RECIPES",
    "VERDICTS",
    "Across",
    "AttackConfig",
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
    "filter_summary",
    "make_plan",
    "make_script_plan",
    "portrait",
    "run",
    "self_test",
    "self_test_plan",
    "tasks",
    "watcher_for",
]

# earlier names
Threat, portrait = AttackConfig, filter_summary
__dir__ = __all__.copy  # the public names alone
