"""Archives of NumPy give the figures of the same weights in safetensors; damages are named, and no code runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gonio
from gonio.errors import GonioError, UnreadableFileError

DRAW = torch.Generator().manual_seed(0)
STATE = {f"layers.{i}.weight": torch.randn(12, 20, generator=DRAW) for i in range(3)}
ARRAYS: dict[str, Any] = {name: value.numpy() for name, value in STATE.items()}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("change", [np.ascontiguousarray, np.asfortranarray, lambda a: a.astype(">f4")])
def test_equal_weights_have_equal_figures(
    tmp_path: Path, save: Callable[..., None], change: Callable[[Any], Any]
) -> None:
    save(tmp_path / "m.npz", **{name: change(value) for name, value in ARRAYS.items()})
    save_file(STATE, tmp_path / "m.safetensors")
    checks = [gonio.check(tmp_path / name) for name in ("m.npz", "m.safetensors")]
    assert checks[0].verdict == checks[1].verdict
    assert checks[0].fingerprints["tensors"] == checks[1].fingerprints["tensors"]
    rows = [gonio.measure(tmp_path / name).to_dict()["tensors"] for name in ("m.npz", "m.safetensors")]
    assert rows[0] == rows[1]


def test_a_value_that_is_not_finite_is_found(tmp_path: Path) -> None:
    bad: dict[str, Any] = {**ARRAYS, "layers.1.weight": ARRAYS["layers.1.weight"].copy()}
    bad["layers.1.weight"][2, 3] = np.nan
    np.savez(tmp_path / "m.npz", **bad)
    assert "G001" in {finding.code for finding in gonio.check(tmp_path / "m.npz").findings}


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    np.savez(tmp_path / "m.npz", evil=np.array([Runs()], dtype=object), **ARRAYS)
    result = gonio.check(tmp_path / "m.npz")
    assert "objects of Python" in result["evil"].reason
    gonio.measure(tmp_path / "m.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_a_file_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    np.savez(tmp_path / "m.npz", **ARRAYS)
    raw = (tmp_path / "m.npz").read_bytes()
    (tmp_path / "m.npz").write_bytes(raw[:keep])
    for verb in (gonio.check, gonio.measure):
        with pytest.raises(UnreadableFileError, match="not an intact file"):
            verb(tmp_path / "m.npz")


def test_changed_bytes_leave_no_other_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **ARRAYS)
    raw = np.frombuffer((tmp_path / "m.npz").read_bytes(), np.uint8)
    draw, named = np.random.default_rng(0), 0
    for _ in range(100):
        changed = raw.copy()
        changed[draw.integers(len(raw), size=4)] ^= draw.integers(1, 256, 4, dtype=np.uint8)
        (tmp_path / "m.npz").write_bytes(changed.tobytes())
        try:
            named += not gonio.check(tmp_path / "m.npz").intact
        except GonioError:
            named += 1
    assert named >= 90  # the rest changed fields of the archive that no reader uses
