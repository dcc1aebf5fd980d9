"""What a comparison would do, how long it would take, and whether it could show anything."""

from __future__ import annotations

import math
import time

from gonio.compare.cost import training_step
from gonio.compare.one_run import build, prepare_process
from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.statistics import ALPHA, detectable, least_p
from gonio.compare.task import Task
from gonio.compare.tasks import resolve as resolve_task
from gonio.compare.training import evaluate
from gonio.compare.tuning_space import space_of
from gonio.compare.verdict import counted, enough, points
from gonio.compare.workers import Worker

__all__ = ["dry_run"]

_START = 0.2  # seconds to fork a run's process, load its data and store its row
_COSTS = 10.0  # seconds to measure the costs afterwards


def dry_run(plan: Plan, *, jobs: int) -> str:
    """The plan in words: grid, training, estimated time, and the power of so many seeds.

    Trains a few steps of each recipe, in a process of its own, to estimate the time.

    Args:
        jobs: how many runs would go on at a time.

    Example:
        >>> plan = gonio.compare.make_plan(["orthogonal-init"], seeds=5)
        >>> text = gonio.compare.dry_run(plan, jobs=2)
        >>> text[text.index("nothing can") :].split(".")[0]
        'nothing can be shown'
    """
    lines = [
        *(_scripted(plan) if plan.scripted else _trained(plan)),
        f"the baseline and {counted(len(plan.recipes) - 1, 'recipe')}, {counted(len(plan.seeds), 'seed')} each: "
        f"{counted(len(plan.grid), 'run')}",
        *(f"  {entry.name}" for entry in plan.recipes),
        *_tuned(plan),
        *_attacked(plan),
        *([] if plan.scripted else [f"about {_minutes(_seconds(plan, jobs))} with {counted(jobs, 'run')} at a time"]),
        _power(plan),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _trained(plan: Plan) -> list[str]:
    return [
        f"task {plan.task}: " + ", ".join(f"{count} {name}" for name, count in plan.splits.items()),
        f"model {plan.model}, {_training(plan)}",
        f"judged by {plan.metric} on the test split ({'larger' if plan.direction == 'max' else 'smaller'} is "
        "better), at the epoch that the validation split chooses",
    ]


def _scripted(plan: Plan) -> list[str]:
    larger = "larger" if plan.direction == "max" else "smaller"
    return [f"script {plan.task}, judged by the {plan.metric} that it gives ({larger} is better)"]


def _training(plan: Plan) -> str:
    t = plan.trained
    momentum = f", momentum {t.momentum:g}" if t.optimizer == "sgd" else ""
    return (
        f"{counted(t.epochs, 'epoch')} of batches of {t.batch_size}, {t.optimizer} (learning rate {t.lr:g} "
        f"with cosine decay{momentum}, weight decay {t.weight_decay:g})"
    )


def _tuned(plan: Plan) -> list[str]:
    """The budget and the space of tuning."""
    if plan.tuning is None:
        return []
    budget = counted(plan.tuning.trials, "trial")
    total = plan.tuning.trials * len(plan.recipes)
    spaces = [
        f"  {entry.name}: " + ", ".join(f"{d.name} {d.low:.2g} to {d.high:.2g}" for d in space_of(plan, entry))
        for entry in plan.recipes
    ]
    head = f"before that {budget} each, {total} in all, on seed {plan.tuning.seed}; the validation split chooses"
    return [head, *spaces]


def _attacked(plan: Plan) -> list[str]:
    """What is done to the trained models."""
    threat = plan.threat
    if threat is None:
        return []
    return [
        f"each trained model is attacked on {counted(threat.examples, 'test example')}, at most {threat.epsilon:.3g} "
        f"from them in each number: noise, transfer, FGSM, PGD ({threat.steps} steps, {threat.restarts} restarts)"
    ]


def _power(plan: Plan) -> str:
    """Whether the seeds can show anything, and from which effect on."""
    comparisons, pairs = len(plan.recipes) - 1, len(plan.seeds)
    if comparisons == 0:
        return "only the baseline: there is nothing to compare"
    least = min(1.0, least_p(pairs) * comparisons)
    head = (
        f"least possible p with {counted(pairs, 'pair')} after Holm over {counted(comparisons, 'recipe')}: {least:.2g}"
    )
    sds = detectable(pairs, comparisons)
    if sds is None:
        return f"{head}; it must be below {ALPHA}: nothing can be shown. At least {enough(comparisons)} seeds can."
    seen = f"least effect seen with 80 % probability: {sds:.2f} standard deviations of the paired differences"
    if not plan.sesoi:
        return f"{head}; {seen}"
    most = points(plan.sesoi / sds, plan.unit)
    return f"{head}; {seen}, so {points(plan.sesoi, plan.unit)} if these spread by at most {most}"


def _seconds(plan: Plan, jobs: int) -> float:
    worker = Worker(run_seconds, plan)
    try:
        found = worker.result()
    finally:
        worker.stop()
    trials = plan.tuning.trials if plan.tuning else 0
    runs = sum((seconds + _START) * (trials + len(plan.seeds)) + attack * len(plan.seeds) for seconds, attack in found)
    return runs / min(jobs, len(plan.grid)) + (_COSTS if len(plan.recipes) > 1 else 0)


def run_seconds(plan: Plan) -> list[tuple[float, float]]:
    """CPU seconds that the training and the attacks of one run of each recipe would take.

    Meant for a process of its own.
    """
    prepare_process()
    task = resolve_task(plan.task)
    return [_run_seconds(plan, task, entry) for entry in plan.recipes]


def _run_seconds(plan: Plan, task: Task, entry: RecipeEntry) -> tuple[float, float]:
    """Of one run, from three training steps and one validation."""
    step = training_step(plan, task, entry)
    model, _, _ = build(plan, task, entry, plan.seeds[0])
    began = time.process_time()
    for _ in range(3):
        step()
    trained = time.process_time()
    evaluate(model, task, task.validation)
    steps = math.ceil(len(task.train) / plan.trained.batch_size)
    one = (trained - began) / 3
    training = plan.trained.epochs * (one * steps + time.process_time() - trained)
    return training, one * _attack_steps(plan)


def _attack_steps(plan: Plan) -> float:
    """How many training steps the attacks on one model are worth, if half of the examples fall early."""
    if plan.threat is None:
        return 0.0
    ascents = plan.threat.restarts + 4 + 6  # smoothed gradients are the mean of four; six distances are tried
    return 0.5 * plan.threat.examples * plan.threat.steps * ascents / plan.trained.batch_size


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
