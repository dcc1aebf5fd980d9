"""Heads and wasted L2 of checkpoints of transformers, by their config.json, against those of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gonio
from bank.live.transformers_models import MODELS
from gonio.errors import InvalidArgumentError
from gonio.measuring.figures.heads import ON_BATCH
from surgery.test_planned import saved

FAMILIES = (
    "BERT", "RoBERTa", "GPT-2", "OPT", "BLOOM", "Falcon", "Llama", "Llama, tied", "Mistral", "Qwen3", "Gemma 2",
    "Phi-3",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Llama" else pytest.mark.slow) for name in FAMILIES]
)
def test_a_checkpoint_wastes_what_its_model_wastes(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    found = gonio.measure(tmp_path, extra_figures=("blocks",))
    shown = gonio.measure(model, batch=MODELS[name][3]())
    without = dict.fromkeys(ON_BATCH)
    assert found.heads == tuple(replace(head, **without) for head in shown.heads)
    assert len(found.heads) >= 8
    assert found.scale is not None
    assert shown.scale is not None
    pairs = {(pair.path, pair.kind): (pair.sum, pair.least) for pair in shown.scale.pairs}
    assert {(p.path, p.kind): (p.sum, p.least) for p in found.scale.pairs} == {
        key: pytest.approx(sums, rel=1e-9) for key, sums in pairs.items()
    }
    assert pairs
    assert found.notes == gonio.measure(tmp_path).notes


def test_planted_waste_is_found_in_the_file(tmp_path: Path) -> None:
    model = saved("Llama", tmp_path)
    attention = model.model.layers[2].self_attn
    with torch.no_grad():
        attention.v_proj.weight.mul_(20)
        attention.o_proj.weight.div_(20)
    model.save_pretrained(tmp_path)
    found = gonio.measure(tmp_path, extra_figures=("blocks",))
    assert found.scale is not None
    worst = max(found.scale.pairs, key=lambda pair: pair.wasted)
    assert (worst.path, worst.kind) == ("model.layers.2.self_attn", "value and output")
    value, output = (getattr(attention, name).weight.detach().double() for name in ("v_proj", "o_proj"))
    groups = output.square().sum(0).view(2, 8).sum(0).sqrt()  # two heads read each channel of the values
    least = float(2 * (value.norm(dim=1) * groups).sum())
    assert worst.least == pytest.approx(least, rel=1e-6)
    assert worst.sum == pytest.approx(float(value.square().sum() + output.square().sum()), rel=1e-6)
    assert "By pairs of weights in blocks" in str(found)
    assert gonio.measure(tmp_path).scale is None  # on request alone


def test_tensors_under_other_names_are_said(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)  # its file has a tensor for each expert, and the model a stack
    found = gonio.measure(tmp_path, extra_figures=("blocks",))
    assert len(found.heads) == 8
    (note,) = [note for note in found.notes if "not in the file" in note]
    assert "experts" in note
    assert found.scale is not None
    assert {pair.kind for pair in found.scale.pairs} == {"query and key", "value and output"}


def test_what_has_no_anatomy_says_why(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [], "model_type": "own"}))
    found = gonio.measure(tmp_path, extra_figures=("blocks",))
    assert (found.scale, found.heads) == (None, ())
    assert any(note.startswith("Blocks were not measured: ") for note in found.notes)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidArgumentError, match=r"reads its config\.json; found no file"):
        gonio.measure(tmp_path, extra_figures=("blocks",))
    with pytest.raises(InvalidArgumentError, match="beside a file; found a state dict"):
        gonio.measure({"a.weight": torch.eye(3)}, extra_figures=("blocks",))
