"""What is wrong with the files of a model is a finding of `measure` too, in the words of `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gonio
from catalog import seeded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index."""
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    save_file({"a.weight": seeded(8, 8)}, tmp_path / first)
    save_file({"b.weight": seeded(8, 8, seed=1)}, tmp_path / second)
    index = {"metadata": {}, "weight_map": {"a.weight": first, "b.weight": second}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def found(findings: tuple[gonio.measuring.Finding, ...]) -> set[tuple[str, str, str, str]]:
    return {(finding.code, finding.level, finding.path, finding.found) for finding in findings}


def test_a_whole_model_has_none(folder: Path) -> None:
    assert gonio.measure(folder).findings == ()


@pytest.mark.parametrize("fault", ["shard missing", "shard damaged", "tensor missing"])
def test_both_say_the_same(folder: Path, fault: str) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    if fault == "shard missing":
        shard.unlink()
    elif fault == "shard damaged":
        shard.write_bytes(shard.read_bytes()[:20])
    else:
        save_file({"other": seeded(8, 8)}, shard)
    measured = gonio.measure(folder)
    checked = {one for one in found(gonio.check(folder).findings) if one[0] in ("G701", "G702", "G703")}
    told = {(code, level, path) for code, level, path, _ in found(measured.findings)}
    assert told == {(code, level, path) for code, level, path, _ in checked} != set()
    assert "No findings" not in measured.verdict
    if fault != "shard damaged":  # there each reader says what it could not read
        assert found(measured.findings) == checked


def test_what_is_no_tensor_is_where_the_index_places_it(tmp_path: Path) -> None:
    """The reader's own reason is told, of the shard as of the file alone."""
    torch.save({"a.weight": seeded(8, 8), "b": 3, "epoch": 7}, tmp_path / "s1.bin")
    index = {"weight_map": {"a.weight": "s1.bin", "b": "s1.bin"}}
    (tmp_path / "model.bin.index.json").write_text(json.dumps(index))
    measured = gonio.measure(tmp_path / "model.bin.index.json")
    assert measured["b"].reason == gonio.measure(tmp_path / "s1.bin")["b"].reason == "not a tensor but int"
    assert measured.findings == ()
    assert gonio.check(tmp_path / "model.bin.index.json").findings == ()


def test_what_a_shard_holds_beside_its_tensors_is_told(tmp_path: Path) -> None:
    """Notes, other objects and the states of optimizers of two files are those of the whole."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(seeded(2, 8, dtype=torch.float32)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s1.bin")
    torch.save({"c.weight": seeded(4, 4)}, tmp_path / "s2.bin")
    placed = {"weight": "s1.bin", "bias": "s1.bin", "c.weight": "s2.bin"}
    (tmp_path / "model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    found, alone = gonio.measure(tmp_path / "model.bin.index.json"), gonio.measure(tmp_path / "s1.bin")
    assert [row.name for row in found.optimizer] == [row.name for row in alone.optimizer] != []
    assert set(alone.notes) <= set(found.notes)


@pytest.mark.parametrize("reads", ["measure", "measure of a state dict", "check", "doctor"])
def test_storages_of_a_model_can_still_be_resized(reads: str) -> None:
    """As FSDP does to free weights; that of a tensor that NumPy has seen cannot."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), seeded(4, 8)
    calls = {
        "measure": lambda: gonio.measure(model, batch=x),
        "measure of a state dict": lambda: gonio.measure(model.state_dict()),
        "check": lambda: gonio.check(model.state_dict()),
        "doctor": lambda: gonio.doctor(model, batch=x),
    }
    calls[reads]()
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())
