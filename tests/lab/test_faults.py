"""Whatever fails at whatever moment: what was said to be done is kept, and the same command ends the study."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

from gonio.errors import InvalidArgumentError, StudyError
from gonio.escaping import write_text
from gonio.lab import RunRecord, Study, StudyPlan, make_script_plan, run
from gonio.lab.running.engines.local import call_apart
from gonio.lab.running.scheduler import Watcher
from lab.faults import KILLED, Layer, fail, faulty, kill
from lab.plans import OWN, Here
from lab.processes import exit_code, forked


class Journal(Watcher):
    """Writes down which runs were said to be done, past the layer."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run_ended(self, record: RunRecord) -> None:
        if record.status == "finished":
            os.write(self.file, f"{record.recipe} {record.seed}\n".encode())


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_script_plan(["scale-shift"], script=f"{OWN}:score_of_seed", seeds=2)


def whole(plan: StudyPlan, scratch: Path) -> None:
    """A study from nothing to its page, then a seed more."""
    folder, watcher = scratch / "study", Journal(scratch / "journal")
    study = run(plan, folder, engine=Here(), watcher=watcher)
    write_text(f"{len(study.results().runs)}\n", folder / "report.html")
    study.add_costs([(plan.recipes[1].hash, "step_time", 0, 1.5)])
    more = run(three_seeds(plan), folder, engine=Here(), watcher=watcher)
    write_text(f"{len(more.results().runs)}\n", folder / "report.html")


def three_seeds(plan: StudyPlan) -> StudyPlan:
    return replace(plan, seeds=(0, 1, 2))


def check(plan: StudyPlan, scratch: Path) -> None:
    """What was said to be done is there, and the same command ends the study without doing it again."""
    folder, journal = scratch / "study", scratch / "journal"
    said = journal.read_text().splitlines() if journal.exists() else []
    if said:
        found = {f"{r.recipe} {r.seed}" for r in Study.open(folder).runs() if r.status == "finished"}
        assert set(said) <= found
    page = folder / "report.html"
    assert not page.exists() or page.read_text() in ("4\n", "6\n")
    study = run(three_seeds(plan), folder, engine=Here(), watcher=Journal(journal))
    assert [record.status for record in study.runs()] == ["finished"] * 6
    lines = journal.read_text().splitlines()
    assert lines[: len(said)] == said
    assert len(lines) == len(set(lines))


def operations(plan: StudyPlan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    layer = Layer(-1, fail)
    with faulty(layer, monkeypatch):
        whole(plan, folder)
    return layer.seen


def with_failure(plan: StudyPlan, folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    layer = Layer(at, fail)
    try:
        with faulty(layer, monkeypatch):
            whole(plan, folder)
    except (StudyError, OSError) as error:  # which the command line says in one line
        said = str(error)
        assert "full" in said or "No space left" in said, said
    check(plan, folder)


def with_kill(plan: StudyPlan, folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()

    def to_the_end() -> int:
        with faulty(Layer(at, kill), monkeypatch):
            whole(plan, folder)
        return 0

    assert exit_code(forked(to_the_end)) in (KILLED, 0)
    check(plan, folder)


@pytest.mark.parametrize("fault", [with_failure, with_kill])
@pytest.mark.parametrize(("first", "step"), [(5, 101), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_operations_that_fail(
    fault: Callable[..., None], first: int, step: int, plan: StudyPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counted").mkdir()
    seen = operations(plan, tmp_path / "counted", monkeypatch)
    assert len(seen) > 150
    assert {"open", "fsync", "replace", "flock", "sqlite commit", "sqlite committed", "sqlite connect"} <= set(seen)
    for at in range(first, len(seen) + 2, step):
        fault(plan, tmp_path / f"{at}", at, monkeypatch)


@pytest.mark.parametrize("step", [pytest.param(1024, marks=pytest.mark.slow), 20_000])
def test_files_that_cannot_grow(plan: StudyPlan, tmp_path: Path, step: int) -> None:
    """A limit on the size of files cuts writes in the middle: of the plan, the log of the database, the page."""
    failures = 0
    for limit in range(300, 90_000, step):
        folder = tmp_path / f"{limit}"
        folder.mkdir()
        code = exit_code(forked(lambda folder=folder, limit=limit: _limited(plan, folder, limit)))
        assert code in (0, 3)
        failures += code == 3
        check(plan, folder)
    assert failures >= 2


def _limited(plan: StudyPlan, folder: Path, limit: int) -> int:
    """In a process of its own: 3 if the study says that it cannot write, 0 if it was done."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does: the write fails then
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        whole(plan, folder)
    except (StudyError, OSError):
        return 3
    return 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for half of a study."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(plan: StudyPlan, small_disk: Path) -> None:
    many = replace(plan, seeds=tuple(range(40)))
    with pytest.raises((StudyError, OSError), match=r"full|No space left|I/O error") as caught:
        run(many, small_disk / "study", engine=Here())
    assert not isinstance(caught.value, StudyError) or "Check the disk" in str(caught.value)
    done = len(Study.open(small_disk / "study").runs())
    assert 0 < done < 80
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    study = run(many, small_disk / "study", engine=Here())
    assert [record.status for record in study.runs()] == ["finished"] * 80


# --- signals and clocks -------------------------------------------------------------------------------


def test_a_process_forked_beside_a_fork_server_is_told_so() -> None:
    """Only the process that began the server can ask whether it runs: "No child processes" was all that was said."""

    def inside() -> int:
        vars(forkserver._forkserver).update(inherited)  # as after a fork without more
        with pytest.raises(InvalidArgumentError, match="a process that was forked from the one whose server runs"):
            call_apart(int)
        return 0

    assert call_apart(int) == 0
    inherited = dict(vars(forkserver._forkserver))
    assert exit_code(forked(inside)) == 0
    assert exit_code(forked(lambda: call_apart(int))) == 0  # which begins one of its own


def test_a_clock_that_jumps_changes_nothing(plan: StudyPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = run(plan, tmp_path / "calm", jobs=1).runs()
    jumps = iter([1e9, -1e9, 0.0] * 10_000)
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(jumps))
    assert run(plan, tmp_path / "jumping", jobs=1).runs() == calm
