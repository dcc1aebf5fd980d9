"""`gonio measure`."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import get_args

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cli.shell import COMMAND, invoke, write_task
from gonio import models
from gonio.cli.checkpoint import read
from gonio.cli.options import Level
from gonio.cli.progressing import Meter
from gonio.measuring.findings.rules import LEVELS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    torch.save(models.digits_cnn().state_dict(), "fine.pt")
    broken = nn.Linear(4, 3)
    with torch.no_grad():
        broken.weight[1, 2] = torch.nan
    torch.save(broken.state_dict(), "broken.pt")
    return tmp_path


def test_a_model_is_a_table() -> None:
    result = invoke("measure", "digits-cnn")
    assert result.exit_code == 0
    assert result.stderr.startswith("digits-cnn: random weights (seed 0); nothing is downloaded. To measure ")
    assert "conv2" in result.stdout
    assert "random weights (seed 0), not trained ones" in result.stdout
    assert result.stdout == invoke("measure", "digits-cnn", "--seed", "0").stdout
    assert result.stdout != invoke("measure", "digits-cnn", "--seed", "1").stdout


def test_a_checkpoint_and_the_users_own_model(folder: Path) -> None:
    assert "conv2" in invoke("measure", "fine.pt").stdout
    assert "3×64" in invoke("measure", "tiny.py:linear").stdout
    assert "conv2" in invoke("measure", folder / "fine.pt").stdout


def test_json_and_html(folder: Path) -> None:
    content = json.loads(invoke("measure", "digits-cnn", "--json", "-").stdout)
    assert len(content["tensors"]) == 22
    result = invoke("measure", "digits-cnn", "--html", "page.html", "--json", "out.json")
    assert result.stdout == ""
    written = "page written to page.html\nJSON written to out.json\n"
    assert result.stderr.partition("\n")[2] == f"{written}No findings in 5 layers.\n"
    assert Path("page.html").read_text().startswith("<!")
    assert "random weights (seed 0), not trained ones" in Path("page.html").read_text()
    assert "random weights" not in invoke("measure", "fine.pt", "--json", "-").stdout
    assert "random weights" not in invoke("measure", "tiny.py:linear", "--json", "-").stdout


def test_csv_and_markdown(folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(invoke("measure", "digits-cnn", "--csv", "-").stdout)))
    assert len(rows) == 22
    assert {"path", "alignment", "sigma_max"} <= set(rows[0])
    result = invoke("measure", "digits-cnn", "--md", "table.md")
    assert (result.stdout, "markdown written to table.md\n" in result.stderr) == ("", True)
    assert "| conv2 | " in Path("table.md").read_text()


def test_the_operator_norm_is_measured_if_it_is_asked_for() -> None:
    def norms(*words: str) -> list[float | None]:
        read = json.loads(invoke("measure", "digits-cnn", "--json", "-", *words).stdout)
        return [t["operator_norm"] for t in read["tensors"] if t["status"] == "measured"]

    assert norms().count(None) == 3  # the 3×3 convolutions
    assert all(norms("--also", "operator_norm"))
    assert invoke("measure", "digits-cnn", "--also", "anything").exit_code == 2


def test_errors_of_rounding_are_measured_beside_other_figures_on_request() -> None:
    words = ("--also", "quantisation", "--also", "operator_norm", "--json", "-")
    read = json.loads(invoke("measure", "digits-cnn", *words).stdout)
    layers = [t for t in read["tensors"] if t["status"] == "measured"]
    assert all(0 < t["int8_channel_error"] < t["int4_channel_error"] < 1 for t in layers)
    assert all(0 < t["int8_tensor_error"] < t["int4_tensor_error"] < 1 for t in layers)
    assert all(t["operator_norm"] for t in layers)


def test_two_sources_are_what_changed_between_them(folder: Path) -> None:
    state = torch.load("fine.pt")
    state["conv2.weight"] *= 2
    state["extra"] = torch.ones(2)
    state["conv1.weight"] = torch.ones(2, 2)
    torch.save(state, "after.pt")
    result = invoke("measure", "fine.pt", "after.pt")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "fine.pt → after.pt" in result.stdout
    (moved,) = [line.split() for line in result.stdout.splitlines() if line.startswith("conv2")]
    assert moved[2:4] == ["1.00", "2.00"]
    said = " ".join(result.stdout.split())
    assert "extra: only after" in said
    assert "conv1: shape (" in said
    content = json.loads(invoke("measure", "fine.pt", "after.pt", "--json", "-").stdout)
    assert content["schema"] == "gonio.difference/1"
    for option, start in (("--html", "<!DOCTYPE html>"), ("--csv", "name,path,"), ("--md", "**fine.pt → after.pt**")):
        assert invoke("measure", "fine.pt", "after.pt", option, "-").stdout.startswith(start)


def test_a_batch_is_a_shape_or_a_file(folder: Path) -> None:
    torch.save(torch.randn(4, 1, 8, 8), "batch.pt")
    numpy.save("batch.npy", numpy.ones((4, 1, 8, 8), dtype=numpy.float32))
    save_file({"input": torch.randn(4, 1, 8, 8)}, "batch.safetensors")
    for batch in ("4x1x8x8", "batch.pt", "batch.npy", "batch.safetensors"):
        result = invoke("measure", "digits-cnn", "--batch", batch, "--json", "-")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["signals"]
    assert json.loads(invoke("measure", "digits-cnn", "--json", "-").stdout)["signals"] == []


@pytest.mark.parametrize("level", get_args(Level))
def test_a_finding_at_the_level_is_code_1(folder: Path, level: str) -> None:
    result = invoke("measure", "broken.pt", "--fail-on", level)
    assert result.exit_code == 1
    assert "at or above" in result.stderr
    assert "G001" in result.stdout
    assert invoke("measure", "fine.pt", "--fail-on", level).exit_code == 0
    assert invoke("measure", "broken.pt").exit_code == 0


def saved_changes() -> None:
    """A base; one weight changed a little (info: the other is untouched), by more than itself (warn), and backwards."""
    draw = torch.Generator().manual_seed(0)
    base = {f"{name}.weight": torch.randn(20, 30, generator=draw) for name in "ab"}
    step = torch.randn(20, 30, generator=draw)
    for name, size in (("base", 0.0), ("little", 0.1), ("large", 4.0), ("back", -0.1)):
        save_file({**base, "a.weight": base["a.weight"] + size * step}, f"{name}.safetensors")
        if name in ("little", "back"):
            save_file({key: w + size * step for key, w in base.items()}, f"{name}-all.safetensors")


@pytest.mark.parametrize(
    ("others", "levels"),
    [
        ("little-all", ""),
        ("little", "info"),
        ("large", "info warn"),
        ("little-all base", ""),
        ("little-all little", "info"),
        ("little-all large", "info warn"),
        ("little-all back-all", "info warn"),  # of the pair alone
    ],
)
def test_findings_on_changes_of_one_model_and_of_several_count(folder: Path, others: str, levels: str) -> None:
    saved_changes()
    words = ["measure", *(f"{name}.safetensors" for name in ("base", *others.split()))]
    for level in get_args(Level):
        result = invoke(*words, "--fail-on", level)
        assert result.exit_code == (1 if level in levels.split() else 0), (level, result.stderr)
    result = invoke(*words, "--json", "-", "--fail-on", "info")
    assert json.loads(result.stdout)
    assert ("No findings in " in result.stderr) == (not levels)
    assert ("at or above info" in result.stderr) == bool(levels)


def test_the_levels_are_those_of_the_findings() -> None:
    assert get_args(Level) == LEVELS
    assert invoke("measure", "digits-cnn", "--fail-on", "catastrophe").exit_code == 2


def test_progress_off_a_terminal_is_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    show = Meter("measuring", clock=lambda: now)
    for done in range(1, 9):
        now += 4
        show(done, 8)
    assert capsys.readouterr().err.splitlines() == ["measuring: 3 of 8", "measuring: 6 of 8, about 8 s left"]


def on_a_terminal(*words: str, stdout: bool, **environment: str) -> tuple[str, str]:
    """Standard output, and the text on a pseudo-terminal that is stderr and, if `stdout`, standard output too."""
    ours, theirs = pty.openpty()
    out = theirs if stdout else subprocess.PIPE
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=out, stderr=theirs, text=True, env={**clean, "TERM": "xterm-256color", **environment}
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # raised when the other end is closed
        while chunk := os.read(ours, 100_000):
            seen += chunk
    os.close(ours)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, seen
    return said or "", seen.decode()


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar_and_stdout_is_the_same(folder: Path) -> None:
    stdout, seen = on_a_terminal("measure", "fine.pt", "--json", "-", stdout=False)
    assert "measuring" in seen
    assert stdout == invoke("measure", "fine.pt", "--json", "-").stdout


@pytest.mark.slow
def test_a_terminal_gets_colours_unless_they_are_not_wanted(folder: Path) -> None:
    """Red for an error; none with NO_COLOR and none off a terminal, and no escape sequence out of a name."""
    torch.save({"a\x1b]0;owned\x07.weight": torch.full((2, 3), torch.nan)}, "names.pt")
    _, seen = on_a_terminal("measure", "names.pt", stdout=True)
    assert re.search(r"\x1b\[1;(31|91)m *error", seen)
    assert "\x1b]0;" not in seen
    _, plain = on_a_terminal("measure", "names.pt", stdout=True, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain)
    assert "\x1b" not in invoke("measure", "names.pt").stdout


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*COMMAND, "measure", "fine.pt"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


def test_findings_are_seen_beside_a_file_too(folder: Path) -> None:
    result = invoke("measure", "broken.pt", "--json", "-")
    assert json.loads(result.stdout)["findings"]
    assert result.stderr.startswith("1 error in 1 of 1 layer.\nerror G001  weight: 1 of 12 values is NaN")
    torch.save({f"{i}.weight": torch.full((2, 2), torch.nan) for i in range(30)}, "many.pt")
    said = invoke("measure", "many.pt", "--html", "page.html").stderr
    assert (said.count("error G001"), said.endswith("… and 20 more\n")) == (10, True)


def test_a_checkpoint_with_its_model_has_structure_and_signals(folder: Path) -> None:
    result = invoke("measure", "fine.pt", "--model", "digits-cnn", "--json", "-", "--batch", "4x1x8x8")
    assert result.exit_code == 0, result.stderr
    content, bare = json.loads(result.stdout), json.loads(invoke("measure", "fine.pt", "--json", "-").stdout)
    assert content["signals"]
    assert content["scale"] is not None
    weights = [[t["sigma_max"] for t in read["tensors"] if t["path"] == "conv2"] for read in (content, bare)]
    assert weights[0] == weights[1]


def test_a_checkpoint_of_a_recipe_is_measured_with_its_parametrizations(folder: Path) -> None:
    Path("normed.yaml").write_text("name: n\nparametrize:\n  - {where: 'type:Linear', use: WeightNorm}\n")
    invoke("apply", "normed.yaml", "fine.pt", "--model", "digits-cnn", "-o", "normed.pt")
    result = invoke("measure", "normed.pt", "--model", "digits-cnn", "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert "fc1" in {tensor["path"] for tensor in json.loads(result.stdout)["tensors"]}


def test_a_model_of_a_hub_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "models--org--tiny"
    snapshot = folder / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0a1b\n")
    (folder / "blobs").mkdir()
    save_file({"w": torch.ones(3, 4)}, folder / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for command in ("measure", "check"):
        result = invoke(command, "org/tiny", *(["--fail-on", "error"] if command == "check" else []))
        assert result.exit_code == 0, result.stderr
        assert f"org/tiny: the copy in the cache of this machine, {snapshot}" in result.stderr
        assert "1 tensor" in result.stdout
    address = invoke("check", "https://huggingface.co/org/tiny/tree/main")
    assert (address.exit_code, "1 tensor" in address.stdout) == (0, True)
    assert read("org/tiny").state.keys() == {"w"}
    said = invoke("check", "org/other").stderr
    assert f"looked for in {tmp_path}/hub (HF_HOME, HF_HUB_CACHE), where `hf download org/other` puts it" in said
    assert "Nothing is downloaded" in invoke("measure", "org/other").stderr
    (folder / "refs" / "main").write_text("../../..")
    assert "Nothing is downloaded" in invoke("measure", "org/tiny").stderr
