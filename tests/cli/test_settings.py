"""Options of commands from `gonio.toml` or `[tool.gonio]`, and `--show-settings`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.shell import invoke

FILE = """
ignore = ["G202"]
[measure]
batch = "4x1x8x8"
seed = 3
[compare]
recipes = ["scale-shift"]
seeds = 6
[reproduce]
first-seed = 100
[cost]
batch = "8x1x8x8"
model = "digits-cnn"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "gonio.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(*words: str) -> dict[str, tuple[str, str]]:
    """Of each setting its value and where it comes from."""
    result = invoke(*words, "--show-settings")
    assert result.exit_code == 0, result.stderr
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()[:-1]]
    return {name: (value, source) for name, value, source in rows}


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(folder: Path) -> None:
    found = settings("measure", "digits-cnn", "--seed", "2")
    assert found["seed"] == ("2", "command line")
    assert found["batch"] == ("4x1x8x8", "gonio.toml")
    assert found["task"] == ("bytes", "default")
    assert found["source"] == ("digits-cnn", "command line")
    assert found["also"] == ("–", "default")
    assert invoke("measure", "digits-cnn", "--show-settings").stdout.splitlines()[-1] == "file: gonio.toml"


def test_arguments_and_every_command_take_them(folder: Path) -> None:
    compared = settings("compare")
    assert compared["recipes"] == ("scale-shift", "gonio.toml")
    assert compared["seeds"] == ("6", "gonio.toml")
    assert settings("reproduce")["first-seed"] == ("100", "gonio.toml")
    assert settings("cost")["model"] == ("digits-cnn", "gonio.toml")


def test_a_measurement_uses_them(folder: Path) -> None:
    result = invoke("measure", "digits-cnn", "--json", "-")
    assert "random weights (seed 3)" in result.stderr
    assert json.loads(result.stdout)["signals"], "the batch of the file ran through the model"
    (folder / "gonio.toml").unlink()
    result = invoke("measure", "digits-cnn", "--json", "-")
    assert "random weights (seed 0)" in result.stderr
    assert not json.loads(result.stdout)["signals"]


def test_a_named_file_and_the_shared_one(folder: Path) -> None:
    (folder / "other.toml").write_text("[measure]\nseed = 7\n")
    assert settings("measure", "x", "--config", "other.toml")["seed"][0] == "7"
    assert settings("measure", "x", "--config=other.toml")["batch"] == ("–", "default")
    (folder / "gonio.toml").unlink()
    (folder / "pyproject.toml").write_text("[tool.gonio.measure]\nseed = 9\n")
    assert settings("measure", "x")["seed"] == ("9", "pyproject.toml")
    assert invoke("measure", "x", "--show-settings").stdout.splitlines()[-1] == "file: pyproject.toml"


def test_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {source for _, source in settings("reproduce").values()} == {"default"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sede = 3", "[measure] sede is no option of gonio measure; did you mean seed"),
        ('model = "net.py:make"', "[measure] model names code, which only the command line can name"),
        ('source = "net.py:make"', "[measure] source names code, which only the command line can name"),
        ('html = "page.html"', "[measure] html is a file to write, which only the command line can name"),
        ('config = "b.toml"', "[measure] config is no option of gonio measure"),
        ('journal = "a.jsonl"', "[measure] journal is a file to write, which only the command line can name"),
        ("seed = {a = 1}", "[measure] seed must be a whole number; found {'a': 1}"),
        ("seed = true", "[measure] seed must be a whole number; found true"),
        ("jobs = false", "[measure] jobs must be a whole number; found false"),
        ("seed = 1.0", "[measure] seed must be a whole number; found 1.0"),
        ('seed = "3"', "[measure] seed must be a whole number; found '3'"),
        ("deep = 1", "[measure] deep must be true or false; found 1"),
        ("batch = true", "[measure] batch must be text; found true"),
        ("fail-on = true", "[measure] fail-on must be text; found true"),
        ('batch = ["2x1x8x8"]', "[measure] batch must be text; found ['2x1x8x8']"),
        ('also = "blocks"', "[measure] also must be a list of text; found 'blocks'"),
        ("ignore = [true]", "[measure] ignore must be a list of text; found [true]"),
        ("seed = -1", "[measure] seed: it must be 0 or more"),
        ('fail-on = "wrn"', "[measure] fail-on: 'wrn' is not one of 'info', 'warn', 'error'. Did you mean 'warn'?"),
    ],
)
def test_what_a_file_cannot_set(folder: Path, line: str, message: str) -> None:
    (folder / "net.py").write_text("open('CANARY', 'w')\n")
    (folder / "gonio.toml").write_text(f"[measure]\n{line}\n")
    result = invoke("measure", "digits-cnn")
    assert message in " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (3, "")
    assert not (folder / "CANARY").exists()


@pytest.mark.parametrize("value", ["true", "nan", "inf", "'x'", "[1.0]"])
def test_a_number_of_a_file_is_a_finite_number(folder: Path, value: str) -> None:
    (folder / "gonio.toml").write_text(f"[compare]\nlr = {value}\n")
    result = invoke("compare", "--dry-run")
    assert "[compare] lr must be a finite number" in result.stderr
    assert result.exit_code == 3
    (folder / "gonio.toml").write_text("[compare]\nlr = 1\n")
    assert settings("compare")["lr"] == ("1.0", "gonio.toml")


@pytest.mark.parametrize("command", ["compare", "reproduce", "cost", "measure"])
def test_every_command_refuses_a_table_that_does_not_exist(folder: Path, command: str) -> None:
    (folder / "gonio.toml").write_text("[comapre]\nseeds = 3\n")
    result = invoke(command, "--show-settings")
    assert "the file has no key 'comapre'; did you mean compare" in result.stderr
    assert result.exit_code == 3


def test_a_script_is_named_on_the_command_line_alone(folder: Path) -> None:
    (folder / "gonio.toml").write_text('[compare]\nscript = "mine"\n')
    assert "[compare] script names code" in invoke("compare").stderr


def test_other_commands_do_not_read_the_file(folder: Path) -> None:
    (folder / "gonio.toml").write_text("not toml")
    assert invoke("list", "rules").exit_code == 0
    assert invoke("measure", "--help").exit_code == 0
    assert invoke("measure", "digits-cnn").exit_code == 3
