"""One recipe × one seed, from the seed to the record; the same in whatever process it runs."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.portrait import portrait
from gonio.compare.randomness import seed_everything
from gonio.compare.results import BASELINE, RunRecord
from gonio.compare.robustness import from_text, robustness, to_text, transferable
from gonio.compare.scripted import run_script
from gonio.compare.task import Task
from gonio.compare.tasks import resolve as resolve_task
from gonio.compare.threat import Threat
from gonio.compare.training import Fit, evaluate, fit
from gonio.compare.tuning_space import settled
from gonio.models import resolve as resolve_model
from gonio.recipes import Recipe
from gonio.recipes.applied import Applied
from gonio.seeding import derive_seed

__all__ = ["build", "make_transferable", "prepare_process", "run_one", "run_trial"]

_LONGEST_ERROR = 2000  # characters of an exception's text that a record keeps


def prepare_process() -> None:
    """Settings under which a result depends on the plan and the seed alone."""
    torch.set_num_threads(1)  # sums are split by thread, so their last bits depend on the count
    torch.use_deterministic_algorithms(True)


def run_one(
    plan: Plan,
    entry: RecipeEntry,
    seed: int,
    folder: Path | None = None,
    *,
    settings: Mapping[str, float] | None = None,
    transferred: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Build, train and judge; an exception becomes a record with status `failed`.

    Meant for a process of its own: it seeds the global generators.

    Args:
        folder: for the files of a script's run; None: a temporary one.
        settings: what tuning chose for the recipe.
        transferred: examples that mislead another model, as :func:`~gonio.compare.robustness.to_text` has them.
    """
    record = RunRecord(entry.name, seed, "failed", settings=settings or {})
    if plan.scripted:
        return _guarded(record, lambda: run_script(plan, entry, seed, folder))
    return _guarded(record, lambda: _run(*settled(plan, entry, settings or {}), record, transferred))


def run_trial(plan: Plan, entry: RecipeEntry, seed: int, values: Mapping[str, float]) -> RunRecord:
    """Build and train with other values; the score is the best of the validation split, and no test is made."""
    record = RunRecord(entry.name, seed, "failed", settings=values)

    def trial() -> RunRecord:
        tried, changed = settled(plan, entry, values)
        _, _, done, ended = _trained(tried, changed, record)
        scores = done.curve["val_score"]
        if ended.error or not scores:
            return replace(ended, plan="", error=ended.error or "no epoch has a validation score")
        best = (max if plan.direction == "max" else min)(scores)
        return replace(ended, status="finished", score=best, best_epoch=done.best_epoch, plan="")

    return _guarded(record, trial)


def make_transferable(plan: Plan, threat: Threat) -> RunRecord:
    """Examples that mislead a baseline which is none of the study's, as the record's `robustness`."""
    record = RunRecord(BASELINE, threat.seed, "failed")

    def attack() -> RunRecord:
        model, task, _, ended = _trained(plan, plan.baseline, record)
        if ended.error:
            return ended
        return replace(record, status="finished", robustness=to_text(transferable(model, task, threat)))

    return _guarded(record, attack)


def _guarded(record: RunRecord, function: Callable[[], RunRecord]) -> RunRecord:
    """What the function returns, or the failed record with what it raised."""
    started = time.process_time()
    try:
        record = function()
    except (Exception, SystemExit) as error:  # whatever a user's model or a recipe raises is a result of this run only
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        record = replace(record, error=f"{text} ({Path(where.filename).name}:{where.lineno})")
    return replace(record, seconds=time.process_time() - started)


def _trained(plan: Plan, entry: RecipeEntry, record: RunRecord) -> tuple[nn.Module, Task, Fit, RunRecord]:
    """The model at its last epoch, and the record so far: `diverged`, with an error only if it did."""
    prepare_process()
    task = resolve_task(plan.task)
    own_seed = plan.seed_of(entry, record.seed)
    model, applied, text = build(plan, task, entry, own_seed)
    seed_everything(derive_seed(own_seed, "train"))  # a recipe or model may have drawn any amount before
    done = fit(model, task, training=plan.trained, seed=own_seed, penalty=applied.penalty)
    return model, task, done, replace(record, status="diverged", curve=_finite(done), plan=text, error=done.diverged)


def _run(plan: Plan, entry: RecipeEntry, record: RunRecord, transferred: Mapping[str, Any] | None) -> RunRecord:
    model, task, done, ended = _trained(plan, entry, record)
    judged = ended if done.diverged else _judged(ended, done, model, task)
    if plan.threat is None or judged.status != "finished":
        return judged
    moved = from_text(transferred) if transferred else None
    return replace(judged, robustness=robustness(model, task, plan.threat, moved))


def build(plan: Plan, task: Task, entry: RecipeEntry, seed: int) -> tuple[nn.Module, Applied, str]:
    """The model of one run with its recipe applied, and the recipe's plan as text.

    `seed` is the run's own, as `plan.seed_of` gives it.

    The model's factory reads generators that depend on the seed alone, and the recipe draws from its
    own, so the layers that a recipe leaves alone start bit-equal to the baseline's.
    """
    seed_everything(derive_seed(seed, "model"))
    model = resolve_model(plan.model)(**task.sizes)
    if entry == plan.baseline:
        return model, Recipe(BASELINE).apply_(model, seed=seed), ""
    recipe = Recipe.from_dict(entry.content)
    text = str(recipe.plan(model))
    return model, recipe.apply_(model, seed=seed), text


def _judged(record: RunRecord, done: Fit, model: nn.Module, task: Task) -> RunRecord:
    """The record of the epoch that the validation split chose, on the test split."""
    if done.state is None:
        return replace(record, error="no epoch has a validation score")
    model.load_state_dict(done.state)
    score = evaluate(model, task, task.test)
    if score is None or not math.isfinite(score):
        return replace(record, error="outputs on the test split are not finite")
    return replace(record, status="finished", score=score, best_epoch=done.best_epoch, geometry=portrait(model))


def _finite(done: Fit) -> dict[str, list[float | None]]:
    """The curve as JSON can hold it."""
    return {key: [v if math.isfinite(v) else None for v in values] for key, values in done.curve.items()}
