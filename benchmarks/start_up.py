"""Programs from start to end, as a user waits for them: imports, help, and the measurement of a small file.

Goals: `import gonio` within 50 ms of `import torch`, `gonio --help` within 0.15 s of processor time, `gonio measure` of
a small file within a second of `import torch`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

import gonio
from benchmarks.harness import Candidate, Operation, Row

TITLE = "From the start of a program to its end"
FLOOR = "a program that imports torch; for the help, an empty one"

GOALS = {
    ("main", "gonio --help", "process"): "0.15 s",
    ("main", "import gonio", "process"): "floor + 0.05 s",
    ("main", "gonio measure small.safetensors", "process"): "floor + 1 s",
}


def _program(name: str, *arguments: str) -> Candidate:
    def make() -> Operation:
        def operation() -> Sequence[Tensor]:
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            return []

        return operation

    return Candidate(name, make)


def _measured() -> Candidate:
    """`gonio measure` of the digits network's file."""

    def make() -> Operation:
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name) / "small.safetensors"
        save_file(gonio.models.digits_cnn().state_dict(), path)
        run = _program("", "-m", "gonio", "measure", str(path)).make()

        def operation(folder: tempfile.TemporaryDirectory[str] = folder) -> Sequence[Tensor]:  # kept while it is used
            return run()

        return operation

    return Candidate("gonio", make)


def rows(*, quick: bool) -> Iterator[Row]:
    """`quick` leaves out what imports torch again and again."""
    yield Row("gonio --help", "process", _program("empty", "-c", ""), (_program("gonio", "-m", "gonio", "--help"),))
    if quick:
        return
    torch = _program("torch", "-c", "import torch")
    for case, code in (
        ("import gonio", "import torch, gonio"),
        ("first gonio.measure", "import torch, gonio; gonio.measure"),
    ):
        yield Row(case, "process", torch, (_program("gonio", "-c", code),))
    yield Row("gonio measure small.safetensors", "process", torch, (_measured(),))
