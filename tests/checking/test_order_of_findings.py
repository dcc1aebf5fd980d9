"""Findings of a check are listed along the depth of the model, as measuring lists its layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import gonio

NAMES = [f"layers.{number}.fc.weight" for number in (0, 1, 2, 9, 10, 11)]


def _broken(names: list[str]) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 4), float("nan")) for name in names}


def _paths(source: Path) -> list[str]:
    return [finding.path for finding in gonio.check(source).findings if finding.code == "G001"]


def test_numbers_in_names_are_numbers(tmp_path: Path) -> None:
    save_file(_broken(NAMES), tmp_path / "model.safetensors")  # which sorts names by the alphabet
    found = _paths(tmp_path / "model.safetensors")
    assert found == [name.removesuffix(".weight") for name in NAMES]
    measured = gonio.measure(tmp_path / "model.safetensors").findings
    assert found == [finding.path for finding in measured if finding.code == "G001"]


def test_shards_follow_each_other_by_name(tmp_path: Path) -> None:
    parts = {"model-00001-of-00002.safetensors": NAMES[4:], "model-00002-of-00002.safetensors": NAMES[:4]}
    for shard, names in parts.items():
        save_file(_broken(names), tmp_path / shard)
    placed = {name: shard for shard, names in parts.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert _paths(tmp_path) == [name.removesuffix(".weight") for name in NAMES]


def test_the_order_of_a_model_stays(tmp_path: Path) -> None:
    names = ["stem.weight", "body.weight", "neck.weight"]
    torch.save(_broken(names), tmp_path / "model.pt")
    assert _paths(tmp_path / "model.pt") == ["stem", "body", "neck"]
