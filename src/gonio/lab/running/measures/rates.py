"""The best learning rate, and how fast layers turn."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch.optim import Optimizer

from gonio.lab.running.measures import FinishedRun, measure
from gonio.lab.running.training import fit
from gonio.lab.tasks.task import Split
from gonio.measuring import Tracker
from gonio.optim import hold_
from gonio.surgery.graph import trace


@measure("octaves", start=True)
def best_rate(run: FinishedRun, *, octaves: Sequence[float], examples: int | None = None, hold: bool = False) -> float:
    """Octaves from the plan's learning rate to the best one: that with the best last validation score.

    The model is trained from its start at every rate of a grid, in the same order of the examples. The best rate is the
    vertex of the parabola through the best score and its two neighbours; at an end of the grid it is that end.

    Args:
        octaves: the grid, as ascending log2 of the factor of the plan's rate.
        examples: of the training split, from its start; None for all.
        hold: hold norms and sizes of the steps (:func:`gonio.hold_` with `step="fixed"`).
    """
    task = run.task
    if examples is not None:
        task = replace(task, train=Split(task.train.inputs[:examples], task.train.targets[:examples]))
    sign, scores = 1 if task.metric.direction == "min" else -1, []
    for octave in octaves:
        model = copy.deepcopy(run.model)
        held = partial(hold_, model, step="fixed") if hold else None
        training = replace(run.training, lr=run.training.lr * 2**octave)
        done = fit(model, task, training=training, seed=run.seed, hold=held)
        reached = math.nan if done.diverged else sign * done.curve["val_score"][-1]
        scores.append(reached if math.isfinite(reached) else math.inf)
    return _lowest(octaves, scores)


def _lowest(places: Sequence[float], values: Sequence[float]) -> float:
    """Where the parabola through the least value and its neighbours is lowest; the place itself without both."""
    at = min(range(len(values)), key=values.__getitem__)
    if at in (0, len(values) - 1) or not all(map(math.isfinite, values[at - 1 : at + 2])):
        return math.nan if math.isinf(values[at]) else float(places[at])
    a, b, _ = np.polyfit(places[at - 1 : at + 2], values[at - 1 : at + 2], 2)
    return float(places[at]) if a <= 0 else float(-b / (2 * a))


@measure("%", start=True)
def rotation_excess(run: FinishedRun, *, epochs: int, hold: bool = False) -> float:
    """Percent by which scale-invariant layers turn faster per step than predicted, mean over the layers.

    The model is trained for `epochs` at a constant learning rate with the plan's other settings, and the later half of
    the steps counts; see :func:`gonio.measuring.equilibrium`. With `hold`, norms and sizes of the steps are held, which
    predicts arctan η (:func:`gonio.hold_`).
    """
    invariant = trace(run.model, training=True).scale_invariant
    trackers: list[Tracker] = []

    def watch(optimizer: Optimizer) -> None:
        if hold:
            hold_(run.model, optimizer, step="fixed")
        trackers.append(Tracker(run.model, optimizer=optimizer, figures="training", every=1))

    training = replace(run.training, epochs=epochs, schedule="constant", warm_up=0.0)
    done = fit(run.model, run.task, training=training, seed=run.seed, hold=watch)
    ratios = [layer.ratio for layer in trackers[0].rotations if layer.layer in invariant and layer.ratio is not None]
    return math.nan if done.diverged or not ratios else 100 * (sum(ratios) / len(ratios) - 1)
