"""`gonio compare`, `gonio status` and `gonio report`: a small study from the first run to the page."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from cli.shell import COMMAND, SCRIPT, invoke, shell, write_task
from gonio.cli.compare import _command
from gonio.lab import RunRecord, Study, make_plan
from gonio.lab.plan import TUNING_SEED
from gonio.lab.running.tuning import Trial

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a finished study, and how the command ended."""
    folder = tmp_path_factory.mktemp("finished")
    write_task(folder)
    words = ["compare", "scale-shift", "orthogonal-init", "--task", "tiny.py:tiny", "--seeds", "2", "--jobs", "1"]
    return folder, shell(*words, "-o", "study", cwd=folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    return tmp_path


def test_status_counts_trials(folder: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    plan = make_plan(["scale-shift"], task="tiny.py:tiny", seeds=2, tune=3)
    study = Study.create(folder / "tuned", plan)
    study.trials.add(plan.baseline, Trial(0, {"lr": 0.1}, RunRecord("baseline", TUNING_SEED, "finished", 50.0)), {})
    lines = invoke("status", "tuned").stdout.splitlines()
    assert lines[-2:] == ["tuning of baseline: 1 of 3 trials", "tuning of scale-shift: 0 of 3 trials"]


def test_it_prints_the_verdicts_and_the_page(finished) -> None:
    folder, result = finished
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n\npage: study/report.html\n")
    for name in ("scale-shift", "orthogonal-init"):
        assert name in result.stdout
    assert (folder / "study" / "report.html").read_text().startswith("<!")


def test_talk_goes_to_stderr_in_few_lines(finished) -> None:
    _, result = finished
    assert result.stderr.startswith("study study: 3 recipes (with the baseline) × 2 seeds = 6 runs;")
    assert len(result.stderr.splitlines()) < 12
    assert "\x1b" not in result.stderr + result.stdout


def test_the_same_command_again_trains_nothing(finished, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, first = finished
    monkeypatch.chdir(folder)
    before = _rows(folder / "study")
    words = ["compare", "scale-shift", "orthogonal-init", "--task", "tiny.py:tiny", "--seeds", "2", "-o", "study"]
    again = invoke(*words)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert _rows(folder / "study") == before


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_another_plan_in_the_same_folder_is_refused(finished, monkeypatch: pytest.MonkeyPatch, dry: list[str]) -> None:
    folder, _ = finished
    monkeypatch.chdir(folder)
    words = ["compare", "scale-shift", "--task", "tiny.py:tiny", "--model", "tiny.py:linear", "--seeds", "2"]
    result = invoke(*words, "-o", "study", *dry)
    assert (result.exit_code, result.stdout) == (3, "")
    (row,) = [line.split() for line in result.stderr.splitlines() if line.startswith("  model")]
    assert row == ["model", "digits-cnn", "tiny.py:linear"]


def test_status_shows_a_grid(finished) -> None:
    folder, _ = finished
    result = invoke("status", folder / "study")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:3] == ["baseline         ++", "scale-shift      ++", "orthogonal-init  ++"]
    assert lines[4] == "6 runs: 6 finished (+), 0 diverged (!), 0 failed (x), 0 to do (.)"


def test_report_shows_the_same_table(finished) -> None:
    folder, result = finished
    shown = invoke("report", folder / "study")
    assert shown.exit_code == 0
    assert result.stdout.startswith(shown.stdout)


def test_report_writes_every_format(finished, tmp_path: Path) -> None:
    folder, _ = finished
    targets = {flag: tmp_path / f"out.{flag}" for flag in ("html", "json", "csv", "md")}
    result = invoke("report", folder / "study", *(f"--{flag}={path}" for flag, path in targets.items()))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.count("written to") == 4
    assert targets["html"].read_text() == (folder / "study" / "report.html").read_text()
    assert len(json.loads(targets["json"].read_text())["effects"]) == 2
    assert len(targets["csv"].read_text().splitlines()) == 3
    assert "| scale-shift |" in targets["md"].read_text()


def test_a_dash_is_stdout(finished) -> None:
    folder, _ = finished
    result = invoke("report", folder / "study", "--json", "-")
    assert len(json.loads(result.stdout)["runs"]) == 6
    assert result.stderr == ""


def test_a_folder_that_cannot_be_written_is_refused(finished, tmp_path: Path) -> None:
    folder, _ = finished
    result = invoke("report", folder / "study", "--json", tmp_path / "no" / "such" / "folder.json")
    assert result.exit_code == 2
    assert "folder.json'; found no folder" in result.stderr


@pytest.mark.parametrize("command", ["status", "report"])
def test_what_is_no_study_is_refused(command: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path / "nothing")
    assert result.exit_code == 3
    assert "there is no such folder" in result.stderr
    assert "there is no plan.json in it" in invoke(command, tmp_path).stderr
    (tmp_path / "file").write_text("text")
    assert "cannot be used; it is not a folder. Check the path." in invoke(command, tmp_path / "file").stderr


@pytest.mark.parametrize("command", ["status", "report"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda study: (study / "plan.json").write_text("{"), "plan.json cannot be read"),
        (lambda study: (study / "plan.json").write_text("[]"), "plan.json cannot be read"),
        (lambda study: (study / "study.db").write_bytes(b"no database" * 100), "study.db cannot be"),
        (lambda study: _edit_plan(study), "does not have the hash that it states"),
    ],
    ids=["cut off", "a list", "no database", "edited"],
)
def test_a_damaged_study_is_refused_and_says_why(finished, tmp_path: Path, command: str, damage, message: str) -> None:
    folder, _ = finished
    study = tmp_path / "study"
    study.mkdir()
    for name in ("plan.json", "study.db"):
        (study / name).write_bytes((folder / "study" / name).read_bytes())
    damage(study)
    result = invoke(command, study)
    assert result.exit_code == 3
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_dry_run_trains_nothing(folder: Path) -> None:
    result = invoke("compare", "scale-shift", "--task", "tiny.py:tiny", "--seeds", "3", "--dry-run")
    assert result.exit_code == 0
    assert "3 seeds each" in result.stdout
    assert "6 runs" in result.stdout
    assert "penalty  1     fc1" in result.stdout
    assert not Path("gonio-study").exists()


@pytest.mark.slow
def test_the_options_of_a_training_reach_the_plan_and_its_command(folder: Path) -> None:
    words = ["--task", "tiny.py:tiny", "--seeds", "1", "--epochs", "2", "--lr", "0.1", "--optimizer", "adamw",
             "--weight-decay", "0.01", "--schedule", "one-cycle", "--ema", "0.9", "--precision", "bf16"]  # fmt: skip
    result = invoke("compare", "scale-shift", *words, "-o", "trained", "--jobs", "1")
    assert result.exit_code == 0, result.stderr
    plan = json.loads((folder / "trained" / "plan.json").read_text())
    named = {"epochs": 2, "lr": 0.1, "optimizer": "adamw", "weight_decay": 0.01, "schedule": "one-cycle", "ema": 0.9}
    assert plan["training"].items() >= {**named, "precision": "bf16", "batch_size": 12}.items()  # 12 is the task's own
    again = invoke(*shlex.split(plan["command"])[1:], "--dry-run")
    assert again.exit_code == 0, again.stderr
    assert (
        "2 epochs, batch size 12, adamw (learning rate 0.1 with one cycle, weight decay 0.01), moving" in again.stdout
    )
    other = invoke("compare", "scale-shift", *words, "--ema", "0.8", "-o", "trained")
    assert other.exit_code == 3
    assert re.search(r"training\.ema +0\.9 +0\.8", other.stderr)


def test_a_dry_run_shows_the_budget_of_tuning_and_attacks(folder: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    result = invoke("compare", "scale-shift", "--tune", "10", "--robust", "--seeds", "6", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "10 trials each, 20 in all, on seed 1000003" in result.stdout
    assert "scale-shift: lr 0.0063 to 0.4, penalty.1.strength 0.0033 to 3" in result.stdout
    assert "200 test examples, largest change 0.1" in result.stdout
    assert "so 1 point if their standard deviation is at most" in result.stdout


@pytest.mark.slow
def test_the_seeds_may_begin_elsewhere(folder: Path) -> None:
    words = ["orthogonal-init", "--task", "tiny.py:tiny", "--seeds", "2", "--first-seed", "40", "-o", "study"]
    assert invoke("compare", *words).exit_code == 0
    assert {seed for _, seed, _ in _rows(folder / "study")} == {40, 41}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"seeds": 6, "first_seed": 50}, " --seeds 6 --first-seed 50"),
        ({"tune": 5, "robust": True, "output": Path("x y")}, " --tune 5 --robust -o 'x y'"),
        ({"self_test": True}, " --self-test"),
        ({"warm_up": 0.5, "batch_size": 8}, " --warm-up 0.5 --batch-size 8"),
        ({"script": "my fit.py:train", "metric": "size"}, " --script 'my fit.py:train' --metric size"),
    ],
)
def test_the_command_on_the_page_repeats_the_study(given: dict[str, object], words: str) -> None:
    assert _command(["a"], given) == f"gonio compare a{words}"


