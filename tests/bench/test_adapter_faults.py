"""Planted faults of adapters: the committed result reaches its bars, and a fault changes what it says it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.adapter_faults import FAULTS, RESULT, WAYS, alarms
from safetensors.torch import load_file, save_file

FOUND = json.loads(RESULT.read_text(encoding="utf-8"))
BASE = {f"layers.{i}.up.weight": torch.randn(24, 16, generator=torch.Generator().manual_seed(i)) for i in range(5)}


def test_adapters_in_order_have_no_warning_and_planted_faults_are_found() -> None:
    assert len(FOUND["healthy"]) >= 60
    assert {kind["kind"] for kind in FOUND["healthy"]} >= {"LoRA", "rsLoRA", "DoRA", "PiSSA", "AdaLoRA", "OFT"}
    assert [one["alarms"] for one in FOUND["healthy"] if any(one["alarms"].values())] == []
    seen = [one for one in FOUND["faults"] if one["fault"] not in FOUND["hidden"]]
    assert len(seen) >= 200
    assert sum(bool(one["found"]) for one in seen) >= 0.95 * len(seen)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A LoRA adapter of five layers."""
    draw = torch.Generator().manual_seed(9)
    state = {}
    for name in BASE:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        state[f"{path}.lora_A.weight"] = torch.randn(4, 16, generator=draw) / 4
        state[f"{path}.lora_B.weight"] = torch.randn(24, 4, generator=draw) / 40
    save_file(state, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_an_adapter_in_order_has_no_alarm(folder: Path) -> None:
    assert [alarms(folder, BASE, way) for way in WAYS] == [set()] * 3


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.hidden and "OFT" not in f.name], ids=lambda f: f.name)
def test_a_fault_is_found(fault: object, folder: Path) -> None:
    before = load_file(folder / "adapter_model.safetensors")
    fault.plant(folder)  # type: ignore[attr-defined]
    assert len(before) == 10
    assert any(alarms(folder, BASE, way) for way in WAYS)
