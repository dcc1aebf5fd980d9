"""`gonio doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gonio
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


def test_a_folder_of_a_run_that_kept_nothing_is_named_again(folder: Path) -> None:
    first = invoke("doctor", "scaled.safetensors", "-o", "out")
    assert (first.exit_code, "no checkpoint was written" in first.stderr) == (0, True)
    second = invoke("doctor", "scaled.safetensors", "--model", "net.py:network", "-o", "out")
    assert (second.exit_code, "checkpoint written to" in second.stderr) == (0, True)
    assert json.loads(Path("out/treatment.json").read_text())["recipe"]["steps"][0]["verb"] == "balance_"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("treatment.json", "{}"),
        ("treatment.json", "[1]"),
        ("treatment.json", '{"schema": "gonio.treatment/1", "steps": [{"verdict": "kept"}]}'),
        ("treatment.html", "<p>"),
        ("treated.safetensors", ""),
        ("proofs/0-calibrate/plan.json", "{}"),
    ],
)
def test_no_folder_with_results_or_files_of_others_is_replaced(folder: Path, name: str, content: str) -> None:
    if "/" in name or name.endswith("safetensors"):
        invoke("doctor", "scaled.safetensors", "-o", "out")
    Path("out", name).parent.mkdir(parents=True, exist_ok=True)
    Path("out", name).write_text(content)
    again = invoke("doctor", "scaled.safetensors", "-o", "out")
    assert (again.exit_code, "-o takes a folder for new results, not 'out'" in again.stderr) == (2, True)
    assert Path("out", name).read_text() == content


def test_from_a_file_alone_treatments_are_named(folder: Path) -> None:
    result = invoke("doctor", "scaled.safetensors", "--json", "-", "--fail-on", "warn")
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    verdicts = {step["verb"]: step["verdict"] for step in content["steps"]}
    assert (verdicts["balance_"], set(verdicts.values())) == ("not applied", {"not applied"})
    assert content["recipe"]["steps"] == []
    refused = invoke("doctor", "scaled.safetensors", "--batch", "2x16")
    assert (refused.exit_code, "--batch needs the model of the checkpoint; found" in refused.stderr) == (2, True)


def test_a_base_tells_what_fine_tuning_changed(folder: Path) -> None:
    state = load_file("fine.safetensors")
    save_file({**state, "0.weight": -2 * state["0.weight"]}, "tuned.safetensors")
    options = ("--model", "net.py:network", "--base", "fine.safetensors", "--json", "-")
    content = json.loads(invoke("doctor", "tuned.safetensors", *options).stdout)
    steps = [each for each in content["steps"] if "G502" in each["codes"]]
    assert [step["verb"] for step in steps] == ["shrink_change_", "shrink_intruders_"]
    assert all(step["proof"].startswith("not provable without data") for step in steps)
    refused = invoke("doctor", "tuned.safetensors", "--base", "fine.safetensors")
    assert (refused.exit_code, "--base needs the model of the checkpoint; found" in refused.stderr) == (2, True)


NORMS = """
from torch import nn


def network():
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
    )
"""


@pytest.fixture
def normed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A healthy network, whose statistics are those of data in `data.pt`, far from standard normal numbers."""
    monkeypatch.chdir(tmp_path)
    Path("norms.py").write_text(NORMS, encoding="utf-8")
    torch.manual_seed(0)
    first = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)
    model = nn.Sequential(*first, nn.Linear(16, 3)).eval()
    data = 5 + 2 * torch.randn(256, 8)
    gonio.calibrate_(model, [data])
    model[1].num_batches_tracked.fill_(1)
    model[4].num_batches_tracked.fill_(1)
    torch.save(data, "data.pt")
    save_file(model.state_dict(), "healthy.safetensors")
    return model


def test_random_numbers_are_no_data_for_a_healthy_checkpoint(normed: nn.Module) -> None:
    """With a shape the norms of a healthy network got the statistics of random numbers, which destroyed it."""
    said = invoke("measure", "healthy.safetensors", "--model", "norms.py:network", "--batch", "64x8")
    assert "G410" in said.stdout  # on random numbers the figure is far off, as it must be
    asked = ("doctor", "healthy.safetensors", "--model", "norms.py:network", "--batch")
    for more in ((), ("--unproven",)):
        result = invoke(*asked, "64x8", *more, "--fail-on", "info")
        assert result.exit_code == 0, result.stdout
        assert result.stdout.splitlines() == [
            "healthy.safetensors: Nothing to do: no findings.",
            "  not counted, because the batch is random numbers and no data: G410",
        ]
    assert invoke(*asked, "data.pt").stdout == "healthy.safetensors: Nothing to do: no findings.\n"


