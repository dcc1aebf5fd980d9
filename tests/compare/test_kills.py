"""Two hundred kills of whatever process a study has, at random moments: nothing is lost, stuck or run twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from compare.own_training import noisy
from compare.processes import alive, continue_study, patience, wait_for_silence
from gonio.compare import Run, RunRecord, Study, make_script_plan, run

OWN = str(Path(__file__).with_name("own_training.py"))
SEEDS = 300  # more than the kills let finish: the study is never idle
Rows = dict[tuple[str, int], RunRecord]


@pytest.mark.slow
@pytest.mark.parametrize(("lives", "kills"), [(60, 200)])
def test_kills_at_random_moments(tmp_path: Path, lives: int, kills: int) -> None:
    """`kills` processes die in `lives` of the study, one of them the parent at each life's end."""
    draw, folder = random.Random(9), tmp_path / "study"
    Study.create(folder, make_script_plan(["scale-shift"], script=f"{OWN}:noisy", seeds=SEEDS))
    kept: Rows = {}
    victims: Counter[str] = Counter()
    for life in range(lives):
        journal = tmp_path / f"journal-{life}"
        journal.touch()
        slow = f"{draw.choice((0, 0.02, 0.1))}"
        process = continue_study(folder, GONIO_TEST_JOURNAL=str(journal), GONIO_TEST_SLEEP=slow)
        children = (kills - lives) // lives + (life < (kills - lives) % lives)
        for _ in range(children):
            wait_for_start(journal, draw.randint(0, 4), process)
            time.sleep(draw.uniform(0, 0.2))
            victims[kill_a_child(process, draw)] += 1
        wait_for_start(journal, draw.randint(0, 3), process)
        time.sleep(draw.uniform(0, 0.2))
        process.kill()
        victims["parent"] += 1
        process.wait()
        assert wait_for_silence(process.pid) == []  # nothing is stuck
        found = rows(folder)  # nothing is unreadable
        assert {key: found.get(key) for key in kept} == kept  # nothing is lost
        begun = Counter(journal.read_text().splitlines())
        assert max(begun.values(), default=0) <= 1
        assert not {f"{recipe} {seed}" for recipe, seed in kept} & set(begun)  # nothing is run twice
        kept = {key: record for key, record in found.items() if record.status == "finished"}
    assert sum(victims.values()) == kills, victims
    assert len(kept) > lives
    check_the_end(folder, tmp_path)


def check_the_end(folder: Path, scratch: Path) -> None:
    """The study can still be finished, and is what it would have been without the kills."""
    ended = run(Study.open(folder).plan, folder, jobs=2).runs()
    assert [record.status for record in ended] == ["finished"] * (2 * SEEDS)
    for record in ended[:: SEEDS // 3]:
        expected = noisy(Run({"name": record.recipe}, seed=record.seed, folder=scratch))
        assert record.score == expected


def rows(folder: Path) -> Rows:
    return {(record.recipe, record.seed): record for record in Study.open(folder).runs()}


def wait_for_start(journal: Path, more: int, process: subprocess.Popen[str]) -> None:
    """Until so many further runs have begun, or the study has ended."""
    goal = len(journal.read_text().splitlines()) + more
    for _ in patience(300, pause=0.005):
        if process.poll() is not None or len(journal.read_text().splitlines()) >= goal:
            return
    raise AssertionError("the study is stuck")


def kill_a_child(process: subprocess.Popen[str], draw: random.Random) -> str:
    """Kill a worker, the server that forks them, or the tracker beside it."""
    for _ in patience(300, pause=0.01):
        if children := sorted(set(map(int, alive(process.pid))) - {process.pid}):
            with suppress(ProcessLookupError):  # it ended while we chose
                os.kill(draw.choice(children), signal.SIGKILL)
            return "child"
        assert process.poll() is None, "the study ended by itself"
    raise AssertionError("the study has started nothing")
