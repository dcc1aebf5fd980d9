"""Law: on another device nothing mixes devices, and no training step waits for the CPU.

See `laws.accelerator`. What may wait: a table that is made once per geometry, a check when something is built, and
what a caller asks for (values of a penalty, a measurement).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils import backend_registration

from laws.accelerator import CONTROLS, works

pytestmark = [
    pytest.mark.slow,  # one process runs every case
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="torch 2.6 has no devices that are written in Python",
    ),
]

Found = dict[str, dict[str, list[str]] | str]
ONCE = {"conv_orthogonality.py _form", "spectral_views.py to"}
ALLOWED = {
    "build": {*ONCE, "scale_shift.py reason_to_skip"},
    "first tick": ONCE,
    # the first for the geometry of a convolution, and of a spectral norm whose vectors were copied with the weight
    "step": {*ONCE, "spectral_norm.py _belongs_to"},
    "evaluation": ONCE,
    "add_grads_": {"conv_orthogonality.py _form"},  # kept for real tensors, of which a fake one has no copy
    "values": {"penalty.py <dictcomp>", "penalty.py values"},
    "measurement": {"blocks.py count_nonfinite", "tensor.py _filters", "entry.py are_sinusoids", "entry.py fits"},
}  # by phase; in all others nothing
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recorded(once: Callable[[str, Callable[[Path], object]], Path]) -> Found:
    """What each case did on the device, from a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}

    def record(path: Path) -> None:
        subprocess.run([sys.executable, "-m", "laws.accelerator", str(path)], env=environment, check=True, timeout=500)

    return json.loads(once("accelerator.json", record).read_text())


def check(recorded: Found, name: str) -> None:
    for form in (name, f"{name}, fast"):
        found = recorded[form]
        assert not isinstance(found, str), f"{form} raised:\n{found}"
        for phase, events in found.items():
            waits = [event for event in events if event.split(": ")[1] not in ALLOWED.get(phase, ())]
            assert not waits, f"{form}, {phase}: {waits}"


@pytest.mark.matrix("fake accelerator")
@pytest.mark.parametrize("name", [name for name, _ in works()])
def test_on_another_device(name: str, recorded: Found) -> None:
    check(recorded, name)


# --- negative controls ----------------------------------------------------------------------------


def test_the_law_accepts_a_plain_linear_layer(recorded: Found) -> None:
    check(recorded, f"module {CONTROLS[0].name}")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("_Reading", "reads a number: outside gonio"),
        ("_Mixing", "Expected all tensors to be on the same device"),
        ("_Listing", "copies between devices: outside gonio"),
        ("_Backward", "reads a number: outside gonio"),
    ],
)
def test_the_law_refuses(name: str, problem: str, recorded: Found) -> None:
    with pytest.raises(AssertionError, match=problem):
        check(recorded, f"module {name}")