def test_nothing_is_averaged_over_random_numbers(normed: nn.Module) -> None:
    with torch.no_grad():
        normed[1].running_var[0] = -1
    save_file(normed.state_dict(), "damaged.safetensors")
    asked = ("doctor", "damaged.safetensors", "--model", "norms.py:network", "--unproven", "--batch")
    refused = invoke(*asked, "64x8", "-o", "out")
    why = "refused: it averages over data, and --batch SHAPE means random numbers; add --task, or --batch FILE"
    assert f"not applied (for G105): {why}" in refused.stdout
    assert not Path("out/treated.safetensors").exists()
    assert json.loads(Path("out/treatment.json").read_text())["recipe"]["steps"] == []
    kept = invoke(*asked, "data.pt")
    assert "Done: calibrate_." in kept.stdout
    assert "calibrate_ of 1: kept (for G105): not proved" in kept.stdout


def test_what_is_seen_on_random_numbers_alone_is_not_guessed_at(normed: nn.Module) -> None:
    with torch.no_grad():
        normed[1].bias.fill_(-300)  # every unit of the ReLU behind it is dead
    save_file(normed.state_dict(), "dead.safetensors")
    asked = ("doctor", "dead.safetensors", "--model", "norms.py:network", "--unproven", "--batch")
    said = invoke(*asked, "64x8").stdout
    assert "found with random numbers, on data it may differ: G408" in said
    assert "even_out_ of 1: not applied (for G408" in said
    assert "refused: its findings are of outputs on random numbers" in said
    assert "Done: even_out_" in invoke(*asked, "data.pt").stdout
    with torch.no_grad():
        normed[3].weight[0] *= 1000  # G104, which is a finding of the weights
    save_file(normed.state_dict(), "both.safetensors")
    both = invoke("doctor", "both.safetensors", *asked[2:], "64x8").stdout
    assert "even_out_ of 3: " in both
    assert "even_out_ of 1" not in both


def test_equal_lines_are_one_that_names_the_layers(normed: nn.Module) -> None:
    with torch.no_grad():
        normed[0].weight[:3] = 0
        normed[3].weight[:3] = 0
    save_file(normed.state_dict(), "dead.safetensors")
    said = invoke("doctor", "dead.safetensors", "--model", "norms.py:network", "--batch", "data.pt").stdout
    lines = [line for line in said.splitlines() if line.startswith("  gonio.lab.retrain_")]
    assert len(lines) == 1
    assert lines[0].startswith("  gonio.lab.retrain_ of 0, 3")
    assert lines[0].endswith("not provable without data: add --task, whose training data it takes")
    assert "apply_unproven" not in said
    assert callable(gonio.lab.retrain_)


def test_the_exit_code_is_that_of_fail_on_alone(normed: nn.Module) -> None:
    with torch.no_grad():
        normed[0].weight[:3] = 0
    save_file(normed.state_dict(), "dead.safetensors")
    asked = ("doctor", "dead.safetensors", "--model", "norms.py:network")
    options = ((), ("--fail-on", "error"), ("--fail-on", "warn"))
    assert [invoke(*asked, *more).exit_code for more in options] == [0, 0, 1]


@pytest.mark.parametrize("name", ["adapter", "adapter/adapter_model.safetensors"])
def test_an_adapter_is_no_whole_model(name: str, normed: nn.Module) -> None:
    Path("adapter").mkdir()
    low = {"lora_A": torch.randn(2, 8), "lora_B": torch.randn(16, 2)}
    save_file({f"base_model.model.0.{k}.weight": t for k, t in low.items()}, "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    Path("adapter/adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    refused = invoke("doctor", name, "--model", "norms.py:network")
    assert refused.exit_code == 3
    assert "it holds an adapter of 1 layer (0), and --model is for a whole model. Merge the adapter" in refused.stderr
    save_file({"act.alpha": torch.ones(1)}, "other.safetensors")
    other = invoke("doctor", "other.safetensors", "--model", "norms.py:network")
    assert (other.exit_code, "adapter" in other.stderr, "another architecture" in other.stderr) == (3, False, True)
