"""Tune the learning rate and the number of epochs of a built-in task's baseline.

Run by hand: `python tests/lab/tune_baseline.py [digits|points|bytes]`. Scores are on the validation split; the
seeds are none of those that the study uses, and the test split is not touched.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from dataclasses import dataclass, replace

os.environ["OMP_NUM_THREADS"] = "1"

from gonio.lab.planning.planner import make_plan
from gonio.lab.running.training import build, fit, prepare_process
from gonio.lab.tasks import resolve


@dataclass(frozen=True)
class Grid:
    """What is tried."""

    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    epochs: tuple[int, ...]


GRIDS = {
    "digits": Grid((1000, 1001, 1002, 1003), (0.005, 0.01, 0.02, 0.05, 0.1, 0.2), (40, 60)),
    "points": Grid((1000, 1001, 1002), (0.005, 0.01, 0.02, 0.05), (25, 40)),
    "bytes": Grid((1000, 1001), (0.001, 0.003, 0.006, 0.01), (4,)),
}


def main(name: str = "digits") -> None:
    """Print one row per setting: mean and standard deviation of the validation score."""
    prepare_process()
    grid, task = GRIDS[name], resolve(name)
    better = max if task.metric.direction == "max" else min
    for epochs, lr in itertools.product(grid.epochs, grid.rates):
        training = replace(task.training, epochs=epochs, lr=lr)
        plan = make_plan([], task=name, seeds=grid.seeds, training=training)
        best, last = [], []
        for seed in grid.seeds:
            model, _, _ = build(plan, task, plan.baseline, seed)
            scores = fit(model, task, training=training, seed=seed).curve["val_score"]
            best.append(better(scores))
            last.append(scores[-1])
        row = f"epochs {epochs:3d}  lr {lr:5.3f}  last {statistics.mean(last):6.2f} (sd {statistics.stdev(last):.2f})"
        sys.stdout.write(f"{row}  best {statistics.mean(best):6.2f} (sd {statistics.stdev(best):.2f})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
