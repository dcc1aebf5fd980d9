"""A study on two nodes of Ray, one of which is killed again and again: each run is finished once, with its own score.

`GONIO_CLUSTER_RUNS` is the number of runs (60), `GONIO_NODE_SECONDS` how long a node lives (20); `make soak` takes
5,000 runs and a minute.
"""

from __future__ import annotations

import io
import os
import threading
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


def kill_nodes(cluster: Any, until: threading.Thread) -> int:
    """Keep a second node, killed and replaced again and again, until a thread has ended; the number of kills.

    Ray adds nodes in the main thread alone.
    """
    kills = 0
    while until.is_alive():
        cluster.add_node(num_cpus=1, include_dashboard=False)
        until.join(SECONDS)
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
        kills += until.is_alive()
    return kills


def scores(study: Study) -> dict[tuple[str, int], float | None]:
    return {(record.recipe, record.seed): record.score for record in study.runs() if record.status == "finished"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ray's own, on resources that are closed when it ends
def test_a_study_outlives_its_nodes(tmp_path: Path) -> None:
    plan = make_script_plan(["scale-shift"], script=f"{OWN}:uneven", seeds=RUNS // 2)
    log, studies = io.StringIO(), list[Study]()
    with head(RAY_worker_niceness="0") as cluster:
        engine = Ray()
        driver = threading.Thread(
            target=lambda: studies.append(run(plan, tmp_path / "study", engine=engine, watcher=Lines(log)))
        )
        driver.start()
        kills = kill_nodes(cluster, driver)
    expected = {
        (recipe.name, seed): float(torch.randn((), generator=torch.Generator().manual_seed(seed))) + len(recipe.name)
        for recipe in plan.recipes
        for seed in plan.seeds
    }
    assert len(expected) == 2 * (RUNS // 2)
    (study,) = studies
    assert scores(Study.open(study.path)) == expected
    assert (study.missing(), study.damaged()) == ([], [])
    again = log.getvalue().count("it is run again")
    (tmp_path / "counts.txt").write_text(f"{kills} nodes killed, {again} runs begun again\n")  # for people
    assert kills
    assert ": failed:" not in log.getvalue()
