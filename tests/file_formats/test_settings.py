"""Torch files with settings beside the weights: objects of a closed list, of which nothing is made and nothing runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import UnreadableFileError
from gonio.measuring.reading.torch_files import load_torch

WRITTEN = Path(__file__).parent / "written" / "omegaconf.ckpt"  # by OmegaConf 2.3 and torch (`written/write.py`)


def test_the_weights_beside_settings_are_read_and_the_settings_are_named() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Linear(6, 4).state_dict().values()
    state = load_torch(WRITTEN)["state_dict"]
    torch.testing.assert_close(state["weight"], weight)  # drawn anew: other kernels round otherwise
    torch.testing.assert_close(state["bias"], bias)
    assert state["tied"].data_ptr() == state["weight"].data_ptr()
    found = gonio.measure(WRITTEN)
    assert [row.path for row in found.layers] == ["weight"]
    assert any("argparse.Namespace" in note and "objects of" in note for note in found.notes)
    assert str(gonio.check(WRITTEN)).startswith("Intact: ")


class _Runs:
    """What a hostile file holds: a call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("settings", [{}, {"args": argparse.Namespace(lr=1)}])
def test_a_call_beside_settings_is_refused_by_its_name_and_does_not_run(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    trap = tmp_path / "made"
    torch.save({"state_dict": nn.Linear(2, 2).state_dict(), **settings, "call": _Runs(trap)}, tmp_path / "a.ckpt")
    with pytest.raises(UnreadableFileError, match=f"an object of {os.mkdir.__module__}.mkdir"):
        gonio.measure(tmp_path / "a.ckpt")
    assert not trap.exists()


def test_a_settings_object_in_the_place_of_a_weight_is_no_weight(tmp_path: Path) -> None:
    torch.save({"weight": torch.eye(6, 8), "other": argparse.Namespace(weight=torch.ones(2))}, tmp_path / "a.pt")
    assert [row.path for row in gonio.measure(tmp_path / "a.pt").layers] == ["weight"]


def test_a_tensor_beside_settings_that_claims_more_than_is_stored_is_refused(tmp_path: Path) -> None:
    broad = torch.ones(1).expand(1 << 40)
    torch.save({"weight": broad, "args": argparse.Namespace()}, tmp_path / "a.pt")
    with pytest.raises(UnreadableFileError, match="more bytes than its record"):
        gonio.measure(tmp_path / "a.pt")
