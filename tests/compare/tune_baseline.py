"""Tune the learning rate and the number of epochs of the built-in study's baseline.

Run by hand: `python tests/compare/tune_baseline.py`. Scores are on the validation split; the seeds are none
of those that the study uses, and the test split is not touched.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from dataclasses import replace

os.environ["OMP_NUM_THREADS"] = "1"

from gonio.compare import tasks
from gonio.compare.one_run import build, prepare_process
from gonio.compare.planning import make_plan
from gonio.compare.training import fit

SEEDS = (1000, 1001, 1002, 1003)
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
EPOCHS = (40, 60)


def main() -> None:
    """Print one row per setting: mean and standard deviation of the validation score."""
    prepare_process()
    task = tasks.digits()
    for epochs, lr in itertools.product(EPOCHS, RATES):
        training = replace(task.training, epochs=epochs, lr=lr)
        plan = make_plan([], task="digits", seeds=SEEDS, training=training)
        best, last = [], []
        for seed in SEEDS:
            model, _, _ = build(plan, task, plan.baseline, seed)
            scores = fit(model, task, training=training, seed=seed).curve["val_score"]
            best.append(max(scores))
            last.append(scores[-1])
        row = f"epochs {epochs:3d}  lr {lr:5.3f}  last {statistics.mean(last):6.2f} (sd {statistics.stdev(last):.2f})"
        sys.stdout.write(f"{row}  best {statistics.mean(best):6.2f} (sd {statistics.stdev(best):.2f})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
