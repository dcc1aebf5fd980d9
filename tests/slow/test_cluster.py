"""A study on two nodes of Ray, one of which is killed again and again: each run is finished once, with its own score.

`GONIO_CLUSTER_RUNS` is the number of runs (60), `GONIO_NODE_SECONDS` how long a node lives (20); `make soak` takes
5,000 runs and a minute.
"""

from __future__ import annotations

import io
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gonio.lab import Study, make_script_plan, run
from gonio.lab.running.engines import Ray
from gonio.lab.running.scheduler import Lines
from lab.plans import OWN
from lab.ray_clusters import head

RUNS = int(os.environ.get("GONIO_CLUSTER_RUNS", "60"))
SECONDS = float(os.environ.get("GONIO_NODE_SECONDS", "20"))


class Killed:
    """A second node; killed after some seconds, and replaced by a new one, until the block ends."""

    def __init__(self, cluster: Any, seconds: float) -> None:
        self.kills = 0
        self._cluster, self._seconds, self._end = cluster, seconds, threading.Event()
        self._thread = threading.Thread(target=self._kill)
        self._add()

    def _add(self) -> None:
        """A new node, unless the machine is too busy for it to answer in time; the next call tries again."""
        with suppress(RuntimeError):
            self._cluster.add_node(num_cpus=1, include_dashboard=False)

    def _remove(self) -> int:
        """How many nodes were there, which are killed."""
        nodes = list(self._cluster.worker_nodes)
        for node in nodes:
            self._cluster.remove_node(node, allow_graceful=False)
        return len(nodes)

    def _kill(self) -> None:
        while not self._end.wait(self._seconds):
            self.kills += self._remove()
            self._add()

    def __enter__(self) -> Killed:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._remove()


def scores(study: Study) -> dict[tuple[str, int], float | None]:
    return {(record.recipe, record.seed): record.score for record in study.runs() if record.status == "finished"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ray's own, on resources that are closed when it ends
def test_a_study_outlives_its_nodes(tmp_path: Path) -> None:
    plan = make_script_plan(["scale-shift"], script=f"{OWN}:noisy", seeds=RUNS // 2)
    log = io.StringIO()
    with head(RAY_worker_niceness="0") as cluster, Killed(cluster, SECONDS) as node:
        study = run(plan, tmp_path / "study", engine=Ray(), watcher=Lines(log))
    expected = {
        (recipe.name, seed): float(torch.randn((), generator=torch.Generator().manual_seed(seed))) + len(recipe.name)
        for recipe in plan.recipes
        for seed in plan.seeds
    }
    assert len(expected) == 2 * (RUNS // 2)
    assert scores(Study.open(study.path)) == expected
    assert (study.missing(), study.damaged()) == ([], [])
    again = log.getvalue().count("it is run again")
    (tmp_path / "counts.txt").write_text(f"{node.kills} nodes killed, {again} runs begun again\n")  # for people
    assert node.kills
    assert ": failed:" not in log.getvalue()
