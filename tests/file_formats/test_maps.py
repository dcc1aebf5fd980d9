"""A torch file is mapped into memory once at a time: pages that were read before are given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from catalog import seeded
from gonio.measuring.reading.torch_files import open_torch

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are counted in Linux's /proc")
STATE = {f"{i}.weight": seeded(40, 30, seed=i) for i in range(4)}
MOMENTS = {i: {"step": torch.tensor(7.0), "exp_avg": w, "exp_avg_sq": w**2} for i, w in enumerate(STATE.values())}
OPTIMIZER = {"state": MOMENTS, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "params": [*MOMENTS]}]}
CONTENTS: dict[str, Any] = {
    "weights": STATE,
    "weights under a key": {"model": STATE, "epoch": 3},
    "weights and optimizer": {"model": STATE, "optimizer": OPTIMIZER},
    "optimizer alone": OPTIMIZER,
}


def maps_of(path: Path) -> int:
    return sum(line.endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_one_map_at_a_time(content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, states of an optimizer and a refusal hold nothing of what was read first."""
    monkeypatch.setattr("gonio.measuring.reading.torch_files.REMAP", 100)
    path = tmp_path / "m.pt"
    torch.save(content, path)
    opened = open_torch(path)
    assert len(opened.stored) == (0 if content is OPTIMIZER else 4)
    moments = [moment for one in opened.optimizer.parameters for moment in one.tensors.values()]
    assert len(moments) == (0 if "optimizer" not in content and content is not OPTIMIZER else 8)
    for stored in [*opened.stored.values(), *moments]:
        assert stored.load().shape == (40, 30)
        assert maps_of(path) == 1
