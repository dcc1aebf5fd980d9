"""Two networks of one architecture in one state dict: named, and read alone by a key of the first words of names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import gonio
from bank.files.case import normal
from foreign import ONE_PROCESS
from gonio.errors import InvalidArgumentError
from gonio.measuring.reading.source import CheckpointPart

SAID = "have tensors of the same names and shapes"


def network(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)).state_dict()


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in state.items()}


QUERY = network(0)
AVERAGE = {name: 0.999 * value for name, value in copy.deepcopy(QUERY).items()}
MOCO = under("module.encoder_q", QUERY) | under("module.encoder_k", AVERAGE) | {"module.queue": normal(8, 64)}
# The states, and the prefixes that are named; none in a network whose own layers are alike.
STATES: dict[str, tuple[dict[str, Any], str]] = {
    "MoCo": (MOCO, "module.encoder_q, module.encoder_k"),
    "a mean teacher under a wrapper": (under("model", QUERY) | under("ema.module", AVERAGE), "model, ema.module"),
    "student and teacher": (
        under("student.backbone", QUERY) | {"student.head.weight": normal(4, 8)}
        | under("teacher.backbone", AVERAGE) | {"teacher.head.weight": normal(4, 8)}, "student, teacher"),
    "three networks": (under("a", QUERY) | under("b", network(1)) | under("c", network(2)), "a, b, c"),
    "layers in a list": ({f"h.{i}.mlp.{name}": value for i in range(4) for name, value in QUERY.items()}, ""),
    "stages": (under("layer1", QUERY) | under("layer2", QUERY), ""),
    "two projections of many": (
        under("q", QUERY) | under("k", QUERY)
        | {f"body.{i}.weight": normal(8, 8) for i in range(9)}, ""),
    "other shapes": (under("encoder", QUERY) | under("decoder", {**QUERY, "0.weight": normal(16, 9)}), ""),
    "one matrix each": ({"up.weight": normal(4, 4), "down.weight": normal(4, 4)}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_networks_of_one_architecture_are_named(name: str) -> None:
    state, prefixes = STATES[name]
    notes = [note for note in gonio.measure(state).notes if SAID in note]
    assert len(notes) == bool(prefixes)
    assert all(note.startswith(f"{prefixes} {SAID}") for note in notes)


def test_a_key_reads_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "moco.pt"
    torch.save({"epoch": 3, "state_dict": MOCO}, path)
    (note,) = (note for note in gonio.measure(path).notes if SAID in note)
    assert "--key state_dict.module.encoder_q reads the first alone" in note
    for key, state in (("encoder_q", QUERY), ("encoder_k", AVERAGE)):
        found = gonio.measure(CheckpointPart(str(path), f"state_dict.module.{key}"))
        assert found.notes[0] == f"read from 'state_dict.module.{key}' of the checkpoint"
        assert "not read: state_dict.module.encoder_" in found.notes[1]
        for layer in ("0", "2"):
            assert found[layer].frobenius == pytest.approx(float(state[f"{layer}.weight"].double().norm()), rel=1e-6)
    with pytest.raises(InvalidArgumentError, match=r"under the key 'state_dict\.module\.encoder' of"):
        gonio.measure(CheckpointPart(str(path), "state_dict.module.encoder"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_key_reads_one_of_them_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    dcp.save({"state_dict": MOCO}, checkpoint_id=tmp_path, **ONE_PROCESS)
    found = gonio.measure(CheckpointPart(str(tmp_path), "state_dict.module.encoder_k"))
    assert found["0"].frobenius == pytest.approx(float(AVERAGE["0.weight"].double().norm()), rel=1e-6)
    assert [row.name for row in found.values() if row.status == "measured"] == ["0.weight", "2.weight"]
