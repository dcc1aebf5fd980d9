"""A study as people train: augmentation per item, loading processes, autocast, one cycle, a moving average.

It runs through the command line without a line of own training code, is killed twice, and ends with the results of one
that was not; the same training as a script gives the same verdict.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from cli.shell import COMMAND
from gonio.lab import Study

FILE = Path(__file__).with_name("fashion.py")
# decays every weight so strongly that little is learnt: an effect that six seeds show
RECIPE = "name: strong-decay\npenalty:\n  - {where: 'type:Linear', use: L2, strength: 1.0}\n"
SEEDS = ["--seeds", "6", "--jobs", "2"]
TRAINED = [
    "--task", f"{FILE}:task", "--workers", "4", "--precision", "bf16", "--schedule", "one-cycle", "--ema", "0.9",
    "--device", "cpu",
]  # fmt: skip


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder.parent / "decay.yaml").write_text(RECIPE)
    # more loading processes than cores make torch warn in a script's own DataLoader
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "compare", "decay.yaml", *words, *SEEDS, "-o", str(folder)]
    return subprocess.Popen(command, cwd=folder.parent, env=environment, stderr=subprocess.PIPE, text=True)


def ended(folder: Path, *words: str) -> Study:
    process = begun(folder, *words)
    _, said = process.communicate(timeout=3000)
    assert process.returncode == 0, said
    return Study.open(folder)


def rows(folder: Path) -> int:
    if not (folder / "plan.json").exists():
        return 0
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        return int(database.execute("SELECT COUNT(*) FROM runs").fetchone()[0])


def killed(folder: Path, *words: str, at: int) -> None:
    """Run the study and kill its process as soon as it has so many rows."""
    process = begun(folder, *words)
    while rows(folder) < at:
        assert process.poll() is None, "the study ended before it could be killed"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert rows(folder) < 12


@pytest.mark.slow
def test_a_study_that_is_killed_twice_ends_as_one_that_is_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the processes that are killed
        killed(tmp_path / "killed", *TRAINED, at=2)
        killed(tmp_path / "killed", *TRAINED, at=6)
        resumed = ended(tmp_path / "killed", *TRAINED)
        whole = ended(tmp_path / "whole", *TRAINED)
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())["training"]
    assert (plan["precision"], plan["schedule"], plan["ema"]) == ("bf16", "one-cycle", 0.9)
    assert resumed.runs() == whole.runs()
    effect, again = whole.results().effects[0], resumed.results().effects[0]
    assert (effect.differences, effect.p, effect.verdict) == (again.differences, again.p, again.verdict)
    assert effect.verdict == "hurts", effect.reason
    assert (whole.results().baseline_mean or 0) > 30  # of ten classes: it learns
    script = ["--script", f"{FILE}:train", "--metric", "accuracy", "--unit", "%", "--sesoi", "1", "--device", "cpu"]
    scripted = ended(tmp_path / "script", *script).results()
    assert scripted.effects[0].verdict == effect.verdict, scripted.effects[0].reason
    assert scripted.effects[0].step_time is not None
