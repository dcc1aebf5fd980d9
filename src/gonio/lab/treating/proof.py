"""What proves a treatment: equal outputs, or a study of the treated and the untreated model on held-out data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gonio.editing.twin import copy_of
from gonio.errors import GonioError, listing
from gonio.lab.judging.results import Results, summarise
from gonio.lab.judging.statistics import placed
from gonio.lab.plan import RecipeEntry, StudyPlan, installed_versions
from gonio.lab.record import RunRecord
from gonio.lab.running.training import evaluate
from gonio.lab.tasks.task import Split, Task
from gonio.measuring import Finding
from gonio.messages import fixed, said_by, say
from gonio.recipes import BASELINE
from gonio.surgery import equivalent, generated_example
from gonio.surgery.equivalent import SAME_FUNCTION, fitting, outputs

_OTHERWISE = 5e-2  # relative deviation that counts as the same function, of dtypes with less precision
# Blocks of held-out examples at most, and examples of each at least; a block's score is one of the pairs.
BLOCKS, LEAST = 20, 8
_NOTE = (
    "Nothing was trained for these runs: a seed stands for a block of validation examples, on which the untreated "
    "model (baseline) and the treated one are scored."
)


def same_function(before: nn.Module, after: nn.Module, example: Any) -> tuple[bool | None, str]:
    """Whether two models compute the same function on an example; None if none can be made."""
    try:
        moved = equivalent(before, after, example=example)
    except GonioError as error:
        return None, say("the outputs could not be compared: {error}", error=said_by(error))
    dtypes = [p.dtype for p in after.parameters() if p.is_floating_point()]
    allowed = max((SAME_FUNCTION.get(dtype, _OTHERWISE) for dtype in dtypes), default=SAME_FUNCTION[torch.float32])
    return moved.relative <= allowed, say(
        "outputs before and after: largest deviation {absolute:.3g} ({relative:.3g} relative)", **vars(moved)
    )


def not_finite(model: nn.Module, example: Any, findings: Iterable[Finding]) -> str:
    """Why nothing is compared with a model whose outputs are not finite: its errors; empty if they are finite."""
    try:
        example = generated_example(model) if example is None else example
        with fitting(model, example, "example="):
            if all(bool(torch.isfinite(each).all()) for each in outputs(model, example)):
                return ""
    except GonioError:
        return ""
    errors = [f"{found.path or found.code} ({found.code})" for found in findings if found.level == "error"]
    if not errors:
        return say("the outputs are NaN or infinite before it, so nothing can be compared")
    return say(
        "the outputs are NaN or infinite, and there are errors: {errors}. Repair them first", errors=listing(errors)
    )


def scores(model: nn.Module, task: Task) -> list[float | None]:
    """The task's metric on blocks of validation examples; None where an output is not finite."""
    twin, count = copy_of(model), len(task.validation)
    size = math.ceil(count / max(2, min(BLOCKS, count // LEAST)))
    return [evaluate(twin, task, Split(*block)) for block in task.validation.in_order(size)]


def study_of(
    task: Task, data: str, source: str, step: dict[str, Any], before: list[float | None], after: list[float | None]
) -> Results:
    """The study of one step: the untreated model is the baseline, the treated one the recipe, a block a seed.

    `data`: the digest of the task's data.
    """
    name = str(step["verb"])
    digest = hashlib.sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()
    plan = StudyPlan(
        task=task.name,
        model=source,
        recipes=(RecipeEntry(BASELINE, {}, hashlib.sha256(b"").hexdigest()), RecipeEntry(name, {}, digest)),
        seeds=tuple(range(len(before))),
        training=None,
        metric=task.metric.name,
        direction=task.metric.direction,
        unit=task.metric.unit,
        splits={each: len(split) for each, split in task.splits.items()},
        data=data,
        sesoi=task.sesoi,
        worst=task.metric.worst,
        notes=(_NOTE, f"The treatment: {json.dumps(step)}."),
        versions=installed_versions(),
        command="gonio doctor",
    )
    runs = [_record(BASELINE, seed, score) for seed, score in enumerate(before)]
    runs += [_record(name, seed, score) for seed, score in enumerate(after)]
    return summarise(plan, runs, (), ())


def _record(recipe: str, seed: int, score: float | None) -> RunRecord:
    if score is None:
        return RunRecord(recipe, seed, "diverged", error="an output is not finite")
    return RunRecord(recipe, seed, "finished", score=score)


def held_out(results: Results, *, better: bool) -> tuple[bool | None, str]:
    """Whether a study proves that a treatment does no harm, or, if it must, that it is better; and in words."""
    plan, (effect,) = results.plan, results.effects
    if effect.mean is None or effect.low is None or effect.high is None:
        return None, say("{task} has too few validation examples for a proof", task=plan.task)
    if any(run.status == "diverged" and run.recipe != BASELINE for run in results.runs):
        return False, say("outputs on {task} are not finite after it", task=plan.task)
    low, high = sorted(plan.sign * bound for bound in (effect.low, effect.high))
    verdict = placed(low, high, plan.sesoi)
    unit = f" {plan.unit}".rstrip()
    interval = f"{plan.sign * effect.mean:+.2f} [{low:+.2f}, {high:+.2f}]{unit}"
    score = say("{metric} on held-out {task}: {interval}", metric=plan.metric, task=plan.task, interval=interval)
    if all(run.status == "diverged" for run in results.runs if run.recipe == BASELINE):
        return True, say("outputs were not finite before, and are after it; {score}", score=score)
    said = say("not shown to improve") if better and verdict == "not inferior" else fixed(verdict)
    proof = say("{verdict}: {score}, margin {margin:g}", verdict=said, score=score, margin=plan.sesoi)
    return verdict == "improved" or (verdict == "not inferior" and not better), proof
