"""Universal checkpoints of DeepSpeed, in the layout that its converter writes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gonio
from bank.files.case import normal
from gonio.errors import UnreadableFileError

WEIGHTS = {"model.embed.weight": normal(48, 16), "model.fc.weight": normal(24, 16), "model.fc.bias": torch.zeros(24)}


def written(folder: Path) -> Path:
    """Weights with Adam's state, and the file of the model's other states beside."""
    for name, value in WEIGHTS.items():
        home = folder / "zero" / name
        home.mkdir(parents=True)
        gradient = normal(*value.shape, seed=3)
        states: dict[str, Tensor] = {"fp32": value, "exp_avg": 0.1 * gradient, "exp_avg_sq": 0.01 * gradient.square()}
        for word, one in states.items():
            torch.save({"param": one.clone(), "cat_dim": 0}, home / f"{word}.pt")
        torch.save(torch.tensor(3.0), home / "step.pt")
    torch.save({"module": {}, "universal_checkpoint_info": {}}, folder / "mp_rank_00_model_states.pt")
    return folder


def test_weights_and_states_are_read(tmp_path: Path) -> None:
    found = gonio.measure(written(tmp_path))
    assert found.notes[0] == "a universal checkpoint of DeepSpeed: its float32 weights"
    assert "the optimizer's state: of 3 parameters" in found.notes
    for name in ("model.embed", "model.fc"):
        assert found[name].frobenius == pytest.approx(float(WEIGHTS[f"{name}.weight"].double().norm()), rel=1e-6)
    checked = gonio.check(tmp_path)
    assert checked.intact
    assert {place.name for place in checked.values() if not place.beside} == set(WEIGHTS)


def test_damaged_weights_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    whole = written(tmp_path) / "zero" / "model.fc.weight" / "fp32.pt"
    whole.write_bytes(whole.read_bytes()[:-40])
    (tmp_path / "zero" / "model.fc.bias" / "exp_avg.pt").write_bytes(pickle.dumps(print))
    checked = gonio.check(tmp_path)
    named = {finding.path for finding in checked.findings if finding.code == "G701"}
    assert named == {"model.fc.weight/fp32.pt", "model.fc.bias/exp_avg.pt"}
    found = gonio.measure(tmp_path)
    assert found["model.embed"].status == "measured"
    assert found["model.fc"].reason == "its file fp32.pt cannot be read"


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    whole = written(tmp_path) / "zero" / "model.embed.weight" / "fp32.pt"
    raw = bytearray(whole.read_bytes())
    raw[len(raw) // 2] ^= 1
    whole.write_bytes(raw)
    assert not gonio.check(tmp_path).intact


def test_a_folder_without_weights_is_none(tmp_path: Path) -> None:
    (tmp_path / "zero" / "a.weight").mkdir(parents=True)
    with pytest.raises(UnreadableFileError, match="it holds no checkpoint"):
        gonio.measure(tmp_path)
