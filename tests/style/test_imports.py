"""Imports go one way: the contract in pyproject.toml, held by import-linter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from style.source import ROOT

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter as its command does, in a process of its own: it changes sys.path."""
    command = [sys.executable, "-c", LINT, "--config", str(config), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_imports_go_down() -> None:
    result = lint(ROOT, ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("lower", "kept"), [("", True), ("from tower.roof import top", False)])
def test_the_linter_sees_an_upward_import(tmp_path: Path, lower: str, kept: bool) -> None:
    package = tmp_path / "tower"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "roof.py").write_text("top = 1\n", encoding="utf-8")
    (package / "ground.py").write_text(f"{lower}\n", encoding="utf-8")
    config = tmp_path / "contract.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "tower"\n[[tool.importlinter.contracts]]\n'
        'name = "down"\ntype = "layers"\ncontainers = ["tower"]\nlayers = ["roof", "ground"]\n',
        encoding="utf-8",
    )
    result = lint(tmp_path, config)
    assert (result.returncode == 0) is kept, result.stdout + result.stderr
