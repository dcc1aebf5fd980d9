"""Two checkpoints side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gonio.errors import UnknownNameError
from gonio.measuring import difference


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(6, 4, 3, 3, generator=generator),
        "conv.bias": torch.randn(6, generator=generator),
        "fc.weight": torch.randn(5, 7, generator=generator),
    }


def test_norms_and_directions_are_told_apart() -> None:
    before, after = state(), state()
    after["conv.weight"] = before["conv.weight"] * 2
    turn = torch.linalg.matrix_exp(torch.tensor([[0.0, -0.3], [0.3, 0.0]]))
    after["fc.weight"] = before["fc.weight"].clone()
    after["fc.weight"][:, 2:] = 0
    before["fc.weight"][:, 2:] = 0
    after["fc.weight"][:, :2] = before["fc.weight"][:, :2] @ turn
    found = difference(before, after)
    conv, fc = found["conv"], found["fc.weight"]
    assert (conv.norm_ratio, conv.relative) == pytest.approx((2.0, 1.0))
    assert conv.angle_max == pytest.approx(0.0, abs=1e-3)
    assert fc.norm_ratio == pytest.approx(1.0, rel=1e-5)
    assert fc.angle_mean == pytest.approx(math.degrees(0.3), rel=1e-4)
    assert fc.relative == pytest.approx(2 * math.sin(0.15), rel=1e-4)
    assert found["conv.bias"].status == "equal"


def test_independent_weights_are_at_right_angles() -> None:
    found = difference(state(0), state(1))["conv"]
    assert found.angle_mean == pytest.approx(90, abs=5)


def test_what_cannot_be_compared_has_a_reason() -> None:
    before, after = state(), state()
    before["gone.weight"] = torch.ones(2, 2)
    after["new"] = torch.ones(2)
    after["fc.weight"] = torch.ones(5, 8)
    before["packed.weight"] = after["packed.weight"] = torch.ones(2, 2, dtype=torch.uint8)
    after["conv.weight"] = torch.zeros(6, 4, 3, 3)
    found = difference(before, after)
    reasons = {t.path: t.reason for t in found if t.status == "not compared"}
    assert reasons == {
        "gone": "only before",
        "new": "only after",
        "fc": "shape (5, 7) before, (5, 8) after",
        "packed": "uint8: packed or quantised weights, whose scale is not known here",
    }
    assert found["conv"].angle_mean is None
    assert found["conv"].relative == pytest.approx(1.0)
    assert found.coverage.startswith("2 of 6 tensors are compared, 1 of them are equal; 4 are not: fc: shape")


def test_models_files_and_state_dicts_mix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert {t.status for t in difference(tmp_path / "m.pt", model)} == {"equal"}
    with torch.no_grad():
        model[1].weight[0] *= -1
    found = difference(tmp_path / "m.pt", model)["1"]
    # read by the model's layout: each of the six filters has one of its two input slices flipped or none
    assert found.angle_max is not None
    assert found.norm_ratio == pytest.approx(1.0)


def test_it_prints_as_a_table_and_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    found = difference(state(0), state(1))
    text = str(found)
    assert max(map(len, text.splitlines())) <= 70
    assert "state dict → state dict" in text
    assert "3 of 3 tensors are compared, 0 of them are equal; none is left out." in text
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["schema"] == "gonio.difference/1"
    assert len(found) == len(list(found)) == 3
    with pytest.raises(UnknownNameError, match="no tensor named 'con'"):
        found["con"]
