"""Law: on another device every verb, measurement and run of a study does what it does on the CPU.

See `laws.elsewhere`: a device whose tensors have values, and which refuses what an accelerator refuses.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from laws.elsewhere_work import CONTROLS, WORK

pytestmark = [
    pytest.mark.slow,  # one process runs every case
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="torch 2.6 has no devices that are written in Python",
    ),
]
TESTS = Path(__file__).parents[1]
_NEAR = 1e-4  # relative: sums in float32 may be taken in another order


@pytest.fixture(scope="module")
def done(once: Callable[[str, Callable[[Path], object]], Path]) -> dict[str, Any]:
    """What each piece of work found on both devices, from a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}

    def record(path: Path) -> None:
        subprocess.run([sys.executable, "-m", "laws.elsewhere_work", str(path)], env=environment, check=True)

    return json.loads(once("elsewhere.json", record).read_text())


@pytest.mark.parametrize("name", WORK)
def test_the_same_on_another_device(name: str, done: dict[str, Any]) -> None:
    assert not isinstance(done[name], str), f"{name} raised:\n{done[name]}"
    on_cpu, there = done[name]
    assert_same(on_cpu, there, name)


def assert_same(one: Any, other: Any, where: str) -> None:
    """Equal, numbers up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}, {key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, where)
    elif isinstance(one, float) and isinstance(other, float):
        near = math.isclose(one, other, rel_tol=_NEAR, abs_tol=_NEAR)
        assert near or one == other or (math.isnan(one) and math.isnan(other)), f"{where}: {one} and {other}"
    else:
        assert one == other, where


@pytest.mark.parametrize(
    ("name", "problem"),
    [("mixing", "a tensor of cpu in add"), ("drawing", "a generator of cpu in normal_"), ("leaving", "NumPy")],
)
def test_the_device_refuses(name: str, problem: str, done: dict[str, Any]) -> None:
    assert name in CONTROLS
    assert isinstance(done[name], str), f"{name} was not refused"
    assert f"the other device met {problem}" in done[name]
