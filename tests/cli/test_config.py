"""The configuration file of `gonio measure`: where it is found, what it suppresses, how its mistakes are said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from cli.shell import invoke


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with two weights that are 0, in a folder below a root without configuration."""
    inner = tmp_path / "project" / "runs"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for layer in made:
        nn.init.zeros_(layer.weight)
    torch.save(made.state_dict(), "zero.pt")
    return inner


def paths(*words: str) -> list[str]:
    result = invoke("measure", "zero.pt", "--json", "-", *words)
    assert result.exit_code == 0, result.stderr
    return [finding["path"] for finding in json.loads(result.stdout)["findings"]]


def test_the_nearest_file_upward_counts(folder: Path) -> None:
    assert paths() == ["0", "1"]
    Path("../../pyproject.toml").write_text('[tool.gonio]\nignore = ["G101"]\n')
    assert paths() == []
    Path("../pyproject.toml").write_text('[project]\nname = "other"\n')  # without a table for gonio: looked past
    assert paths() == []
    Path("../pyproject.toml").write_text('[tool.gonio.per-layer-ignores]\n"0" = ["G101"]\n')
    assert paths() == ["1"]
    Path("../gonio.toml").write_text('[per-layer-ignores]\n"1" = ["G101"]\n')  # before pyproject.toml beside it
    assert paths() == ["0"]
    Path("gonio.toml").write_text("")  # an empty one says: nothing here is suppressed
    assert paths() == ["0", "1"]


def test_a_named_file_replaces_the_nearest(folder: Path) -> None:
    Path("gonio.toml").write_text('ignore = ["G101"]\n')
    Path("strict.toml").write_text("")
    assert paths("--config", "strict.toml") == ["0", "1"]


def test_the_option_joins_the_file(folder: Path) -> None:
    assert paths("--ignore", "G101") == []
    assert paths("--ignore", "g202,G101", "--ignore", "G301") == []
    Path("../gonio.toml").write_text('[per-layer-ignores]\n"1" = ["G101"]\n')
    result = invoke("measure", "zero.pt", "--ignore", "G102")
    said = f"1 finding suppressed by {Path('..') / 'gonio.toml'} and --ignore"
    assert said in result.stdout
    assert "suppresses it: G102." in " ".join(result.stdout.split())


def test_fail_on_does_not_see_what_is_suppressed(folder: Path) -> None:
    assert invoke("measure", "zero.pt", "--fail-on", "info").exit_code == 1
    Path("gonio.toml").write_text('[per-layer-ignores]\n"0" = ["G101"]\n')
    assert "1 finding at or above info" in invoke("measure", "zero.pt", "--fail-on", "info").stderr
    Path("gonio.toml").write_text('ignore = ["G101"]\n')
    assert invoke("measure", "zero.pt", "--fail-on", "info").exit_code == 0


def test_types_select_layers_of_a_model(folder: Path) -> None:
    Path("gonio.toml").write_text('[per-layer-ignores]\n"type:Linear" = ["G101"]\n')
    Path("made.py").write_text(
        "from torch import nn\n\ndef zero():\n    m = nn.Linear(3, 2)\n    nn.init.zeros_(m.weight)\n    return m\n"
    )
    result = invoke("measure", "made.py:zero")
    assert "No findings in 1 layer." in result.stdout
    assert "1 finding suppressed by gonio.toml" in result.stdout


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("ignores = []", ["the file has no key 'ignores'; did you mean ignore"]),
        ("[tool.gonio]\nignore = []", ["in gonio.toml the keys stand at the top"]),
        ("colour = 1", ["no key 'colour'; its keys are ignore, per-layer-ignores"]),
        ('ignore = "G101"', ["ignore must be a list of rule codes"]),
        ("ignore = [101]", ["ignore must be a list of rule codes"]),
        ('ignore = ["G10"]', ["no rule named 'G10'. Did you mean G"]),
        ('per-layer-ignores = ["G101"]', ["per-layer-ignores must be a table of selectors"]),
        ('[per-layer-ignores]\nhead = "G101"', ['per-layer-ignores."head" must be a list of rule codes']),
        ('[per-layer-ignores]\n"" = ["G101"]', ["use ignore for the whole model"]),
        ('[per-layer-ignores]\n"re:(" = ["G101"]', ["where takes a regular expression"]),
        ("ignore = [", ["it is not valid TOML"]),
        ("ignore = 1\nignores = 2", ["no key 'ignores'", "ignore must be a list of rule codes"]),
    ],
)
def test_mistakes_are_said_all_at_once(folder: Path, content: str, messages: list[str]) -> None:
    Path("gonio.toml").write_text(content)
    result = invoke("measure", "zero.pt")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "gonio.toml' is invalid" in result.stderr
    for message in messages:
        assert message in result.stderr
