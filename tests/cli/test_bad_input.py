"""No input is reported as a defect of gonio (exit code 70)."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from cli.shell import COMMAND, invoke
from gonio import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    torch.save({1: torch.ones(4, 4)}, folder / "numbers.pt")
    torch.save(models.digits_cnn().state_dict(), folder / "fine.pt")
    torch.save({"w": torch.zeros(100_000)}, folder / "zeros.pt")
    with zipfile.ZipFile(folder / "zeros.pt") as source, zipfile.ZipFile(folder / "bomb.pt", "w", 8) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry.filename))
    torch.save(torch.zeros(1).expand(10**4, 1, 8, 8), folder / "wide.pt")
    torch.save({"w": torch.zeros(1).expand(9, 9)}, folder / "square.pt")
    torch.save({"x" * 5000 + str(i): torch.ones(2) for i in range(400)}, folder / "long.pt")
    rules = "".join(f"  - {{where: 'none{i}', use: L2, strength: 1}}\n" for i in range(400))
    (folder / "rules.yaml").write_text(f"name: x\npenalty:\n{rules}")
    codes = "".join(f'"a{i}" = ["Z{i}"]\n' for i in range(5000))
    (folder / "codes.toml").write_text(f"[per-layer-ignores]\n{codes}")
    (folder / "count.yaml").write_text("name: x\npenalty: [{where: 're:a{4294967295}', use: L2, strength: 1}]\n")
    (folder / "bad.toml").write_text('[per-layer-ignores]\n"re:a{4294967295}" = ["G101"]\n')
    return folder


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "plan count.yaml --model digits-cnn",
            3,
            "penalty[1].where: where takes a regular expression; found 'a{4294967295}'",
        ),
        ("fold fine.pt --model digits-cnn -o o.pt --where re:a{4294967295}", 2, "the repetition number is too large"),
        ("measure fine.pt --config bad.toml", 3, "the repetition number is too large"),
        ("measure digits-cnn --batch " + "9" * 5000, 2, "--batch takes positive sizes"),
        ("measure digits-cnn --batch bomb.pt", 3, "its archive would unfold to"),
        ("measure digits-cnn --batch 46341x46340", 2, "--batch takes positive sizes"),
        ("measure digits-cnn --batch wide.pt", 3, "a tensor has 640,000 entries, of which 1 are stored"),
        ("fold square.pt --model digits-cnn -o o.pt", 3, "a tensor has 81 entries, of which 1 are stored"),
        ("fold bomb.pt --model digits-cnn -o o.pt", 3, "its archive would unfold to"),
        ("fold numbers.pt --model digits-cnn -o o.pt", 3, "the key 1 is not text"),
        ("apply orthogonal-init bomb.pt --model digits-cnn -o o.pt", 3, "its archive would unfold to"),
        ("apply orthogonal-init numbers.pt --model digits-cnn -o o.pt", 3, "the key 1 is not text"),
        ("apply orthogonal-init fine.pt --model digits-cnn -o o.pt --seed " + "9" * 30, 2, "'--seed'"),
        ("compare --seeds 99999999999999999999 --dry-run", 2, "'--seeds'"),
        ("compare --first-seed 9223372036854775807 --dry-run", 2, "'--first-seed'"),
    ],
)
def test_it_is_refused_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, message: str
) -> None:
    monkeypatch.chdir(folder)
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, message in result.stderr) == (code, "", True), result.stderr[:500]
    assert len(result.stderr) < 600


@pytest.mark.parametrize(
    "words",
    [
        "apply orthogonal-init long.pt --model digits-cnn -o o.pt",
        "fold long.pt --model digits-cnn -o o.pt",
        "measure long.pt --model digits-cnn",
        "measure fine.pt --config codes.toml",
        "plan rules.yaml --model digits-cnn",
    ],
)
def test_a_message_is_short_whatever_the_file_holds(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(folder)
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, len(result.stderr) < 20_000) == (3, "", True)


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_defect(folder: Path, closed: int) -> None:
    words = [*COMMAND, "measure", str(folder / "fine.pt")]
    result = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=lambda: os.close(closed))
    assert (result.returncode, "conv2" in result.stdout) == (0, closed == 2)
    assert result.stderr == ""


def test_an_encoding_that_lacks_a_character_gets_a_replacement(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "100"}
    words = [*COMMAND, "measure", str(folder / "fine.pt")]
    result = subprocess.run(words, capture_output=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"conv2" in result.stdout
    assert b"?" in result.stdout
