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


def test_a_model_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    result = invoke("plan", "orthogonal-init", "--model", "tiny.py:linear")
    assert result.exit_code == 0
    assert "1      Linear  orthogonal_" in result.stdout


def test_a_library_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    result = invoke("plan", "scale-shift", "--model", "timm:resnet18")
    assert 'pip install "gonio[models]" (in a clone: pip install -e ".[models]")' in result.stderr
    assert result.exit_code == 3
