"""Built-in, tuned and script studies are killed at random moments, again and again: nothing is lost, nothing changes.

`GONIO_KILLS` is the number of kills over the three kinds (60); `make soak` takes 2,000. Each kill ends a process that
runs a study in itself; `tests/lab/test_running.py` kills the processes of studies with workers.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from gonio.lab import RunRecord, Study, StudyPlan, make_plan, make_script_plan, run
from lab.plans import OWN, TINY, Here
from lab.processes import exit_code, forked

KILLS = int(os.environ.get("GONIO_KILLS", "60"))
KINDS = ("built-in", "tuned", "script")


def plan_of(kind: str) -> StudyPlan:
    tiny = f"{TINY}:task"
    if kind == "built-in":
        return make_plan(["orthogonal-init"], task=tiny, seeds=3)
    if kind == "tuned":
        pytest.importorskip("optuna", reason="the extra `tune` is not installed")
        return make_plan(["scale-shift"], task=tiny, seeds=2, tune=3)
    return make_script_plan(["scale-shift"], script=f"{OWN}:noisy", seeds=20)


def rows(folder: Path) -> dict[tuple[str, int], RunRecord]:
    study = Study.open(folder)
    assert study.damaged() == []
    return {(record.recipe, record.seed): record for record in study.runs()}


def begun(plan: StudyPlan, folder: Path) -> int:
    """Start or continue a study in a process of its own, which this process forks; its number."""

    def to_its_end() -> int:
        run(plan, folder, engine=Here())
        return 0

    return forked(to_its_end)


def killed(plan: StudyPlan, folder: Path, after: float) -> bool:
    """Continue a study and kill it after so many seconds; False if it ended before."""
    child = begun(plan, folder)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)  # a child that has ended stays until it is waited for
    code = exit_code(child)
    assert code in (0, -signal.SIGKILL), "the study raised"
    return code != 0


def ended(plan: StudyPlan, folder: Path) -> dict[tuple[str, int], RunRecord]:
    """The rows of a study that is run to its end."""
    assert exit_code(begun(plan, folder)) == 0, "the study raised"
    return rows(folder)


def check_kept(before: dict[tuple[str, int], RunRecord], folder: Path) -> dict[tuple[str, int], RunRecord]:
    """The rows now; raises if one that was there is gone or another one."""
    now = rows(folder) if (folder / "plan.json").exists() else {}
    assert {key: now.get(key) for key in before} == before, "a finished run was lost or changed"
    return now


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kills_lose_nothing(kind: str, tmp_path: Path) -> None:
    draw, plan = random.Random(len(kind)), plan_of(kind)
    start = time.monotonic()
    reference = ended(plan, tmp_path / "reference")
    duration = time.monotonic() - start
    wanted, kills, studies = -(-KILLS // len(KINDS)), 0, 0
    while kills < wanted:
        folder, kept = tmp_path / f"study-{studies}", {}
        studies += 1
        for _ in range(min(200, wanted - kills)):
            if not killed(plan, folder, draw.uniform(0, min(1.0, duration / 3))):
                break
            kills += 1
            kept = check_kept(kept, folder)
            assert all(reference[key] == record for key, record in kept.items())
        assert ended(plan, folder) == reference


@pytest.mark.slow
def test_a_lost_run_is_found(tmp_path: Path) -> None:
    """Negative control."""
    plan = make_script_plan([], script=f"{OWN}:noisy", seeds=2)
    found = ended(plan, tmp_path / "study")
    assert check_kept(found, tmp_path / "study") == found
    lost = RunRecord("baseline", 7, "finished", 1.0)
    with pytest.raises(AssertionError, match="a finished run was lost or changed"):
        check_kept(found | {("baseline", 7): lost}, tmp_path / "study")
