"""`gonio doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cli.shell import invoke

FACTORY = """
from torch import nn


def network():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FACTORY, encoding="utf-8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    save_file(model.state_dict(), "fine.safetensors")
    with torch.no_grad():
        model[0].weight[0] *= 1000
        model[0].bias[0] *= 1000
        model[2].weight[:, 0] /= 1000
    save_file(model.state_dict(), "scaled.safetensors")
    return tmp_path


def test_a_treated_checkpoint_its_steps_and_a_page(folder: Path) -> None:
    before = Path("scaled.safetensors").read_bytes()
    result = invoke("doctor", "scaled.safetensors", "--model", "net.py:network", "-o", "out", "--fail-on", "warn")
    assert (result.exit_code, "balance_: kept (for G104" in result.stdout) == (0, True)
    assert {path.name for path in Path("out").iterdir()} == {"treated.safetensors", "treatment.json", "treatment.html"}
    assert json.loads(Path("out/treatment.json").read_text())["recipe"]["steps"][0]["verb"] == "balance_"
    assert Path("scaled.safetensors").read_bytes() == before
    old, new = load_file("scaled.safetensors"), load_file("out/treated.safetensors")
    x = torch.randn(8, 16, dtype=torch.float64)
    outputs = [
        torch.relu(x @ s["0.weight"].double().T + s["0.bias"]) @ s["2.weight"].double().T + s["2.bias"]
        for s in (old, new)
    ]
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-4)
    assert not torch.equal(old["0.weight"], new["0.weight"])
    again = invoke("doctor", "out/treated.safetensors", "--model", "net.py:network", "-o", "out")
    assert again.exit_code == 2
    assert "-o takes a folder for new results, not 'out'; found treated.safetensors, treatment.json" in again.stderr


def test_a_healthy_checkpoint_gets_nothing(folder: Path) -> None:
    result = invoke("doctor", "fine.safetensors", "--model", "net.py:network", "-o", "out", "--fail-on", "info")
    assert (result.exit_code, result.stdout) == (0, "fine.safetensors: Nothing to do: no findings.\n")
    assert "no checkpoint was written" in result.stderr
    assert not Path("out/treated.safetensors").exists()


def test_from_a_file_alone_treatments_are_named(folder: Path) -> None:
    result = invoke("doctor", "scaled.safetensors", "--json", "-", "--fail-on", "warn")
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    verdicts = {step["verb"]: step["verdict"] for step in content["steps"]}
    assert (verdicts["balance_"], set(verdicts.values())) == ("not applied", {"not applied"})
    assert content["recipe"]["steps"] == []
    refused = invoke("doctor", "scaled.safetensors", "--batch", "2x16")
    assert (refused.exit_code, "--batch takes a model; found a file alone" in refused.stderr) == (2, True)


def test_a_base_tells_what_fine_tuning_changed(folder: Path) -> None:
    state = load_file("fine.safetensors")
    save_file({**state, "0.weight": -2 * state["0.weight"]}, "tuned.safetensors")
    options = ("--model", "net.py:network", "--base", "fine.safetensors", "--json", "-")
    content = json.loads(invoke("doctor", "tuned.safetensors", *options).stdout)
    steps = [each for each in content["steps"] if "G502" in each["codes"]]
    assert [step["verb"] for step in steps] == ["shrink_change_", "shrink_intruders_"]
    assert all(step["proof"].startswith("not provable without data") for step in steps)
    refused = invoke("doctor", "tuned.safetensors", "--base", "fine.safetensors")
    assert (refused.exit_code, "--base takes a model; found a file alone" in refused.stderr) == (2, True)
