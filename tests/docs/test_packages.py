"""The notebook that installs gonio is that of the gallery and runs, and programs of the pages find the names that they
import; the conda recipe requires what the wheel does, and CONTRIBUTING.md has a reason for each package."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import yaml

import gonio
from docs.pages import ROOT

RECIPE = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = DECLARED["project"]
CONDA = {"torch": "pytorch"}  # packages of another name


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("build_notebook", ROOT / "docs" / "build_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_is_that_of_the_gallery() -> None:
    assert builder().main(["--check"]) == 0


def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    content = json.loads((ROOT / "docs" / "examples" / "gonio.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "gonio-0.0.0-py3-none-any.whl").touch()
    names: dict[str, Any] = {}
    for cell in code:
        exec("\n".join(line for line in cell.splitlines() if not line.startswith("%")), names)
    assert names["wheel"] == "gonio-0.0.0-py3-none-any.whl"
    assert "warn G102 conv2" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_a_program_of_the_pages_finds_its_names(path: Path) -> None:
    assert runpy.run_path(str(path), run_name=path.stem)


def test_the_recipe_has_the_version_and_the_requirements_of_the_wheel() -> None:
    assert RECIPE["context"]["version"] == gonio.__version__
    wanted = {f"python {PROJECT['requires-python']}"}
    for each in PROJECT["dependencies"]:
        name, _, least = each.partition(">=")
        wanted.add(f"{CONDA.get(name, name)} >={least}")
    assert set(RECIPE["requirements"]["run"]) == wanted
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    (entry,) = (f"{name} = {where}" for name, where in PROJECT["scripts"].items())
    assert RECIPE["build"]["python"]["entry_points"] == [entry]


def test_the_table_of_dependencies_has_each_package_with_its_group() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Dependencies")[2]
    told: set[tuple[str, str]] = set()
    for cell in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]:
        for names, group in re.findall(r"([\w\-, ]+?)(?: \(`(\w+)`\)|$)", cell):
            told |= {(name.lower(), group) for name in names.strip(", ").split(", ")}
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"], **DECLARED["dependency-groups"]}
    assert told == {
        (found[0].lower(), group)
        for group, packages in groups.items()
        for package in packages
        if isinstance(package, str) and (found := re.match(r"[\w-]+", package)) and found[0] != "gonio"
    }
