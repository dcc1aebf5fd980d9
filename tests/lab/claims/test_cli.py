"""`gonio reproduce` as a command: what it lists, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.shell import invoke, shell
from gonio.lab.claims import claim_names

CLAIM = """
name: tiny
seed: "002"
claim: Every step multiplies the norm of v by the square root of 1 + c².
source: A paper.
measure: norm_growth_error
direction: same
sesoi: 0.01
scope: identity
quick:
  model: {name: deep-mlp, depth: 1, width: 8}
  arms: [{name: weight-norm, recipe: {parametrize: [{where: "type:Linear", use: WeightNorm}]}}]
  contrast: {weight-norm: 1.0}
  seeds: 3
"""


@pytest.fixture
def claim(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CLAIM, encoding="utf-8")
    return str(path)


def test_a_claim_file_is_tried_resumed_and_exported(claim: str, tmp_path: Path) -> None:
    words = ["reproduce", claim, "--jobs", "2", "-o", str(tmp_path / "out"), "--json", str(tmp_path / "all.json")]
    first, second = shell(*words), shell(*words)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "1 claim tried on this machine: identities: 1 holds" in first.stdout
    assert first.stdout == second.stdout
    assert (tmp_path / "out" / "claims.html").is_file()
    data = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert len(data["claims"][0]["evidence"]["values"]) == 3
    assert shell("report", str(tmp_path / "out" / "tiny"), "--json", "-").returncode == 0


def test_every_claim_is_listed_and_explained() -> None:
    listed = invoke("reproduce", "--list").stdout
    assert all(name in listed for name in claim_names())
    assert invoke("list", "claims").stdout.count("\n") == len(claim_names())
    text = invoke("explain", "gain-tanh").stdout
    assert "Saxe" in text
    assert "gonio reproduce gain-tanh" in text


def test_a_dry_run_trains_nothing_to_the_end(claim: str, tmp_path: Path) -> None:
    found = shell("reproduce", claim, "--dry-run", "-o", str(tmp_path / "out"))
    assert found.returncode == 0
    assert "tiny: 1 arms × 3 seeds" in found.stdout
    assert not (tmp_path / "out").exists()
