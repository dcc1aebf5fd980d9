"""Whole studies in their own processes: order, number of jobs, accidents and signals change nothing."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from compare.processes import start_study, wait_for_runs, wait_for_silence
from gonio.compare import Lines, Plan, RunRecord, Study, make_plan, run
from gonio.errors import InvalidArgumentError

TINY = str(Path(__file__).with_name("tiny.py"))
RECIPES = ["orthogonal-init", "switchable-norm"]


def plan_of(model: str = "model", *, seeds: int = 2, recipes: list[str] | None = None) -> Plan:
    names = RECIPES if recipes is None else recipes
    return make_plan(names, task=f"{TINY}:task", model=f"{TINY}:{model}", seeds=seeds)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, ...]:
    """The runs of a study that nothing happened to."""
    return run(plan_of(), tmp_path_factory.mktemp("reference"), jobs=2).runs()


def start(folder: Path, *, model: str = "model", seeds: int = 2) -> subprocess.Popen[str]:
    return start_study(folder, RECIPES, task=f"{TINY}:task", model=f"{TINY}:{model}", seeds=seeds)


def test_results_do_not_depend_on_the_number_of_jobs(reference: tuple[RunRecord, ...], tmp_path: Path) -> None:
    study = run(plan_of(), tmp_path, jobs=1)
    assert [record.status for record in reference] == ["finished"] * 6
    assert study.runs() == reference
    assert study.missing() == []
    assert all(effect.step_time and effect.memory for effect in study.results().effects)


def test_the_same_command_again_runs_nothing(tmp_path: Path) -> None:
    plan = plan_of(seeds=1, recipes=[])
    run(plan, tmp_path)
    before = os.stat(tmp_path / "study.db").st_mtime_ns
    log = io.StringIO()
    run(plan, tmp_path, watcher=Lines(log))
    assert os.stat(tmp_path / "study.db").st_mtime_ns == before
    assert log.getvalue() == ""


def test_more_seeds_run_only_what_is_missing(reference: tuple[RunRecord, ...], tmp_path: Path) -> None:
    first = run(plan_of(seeds=1), tmp_path)
    before = seconds_of(first)
    second = run(plan_of(seeds=2), tmp_path)
    assert second.runs() == reference
    # the CPU time of a run is never the same twice: these rows were not written again
    assert {key: value for key, value in seconds_of(second).items() if key in before} == before
    assert "After 3 runs had been done, seeds 1 were added" in second.results().notes[-1]


def seconds_of(study: Study) -> dict[tuple[str, int], float | None]:
    return {(record.recipe, record.seed): record.seconds for record in study.runs()}


def test_a_process_that_dies_loses_only_its_run(tmp_path: Path) -> None:
    study = run(plan_of("dying_model", seeds=6, recipes=[]), tmp_path, jobs=3)
    statuses = [record.status for record in study.runs()]
    assert len(statuses) == 6
    assert set(statuses) == {"finished", "failed"}
    lost = next(record for record in study.runs() if record.status == "failed")
    assert lost.error == "the process of this run died (signal SIGKILL)"
    assert len(study.missing()) == statuses.count("failed") == study.results().failed


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_must_be_positive(tmp_path: Path, jobs: int) -> None:
    with pytest.raises(InvalidArgumentError, match="jobs must be at least 1"):
        run(plan_of(), tmp_path, jobs=jobs)


def test_killed_at_random_moments_and_continued_equals_uninterrupted(
    reference: tuple[RunRecord, ...], tmp_path: Path
) -> None:
    draw = random.Random(0)
    folder = tmp_path / "study"
    for kept in (0, 2):
        process = start(folder)
        wait_for_runs(folder, kept, process)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        process.communicate()
        assert wait_for_silence(process.pid) == []
        found = Study.open(folder).runs() if kept else ()
        assert len(found) >= kept
        assert all(record in reference for record in found)
    study = run(plan_of(), folder, jobs=2)
    assert study.runs() == reference
    assert study.without_costs() == []


def test_a_second_process_is_refused_and_termination_keeps_what_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    process = start(folder, model="slow_model", seeds=20)
    wait_for_runs(folder, 1, process)
    second = start(folder, model="slow_model", seeds=20)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"process {process.pid} is running it. Wait until it ends" in errors
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    check_end(process, folder, code=75, says="was interrupted. Every finished run is kept")


def test_ctrl_c_stops_the_workers_and_keeps_what_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    process = start(folder, model="slow_model", seeds=20)
    wait_for_runs(folder, 1, process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the workers as well
    check_end(process, folder, code=130, says="")


def check_end(process: subprocess.Popen[str], folder: Path, *, code: int, says: str) -> None:
    """The study ends at once, quietly, with this code, no process left, and the rows that it had."""
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert wait_for_silence(process.pid) == []
    assert says in errors
    assert "Traceback" not in errors
    assert 1 <= len(Study.open(folder).runs()) < 60
