"""The laboratory: does a method help, at what cost, and is what its paper claims true here?

Paired runs of recipes and a baseline over seeds with equal budgets, honest statistics, cost as a ratio, and one offline
page. Names are loaded when they are first used. Nothing of the library imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gonio.errors import imported

_HOME = {
    **dict.fromkeys(("AttackConfig", "StudyPlan", "TrainingConfig"), "plan"),
    **dict.fromkeys(("make_plan", "make_script_plan"), "planning.planner"),
    "dry_run": "planning.dry_run",
    **dict.fromkeys(("run", "watcher_for"), "running.scheduler"),
    "Run": "running.scripts",
    "Study": "running.study",
    "Results": "judging.results",
    **dict.fromkeys(("RunRecord", "filter_summary"), "record"),
    "across": "judging.multi_task",
    "Treatment": "treating.treatment",
    "doctor": "treating.doctor",
    "retrain_": "treating.retrain",
    **dict.fromkeys(("self_test", "self_test_plan"), "judging.self_test"),
    **dict.fromkeys(("Split", "Task"), "tasks.task"),
}
"""The module of each public name."""
_MODULES = {"claims": "claims", "engines": "running.engines", "showing": "showing", "tasks": "tasks"}

__all__ = [*_HOME, *_MODULES]

if TYPE_CHECKING:  # the same names for type checkers and editors, which do not read the tables above
    from gonio.lab import claims as claims
    from gonio.lab import showing as showing
    from gonio.lab import tasks as tasks
    from gonio.lab.judging.multi_task import across as across
    from gonio.lab.judging.results import Results as Results
    from gonio.lab.judging.self_test import self_test as self_test
    from gonio.lab.judging.self_test import self_test_plan as self_test_plan
    from gonio.lab.plan import AttackConfig as AttackConfig
    from gonio.lab.plan import StudyPlan as StudyPlan
    from gonio.lab.plan import TrainingConfig as TrainingConfig
    from gonio.lab.planning.dry_run import dry_run as dry_run
    from gonio.lab.planning.planner import make_plan as make_plan
    from gonio.lab.planning.planner import make_script_plan as make_script_plan
    from gonio.lab.record import RunRecord as RunRecord
    from gonio.lab.record import filter_summary as filter_summary
    from gonio.lab.running import engines as engines
    from gonio.lab.running.scheduler import run as run
    from gonio.lab.running.scheduler import watcher_for as watcher_for
    from gonio.lab.running.scripts import Run as Run
    from gonio.lab.running.study import Study as Study
    from gonio.lab.tasks.task import Split as Split
    from gonio.lab.tasks.task import Task as Task
    from gonio.lab.treating.doctor import doctor as doctor
    from gonio.lab.treating.retrain import retrain_ as retrain_
    from gonio.lab.treating.treatment import Treatment as Treatment


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = imported(f"gonio.lab.{_MODULES[name]}")
    elif name in _HOME:
        value = getattr(imported(f"gonio.lab.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'gonio.lab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
