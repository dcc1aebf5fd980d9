"""`gonio check` of several checkpoints, of results that cannot be written, and of files that are no fingerprints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cli.shell import invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a.weight": torch.eye(8)}, tmp_path / "good.safetensors")
    save_file({"a.weight": torch.full((8, 8), torch.nan)}, tmp_path / "nan.safetensors")
    (tmp_path / "junk.pt").write_bytes(b"x" * 100)
    return tmp_path


def test_one_that_cannot_be_read_does_not_stop_the_others(folder: Path) -> None:
    words = [str(folder / name) for name in ("junk.pt", "good.safetensors", "absent.pt", "nan.safetensors")]
    result = invoke("check", *words)
    assert result.exit_code == 3
    assert "Intact: 1 tensor is there" in result.stdout
    assert "64 of 64 values are NaN" in result.stdout
    assert "junk.pt': cannot be read" in result.stderr
    assert "absent.pt': cannot be read" in result.stderr
    assert "2 of 4 checkpoints cannot be read" in result.stderr


def test_the_export_holds_those_that_were_read(folder: Path) -> None:
    result = invoke("check", str(folder / "junk.pt"), str(folder / "good.safetensors"), "--json", "-")
    held = json.loads(result.stdout)
    assert result.exit_code == 3
    assert [each["source"] for each in held] == [str(folder / "good.safetensors")]


def test_one_alone_is_refused_as_before(folder: Path) -> None:
    result = invoke("check", str(folder / "junk.pt"), "--json", "-")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "checkpoints cannot be read" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is full")
@pytest.mark.parametrize("option", ["--json", "--save"])
def test_a_result_that_cannot_be_written_names_its_file(option: str, folder: Path) -> None:
    result = invoke("check", str(folder / "good.safetensors"), option, "/dev/full")
    assert result.exit_code == 3
    assert result.stderr.strip() == "gonio: /dev/full: No space left on device"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "float32", "shape": [8, 8], "hash": {}},
        {"dtype": "float32", "shape": ["8", [8]], "hash": "ab"},
        {"dtype": ["float32"], "shape": [8, 8], "hash": "ab"},
    ],
)
def test_fingerprints_of_other_types_are_refused(entry: dict[str, object], folder: Path) -> None:
    (folder / "prints.json").write_text(json.dumps({"schema": "gonio.fingerprint/1", "tensors": {"a.weight": entry}}))
    result = invoke("check", str(folder / "good.safetensors"), "--against", str(folder / "prints.json"))
    assert result.exit_code == 3
    assert "it holds no fingerprints" in result.stderr
