"""The metadata of the distributions, the workflows, and the action for other repositories."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import versions
from docs.pages import ROOT

ACTION = ROOT / ".github" / "actions" / "gonio-check"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PLACE = "https://example.org/someone/gonio"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata(hook: ModuleType, config: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    hook.CustomMetadataHook(str(ROOT), config).update(made)
    return made


def test_the_published_readme_has_absolute_links(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GONIO_REPOSITORY", raising=False)
    made = metadata(hook, {"repository": PLACE + "/"})
    targets = re.findall(r"\]\(([^)\s]+)\)", made["readme"]["text"])
    assert len(targets) > 10
    assert all(target.startswith(("https://", "http://", "#")) for target in targets)
    pictures = re.findall(r'\b(?:src|srcset)="([^"]+)"', made["readme"]["text"])
    assert len(pictures) == 2
    assert all(picture.startswith(f"{PLACE}/raw/v") for picture in pictures)
    assert f"({PLACE}/blob/v" in made["readme"]["text"]
    assert made["urls"]["Repository"] == PLACE


def test_the_variable_replaces_the_address(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GONIO_REPOSITORY", PLACE)
    assert metadata(hook, {})["urls"]["Repository"] == PLACE
    monkeypatch.delenv("GONIO_REPOSITORY")
    unset = metadata(hook, {"repository": ""})
    assert unset["urls"] == {}
    assert unset["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")


def test_badges_are_of_workflows_that_exist(hook: ModuleType) -> None:
    text = metadata(hook, {"repository": PLACE})["readme"]["text"]
    badges = re.findall(r"\[!\[(\w+)\]\((\S+)/badge\.svg\)\]\((\S+)\)", text)
    assert len(badges) == 2
    assert text.startswith("# gonio\n\n[![Tests](")
    for name, picture, target in badges:
        assert picture == target == f"{PLACE}/actions/workflows/{name.lower()}.yml"
        assert (
            yaml.safe_load((ROOT / ".github" / "workflows" / f"{name.lower()}.yml").read_text("utf-8"))["name"] == name
        )
    assert "badge.svg" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_which_links_are_made_absolute(hook: ModuleType) -> None:
    text = "[a](b.md#c) ![d](e.svg) [f](https://g.org) [h](#i) [j [k]](l) [m](mailto:n)"
    found = hook.absolute(text, PLACE, "v1").replace(PLACE, "P")
    assert (
        found
        == "[a](P/blob/v1/b.md#c) ![d](P/raw/v1/e.svg) [f](https://g.org) [h](#i) [j [k]](P/blob/v1/l) [m](mailto:n)"
    )
    picture = (
        '<picture><source media="x" srcset="a.png"><img src="b.png" alt="c"></picture> <img src="https://d.org/e.png">'
    )
    assert hook.absolute(picture, PLACE, "v1").replace(PLACE, "P") == (
        '<picture><source media="x" srcset="P/raw/v1/a.png"><img src="P/raw/v1/b.png" alt="c"></picture> '
        '<img src="https://d.org/e.png">'
    )


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION / "action.yml"], ids=lambda path: path.stem)
def test_a_workflow_is_yaml_and_names_no_host_of_packages(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    assert not re.findall(r"pypi\.org|pythonhosted|download\.pytorch|--(?:extra-)?index-url", text)


def test_make_targets_of_workflows_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    named = {*re.findall(r"run: make ([\w-]+)", text), *re.findall(r"[\w-]+", re.findall(r"target: \[(.*)\]", text)[0])}
    assert named >= {"arithmetic", "wheel", "site", "soak"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    assert named <= targets, f"the Makefile lacks {named - targets}"


def test_the_folders_that_make_versions_tests_exist() -> None:
    assert not [name for name in versions.TESTED if not (ROOT / "tests" / name).exists()]


def test_the_oldest_python_is_that_of_the_classifiers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minors = [int(line.rpartition(".")[2]) for line in project["classifiers"] if ":: Python :: 3." in line]
    assert project["requires-python"] == f">=3.{min(minors)}"
    versions = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]["versions"]
    assert {f"3.{minor}" for minor in minors} <= set(versions["strategy"]["matrix"]["python"])


@pytest.mark.skipif(shutil.which("bash") is None or os.name == "nt", reason="the action's script needs bash")
@pytest.mark.parametrize(("level", "code"), [pytest.param("error", 1, marks=pytest.mark.slow), ("never-seen", 2)])
def test_the_action_fails_on_a_finding(level: str, code: int, tmp_path: Path) -> None:
    """Its script with the variables that the runner sets: exit code, summary and outputs."""
    model = nn.Linear(4, 4)
    model.weight.data[0, 0] = float("nan")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    files = {name: str(tmp_path / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    inputs = {"SOURCE": "w.pt", "ARGUMENTS": "--ignore\nG102\n", "FAIL_ON": level, "RUNNER_TEMP": str(tmp_path)}
    environment = os.environ | files | inputs | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(ACTION / "measure.sh")], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "html=" in (tmp_path / "GITHUB_OUTPUT").read_text(encoding="utf-8")
    if code == 1:
        assert "G001" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8")
        assert (tmp_path / "gonio-check" / "figures.json").stat().st_size > 100
