"""Healthy checkpoints as other programs write them are not called damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gonio

State = dict[str, Tensor]


def lightning(score: float) -> dict[str, object]:
    """What Lightning 2.6.6 saves: `ModelCheckpoint` without a monitored metric keeps an infinite score."""
    model = nn.Linear(6, 4)
    kept = {"monitor": None, "best_model_score": None, "kth_value": torch.tensor(score)}
    return {
        "epoch": 1,
        "state_dict": model.state_dict(),
        "callbacks": {"ModelCheckpoint{'monitor': None}": kept},
        "optimizer_states": [torch.optim.AdamW(model.parameters()).state_dict()],
    }


@pytest.mark.parametrize("score", [float("inf"), -float("inf"), float("nan")])
def test_the_score_of_a_callback_is_no_damage(score: float, tmp_path: Path) -> None:
    torch.save(lightning(score), tmp_path / "last.ckpt")
    found = gonio.check(tmp_path / "last.ckpt")
    assert [(f.code, f.level) for f in found.findings] == [("G001", "info")]
    assert found.intact


def test_a_number_of_the_model_or_of_an_optimizer_is_damage_all_the_same() -> None:
    content = lightning(0.0)
    model = content["state_dict"]
    assert isinstance(model, dict)
    model["scale"] = torch.tensor(torch.inf)
    assert [(f.level, f.path) for f in gonio.check(content).findings] == [("error", "scale")]
    del model["scale"]
    states = {0: {"step": torch.tensor(torch.nan), "exp_avg": torch.ones(4, 6), "exp_avg_sq": torch.ones(4, 6)}}
    content["optimizer_states"] = [{"state": states, "param_groups": [{"params": [0, 1]}]}]
    assert ("error", "G001") in {(f.level, f.code) for f in gonio.check(content).findings}


def four_bits(storage: torch.dtype) -> State:
    """As bitsandbytes 0.50.2 writes a weight of 4 bits, `bnb_4bit_quant_storage` being this dtype."""
    codes = torch.tensor([0x7F, 0xC1, 0xFF, 0x7F] * 32, dtype=torch.uint8)  # NaN, if it is read as bfloat16
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 64]}
    described = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    return {
        "q.weight": codes.view(storage).unsqueeze(1),
        "q.weight.absmax": torch.rand(4) + 0.5,
        "q.weight.quant_map": torch.linspace(-1, 1, 16),
        "q.weight.quant_state.bitsandbytes__nf4": described,
        "norm.weight": torch.ones(64),
    }


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["model.safetensors", "model.pt", "memory"])
def test_packed_codes_that_are_stored_as_floats_are_no_values(storage: torch.dtype, kind: str, tmp_path: Path) -> None:
    state = four_bits(storage)
    if kind.endswith(".safetensors"):
        save_file(state, tmp_path / kind)
    elif kind.endswith(".pt"):
        torch.save(state, tmp_path / kind)
    found = gonio.check(state if kind == "memory" else tmp_path / kind)
    assert found.intact, found.findings
    assert "checked as integers (packed weights, indices, counters): 2 tensors" in found.notes
    packed = found["q"]
    assert (packed.integers, packed.norm, packed.dtype) == (True, None, str(storage).removeprefix("torch."))
    changed = dict(state)
    changed["q.weight"] = (state["q.weight"].view(torch.uint8) ^ 1).view(storage)
    assert found.fingerprints["tensors"]["q.weight"] != gonio.check(changed).fingerprints["tensors"]["q.weight"]


def test_floats_beside_the_description_of_another_weight_are_values() -> None:
    state = four_bits(torch.uint8)
    state["k.weight"] = torch.full((4, 4), torch.nan)
    assert (gonio.check(state).findings[0].level, gonio.check(state).findings[0].path) == ("error", "k")