@pytest.mark.slow
def test_failed_runs_make_the_result_partial(folder: Path) -> None:
    words = ["compare", "orthogonal-init", "--task", "tiny.py:tiny", "--model", "tiny.py:broken", "--seeds", "1"]
    result = shell(*words, cwd=folder)
    assert result.returncode == 4
    assert "the network is broken" in result.stderr
    assert "2 of 2 runs failed" in result.stderr
    assert (folder / "gonio-study" / "report.html").exists()
    status = invoke("status", "gonio-study")
    assert "RuntimeError: the network is broken" in status.stdout
    assert status.stdout.startswith("baseline         x\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 75, "interrupted")],
)
def test_an_interruption_has_its_code_and_can_be_resumed(
    folder: Path, number: signal.Signals, code: int, message: str
) -> None:
    words = ["compare", "orthogonal-init", "--task", "tiny.py:tiny", "--model", "tiny.py:slow", "--seeds", "2"]
    process = subprocess.Popen(
        [*COMMAND, *words, "--jobs", "1"], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _wait_for_a_row(folder / "gonio-study")
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert message in said
    assert "Traceback" not in said
    assert 1 <= len(_rows(folder / "gonio-study")) < 4
    assert invoke("status", "gonio-study").stdout.count("+") >= 2


def _rows(study: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(study / "study.db")) as database, database:
        return database.execute("SELECT hash, seed, record FROM runs ORDER BY hash, seed").fetchall()


def _wait_for_a_row(study: Path) -> None:
    for _ in range(3000):
        time.sleep(0.1)
        if (study / "study.db").exists() and (study / "plan.json").exists() and _rows(study):
            return
    raise TimeoutError("no run ended within five minutes")


def _edit_plan(study: Path) -> None:
    content = json.loads((study / "plan.json").read_text())
    content["sesoi"] = 0.001
    (study / "plan.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_a_script_brings_its_own_training(folder: Path) -> None:
    (folder / "own_fit.py").write_text(SCRIPT)
    words = ["compare", "orthogonal-init", "--script", "own_fit.py:train", "--seeds", "2", "--metric", "size"]
    result = shell(*words, "--direction", "min", "--jobs", "1", "-o", "own", cwd=folder)
    assert result.returncode == 0, result.stderr
    plan = json.loads((folder / "own" / "plan.json").read_text())
    assert (plan["task"], plan["metric"], plan["direction"]) == ("own_fit.py:train", "size", "min")
    assert plan["command"].endswith("--script own_fit.py:train --metric size --direction min --seeds 2 -o own")
    dry = shell(*words, "--dry-run", "-o", "other", cwd=folder)
    assert "script own_fit.py:train, judged by its size (larger is better)" in dry.stdout


@pytest.mark.slow
def test_a_run_that_takes_too_long_fails(folder: Path) -> None:
    (folder / "endless.py").write_text(SCRIPT.replace("return", "import time\n    time.sleep(600)\n    return"))
    options = ["--script", "endless.py:train", "--seeds", "1", "--run-timeout", "1", "-o", "endless"]
    result = shell("compare", "orthogonal-init", *options, cwd=folder)
    assert result.returncode == 4, result.stderr
    assert "took longer than 1 s and was stopped" in result.stderr + result.stdout
