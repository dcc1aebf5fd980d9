"""Runs whose training is a function of the user's own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.randomness import seed_everything
from gonio.compare.results import RunRecord
from gonio.compare.script import Outcome, Run
from gonio.errors import GonioError, InvalidArgumentError, UnmatchedRuleError
from gonio.models.user_code import load_script
from gonio.recipes import Recipe
from gonio.seeding import derive_seed

__all__ = ["probe_script", "run_script"]

_PROBED = "probed.json"


def run_script(plan: Plan, entry: RecipeEntry, seed: int, folder: Path | None) -> RunRecord:
    """Call the user's function and take its score; what it raises is passed on.

    Raises:
        InvalidArgumentError: it never called `run.apply_`, or gave no score.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gonio-run-") as temporary:
            return run_script(plan, entry, seed, Path(temporary))
    folder.mkdir(parents=True, exist_ok=True)
    left = Outcome(folder)
    left.forget()
    own_seed = plan.seed_of(entry, seed)
    run = Run(entry.content or {"name": entry.name}, seed=own_seed, folder=folder.absolute())
    torch.set_num_threads(1)
    train = load_script(plan.task)
    seed_everything(derive_seed(own_seed, "train"))
    score = train(run)
    if not left.applied:
        raise InvalidArgumentError(
            f"{plan.task} trains the model that run.apply_ was given", "no call of run.apply_", "Call it once."
        )
    if score is not None:
        run.report(score)
    return _record(left, plan.task, RunRecord(entry.name, seed, "diverged", plan=left.plan, curve=left.curve))


def _record(left: Outcome, spec: str, record: RunRecord) -> RunRecord:
    found = left.reported
    if found is None:
        raise InvalidArgumentError(
            f"{spec} gives the score of its run", "None", "Return a number, or call run.report(score)."
        )
    values = {**vars(record), "geometry": found["geometry"]}
    if found["score"] is None:
        return RunRecord(**{**values, "geometry": {}, "error": "the score is not finite"})
    return RunRecord(**{**values, "status": "finished", "score": found["score"]})


class _Probed(BaseException):
    """The model is known; not an Exception, so that a script does not take it for a failure of its own."""


class _Probe:
    """Stands for the run until the script shows its model, on which every recipe is then planned."""

    def __init__(self, recipes: Sequence[dict[str, Any]], folder: Path) -> None:
        self.seed, self.recipe, self.folder = 0, "baseline", folder
        self.resume_path = folder / "resume"
        self._recipes = recipes

    def apply_(self, model: nn.Module) -> None:
        unfit: dict[str, str] = {}
        found: dict[str, Any] = {"unfit": unfit}
        try:
            for recipe in map(Recipe.from_dict, self._recipes):
                try:
                    recipe.plan(model)
                except UnmatchedRuleError as error:
                    unfit[recipe.name] = str(error)
        except GonioError as error:
            found = {"error": str(error)}
        (self.folder / _PROBED).write_text(json.dumps(found), encoding="utf-8")
        raise _Probed

    def log(self, step: int, **values: object) -> None:
        """Nothing is trained, so nothing is kept."""


def probe_script(spec: str, recipes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`unfit`: why a recipe takes no layer of the script's model, by name; or `error`: what went wrong.

    Runs the script up to its `run.apply_`. Meant for a process of its own.
    """
    with tempfile.TemporaryDirectory(prefix="gonio-probe-") as temporary:
        folder = Path(temporary)
        problem = "it ended without a call of run.apply_"
        try:
            seed_everything(0)
            load_script(spec)(_Probe(recipes, folder))
        except GonioError as error:
            problem = str(error)
        except (Exception, SystemExit, _Probed) as error:  # a process group wraps what its processes raise
            problem = f"it raised {type(error).__name__}: {error}"
        path = folder / _PROBED
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found or {"error": f"{spec}: {problem}"}
