"""Large checkpoints are measured and compared as they are stored: the peak of memory of a process that does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from catalog import seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc"),
]

PEAK = """
import sys
from pathlib import Path

import torch

import gonio

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
"""
MEASURE = """
gonio.measure({"w.weight": torch.randn(600, 700)})  # what is imported late
before = peak()
found = gonio.measure(sys.argv[1])
print(len(found.layers), peak() - before)
"""
MANY_FILTERS = """
found = gonio.measure({"w.weight": torch.randn(300_000, 2)})
print(len(found.layers), peak())
"""
COMPARE = """
torch.set_num_threads(1)
small = {"w.weight": torch.randn(600, 700)}
gonio.measuring.difference(small, {"w.weight": small["w.weight"] + 0.1})  # what is imported late
before = peak()
found = gonio.measuring.difference(*sys.argv[1:])
assert found["w"].form == "full"
print(peak() - before)
"""


def printed(program: str, *files: Path) -> list[int]:
    """The numbers that a program prints, in a process of its own."""
    command = [sys.executable, "-c", PEAK + program, *map(str, files)]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("shape", [(16_384, 4096), (4096, 16_384), (80_000_000,), (2, 40_000_000)])
def test_a_measurement_holds_little_beside_twice_the_largest_tensor(
    shape: tuple[int, ...], suffix: str, tmp_path: Path
) -> None:
    """Beside Python and torch, which take 200 to 350 MB."""
    state = {f"{i}.weight": torch.randn(shape).bfloat16() for i in range(4)}
    largest = state["0.weight"].nbytes
    path = tmp_path / f"m.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    del state
    layers, more = printed(MEASURE, path)
    assert layers == (4 if len(shape) > 1 else 0)
    room = 256 << 20 if suffix == "pt" else 0  # what torch's map of the file may hold before it is made anew
    assert more <= 2 * largest + 64e6 + room


def test_a_comparison_holds_little_beside_the_two_files(tmp_path: Path) -> None:
    weight = seeded(24_000, 2048) * torch.arange(1.0, 2049).pow(-0.4)
    change = seeded(24_000, 2048, seed=1).mul_(0.02 * weight.norm() / 24_000**0.5 / 2048**0.5)
    for name, values in (("base", weight), ("tuned", weight + change)):
        save_file({"w.weight": values.bfloat16()}, tmp_path / f"{name}.safetensors")
    size = (tmp_path / "base.safetensors").stat().st_size
    (more,) = printed(COMPARE, *(tmp_path / f"{name}.safetensors" for name in ("base", "tuned")))
    # Both tensors as they are stored, and what blocks, bases of subspaces and one held difference take; either of them
    # in float32 would be 200 MB more.
    assert more < 2 * size + 600 * 10**6


def test_memory_of_many_short_filters_grows_with_their_number_alone() -> None:
    """Tens of millions of their pairs are parallel by chance."""
    layers, peak = printed(MANY_FILTERS)
    assert layers == 1
    assert peak < 600e6
