"""The dry run: the grid of a comparison, its estimated time, and the effects that it can detect."""

from __future__ import annotations

import torch

from gonio.lab.judging.statistics import ALPHA, detectable, enough, least_p, points
from gonio.lab.plan import StudyPlan
from gonio.lab.running.cost import Gauge, training_step
from gonio.lab.running.engines.local import call_apart
from gonio.lab.running.training import build, evaluate, steps_of, task_of
from gonio.lab.running.tuning import space_of
from gonio.messages import counted, joined, say
from gonio.pages.tables import duration

_START = 0.2  # seconds to fork a run's process, load its data and store its row
_COSTS = 10.0  # seconds to measure the costs afterwards


def dry_run(plan: StudyPlan, *, jobs: int) -> str:
    """The plan as text: grid, training, estimated time, and statistical power.

    Trains a few steps of each recipe, in a process of its own, to estimate the time.

    Args:
        jobs: number of runs at a time.

    Example:
        >>> plan = gonio.lab.make_plan(["orthogonal-init"], seeds=5)
        >>> text = gonio.lab.dry_run(plan, jobs=2)
        >>> text[text.index("too few") :].split(".")[0]
        'too few seeds to detect any effect'
    """
    lines: list[str] = [
        *_head(plan),
        say(
            "the baseline and {recipes}, {seeds} each: {runs}",
            recipes=counted(len(plan.recipes) - 1, "recipe"),
            seeds=counted(len(plan.seeds), "seed"),
            runs=counted(len(plan.grid), "run"),
        ),
        *(f"  {entry.name}" for entry in plan.recipes),
        *_tuned(plan),
    ]
    if (threat := plan.threat) is not None:
        lines.append(
            say(
                "attacks on each trained model: {examples}, largest change {epsilon:.3g} per input number; noise, "
                "transfer, FGSM, PGD ({steps} steps, {restarts} restarts)",
                examples=counted(threat.examples, "test example"),
                epsilon=threat.epsilon,
                steps=threat.steps,
                restarts=threat.restarts,
            )
        )
    if not plan.scripted:
        seconds = plan_seconds(plan, jobs)
        lines.append(say("about {time} with {runs} at a time", time=duration(seconds), runs=counted(jobs, "run")))
    return joined([*lines, _power(plan), *(say("note: {text}", text=note) for note in plan.notes)], "\n")


def _head(plan: StudyPlan) -> list[str]:
    """The task, the training and the metric."""
    better = say("larger is better") if plan.direction == "max" else say("smaller is better")
    judged = {"metric": plan.metric, "better": better}
    if plan.scripted:
        return [say("script {task}, judged by its {metric} ({better})", task=plan.task, **judged)]
    splits = ", ".join(f"{count} {name}" for name, count in plan.splits.items())
    trained = f"{plan.trained}" + (f", on {plan.device}" if plan.device != "cpu" else "")
    return [
        say("task {task}: {splits}", task=plan.task, splits=splits),
        say("model {model}, {training}", model=plan.model, training=trained),
        say("judged by {metric} on the test split ({better}), at the epoch with the best validation score", **judged),
    ]


def _tuned(plan: StudyPlan) -> list[str]:
    """The budget and the search space of tuning."""
    if plan.tuning is None:
        return []
    budget = counted(plan.tuning.trials, "trial")
    total = plan.tuning.trials * len(plan.recipes)
    spaces = [
        f"  {entry.name}: " + ", ".join(f"{d.name} {d.low:.2g} to {d.high:.2g}" for d in space_of(plan, entry))
        for entry in plan.recipes
    ]
    head = say(
        "tuning first: {trials} each, {total} in all, on seed {seed}, chosen by the validation score; the number of "
        "epochs is not tuned",
        trials=budget,
        total=total,
        seed=plan.tuning.seed,
    )
    return [head, *spaces]


def _power(plan: StudyPlan) -> str:
    """The smallest effect that so many seeds can detect."""
    comparisons, pairs = len(plan.recipes) - 1, len(plan.seeds)
    if comparisons == 0:
        return say("only the baseline: there is nothing to compare")
    least = min(1.0, least_p(pairs) * comparisons)
    head = say(
        "smallest possible p with {pairs} after Holm over {recipes}: {least:.2g}",
        pairs=counted(pairs, "pair"),
        recipes=counted(comparisons, "recipe"),
        least=least,
    )
    sds = detectable(pairs, comparisons)
    if sds is None:
        return say(
            "{head}; it must be below {alpha}: too few seeds to detect any effect. Use {enough} or more.",
            head=head,
            alpha=ALPHA,
            enough=enough(comparisons),
        )
    seen = say(
        "minimum detectable effect (80 % power): {sds:.2f} standard deviations of the paired differences", sds=sds
    )
    if not plan.sesoi:
        return joined([head, seen], "; ")
    least_effect, most = (points(value, plan.unit) for value in (plan.sesoi, plan.sesoi / sds))
    so = say(
        "{seen}, so {effect} if their standard deviation is at most {most}", seen=seen, effect=least_effect, most=most
    )
    return joined([head, so], "; ")


def plan_seconds(plan: StudyPlan, jobs: int) -> float:
    """Estimated seconds of a study with so many runs at a time."""
    found = call_apart(run_seconds, plan)
    trials = plan.tuning.trials * plan.tuning.repeats if plan.tuning else 0
    runs = sum((seconds + _START) * (trials + len(plan.seeds)) + attack * len(plan.seeds) for seconds, attack in found)
    costs = _COSTS if len(plan.recipes) > 1 and plan.measure is None else 0.0
    return runs / min(jobs, len(plan.grid)) + costs


def run_seconds(plan: StudyPlan) -> list[tuple[float, float]]:
    """Estimated seconds of the training and of the attacks of one run of each recipe.

    From three training steps and one validation. Meant for a process of its own.
    """
    task, device, attacks = task_of(plan), torch.device(plan.device), 0.0
    if (threat := plan.threat) is not None:
        ascents = threat.restarts + 4 + 6  # smoothed gradients are the mean of four; six distances are tried
        misled_early = 0.5  # of the examples
        attacks = misled_early * threat.examples * threat.steps * ascents
    found = []
    for entry in plan.recipes:
        training = plan.training_of(entry)
        step = training_step(plan, task, entry)
        model, _, _ = build(plan, task, entry, plan.seeds[0])
        with Gauge(device) as trained:
            for _ in range(3):
                step()
        with Gauge(device) as judged:
            evaluate(model, task, task.validation)
        one = trained.seconds / 3
        found.append(
            (training.epochs * (one * steps_of(task, training) + judged.seconds), one * attacks / training.batch_size)
        )
    return found
