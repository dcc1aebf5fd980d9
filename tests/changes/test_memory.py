"""Large checkpoints are compared as they are stored: what a comparison holds beside the two files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from catalog import seeded

PROGRAM = """
import sys
from pathlib import Path

import torch

import gonio

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

torch.set_num_threads(1)
small = {"w.weight": torch.randn(600, 700)}
gonio.measuring.difference(small, {"w.weight": small["w.weight"] + 0.1})  # what is imported late
before = peak()
found = gonio.measuring.difference(*sys.argv[1:])
assert found["w"].form == "full"
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_comparison_holds_little_beside_the_two_files(tmp_path: Path) -> None:
    weight = seeded(24_000, 2048) * torch.arange(1.0, 2049).pow(-0.4)
    change = seeded(24_000, 2048, seed=1).mul_(0.02 * weight.norm() / 24_000**0.5 / 2048**0.5)
    for name, values in (("base", weight), ("tuned", weight + change)):
        save_file({"w.weight": values.bfloat16()}, tmp_path / f"{name}.safetensors")
    size = (tmp_path / "base.safetensors").stat().st_size
    files = [str(tmp_path / f"{name}.safetensors") for name in ("base", "tuned")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *files], capture_output=True, text=True, check=True)
    # Both tensors as they are stored, and what blocks, bases of subspaces and one held difference take; either of them
    # in float32 would be 200 MB more.
    assert int(done.stdout) < 2 * size + 600 * 10**6
