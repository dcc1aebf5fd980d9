"""`gonio plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli.shell import invoke, write_task
from gonio import models
from gonio.recipes import Recipe


@pytest.mark.parametrize("name", ["scale-shift", "switchable-norm-1d"])
def test_it_shows_the_plan(name: str) -> None:
    model = "pointnet" if name.endswith("-1d") else "digits-cnn"
    result = invoke("plan", name, "--model", model)
    assert result.exit_code == 0
    assert result.stdout == f"{Recipe.load(name).plan(models.resolve(model)())}\n"
    assert result.stderr == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    (tmp_path / "bad.yaml").write_text(
        "name: bad\npenalty:\n  - {where: conv*, use: L3, strength: 1}\n  - {use: keep, a: 1}\n"
    )
    (tmp_path / "unmatched.yaml").write_text("name: un\npenalty:\n  - {where: head, use: Orthogonality, strength: 1}\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "syntax.py").write_text("def make(:\n")
    return tmp_path


def test_a_model_of_the_users_own(folder: Path) -> None:
    result = invoke("plan", "orthogonal-init", "--model", "tiny.py:linear")
    assert result.exit_code == 0
    assert "1      Linear  orthogonal_" in result.stdout


@pytest.mark.parametrize(
    ("recipe", "model", "code", "message"),
    [
        ("scaleshift", "digits-cnn", 2, "no recipe named 'scaleshift'. Did you mean scale-shift"),
        ("scale-shift", "digitscnn", 2, "no model named 'digitscnn'. Did you mean digits-cnn"),
        ("missing.yaml", "digits-cnn", 3, "missing.yaml: cannot be read: there is no such file"),
        (".", "digits-cnn", 3, "it is not a regular file"),
        ("bad.yaml", "digits-cnn", 3, "bad.yaml:3: penalty[1].use: there is no name for penalty named 'L3'"),
        ("bad.yaml", "digits-cnn", 3, "bad.yaml:4: penalty[2].a: `keep` takes no options"),
        ("unmatched.yaml", "digits-cnn", 3, "unmatched.yaml:3: rule 1 of penalty (head: Orthogonality(strength=1))"),
        ("tiny.py", "digits-cnn", 3, "tiny.py"),
        ("scale-shift", "tiny.py:no_such", 2, "no function in tiny.py named 'no_such'"),
        ("scale-shift", "tiny.py:no_task", 3, "tiny.py:no_task raised ValueError: no data today"),
        ("scale-shift", "tiny.py:no_model", 2, "must build a model; found a int"),
        ("scale-shift", "missing.py:make", 2, "missing.py"),
        ("scale-shift", "syntax.py:make", 3, "syntax.py:make raised SyntaxError"),
        ("scale-shift", "exits.py:make", 3, "exits.py:make raised SystemExit"),
    ],
)
def test_bad_input_is_one_message_and_a_code(folder: Path, recipe: str, model: str, code: int, message: str) -> None:
    result = invoke("plan", recipe, "--model", model)
    assert message in result.stderr
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_library_that_is_not_installed_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    result = invoke("plan", "scale-shift", "--model", "timm:resnet18")
    assert "pip install 'gonio[models]'" in result.stderr
    assert result.exit_code == 3
