"""Checkpoints of large language models, in pieces: one bf16 weight, two of them compared, many small tensors.

Goals: 25 million parameters per second and core, two checkpoints in 2.5 times the time of one, 20,000 small tensors in
15 seconds. `python -m benchmarks.large_checkpoints` has the memory and the time of whole files.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gonio
from benchmarks.harness import Candidate, Operation, Row

TITLE = "Large files"
FLOOR = "`measure`: the norm of every row in float32, read from the file; `difference`: `measure` of the first file"
CHANGE = 0.02  # of the norm, in the second file
GOALS = {
    ("main", "4096×4096", "measure"): "0.34 s",
    ("main", "11008×4096", "measure"): "0.90 s",
    ("main", "2000 of 64×64", "measure"): "1.50 s",
    ("main", "4096×4096", "difference"): "2.50",
    ("main", "11008×4096", "difference"): "2.50",
}
Shapes = Sequence[tuple[int, int]]
Work = Callable[[Path, Path], object]


def weights(shapes: Shapes, change: float) -> dict[str, Tensor]:
    """Weights with falling singular values, as trained ones have, in bf16."""
    draw, made = torch.Generator().manual_seed(0), {}
    for number, (n, d) in enumerate(shapes):
        weight, noise = (torch.randn(n, d, generator=draw) for _ in range(2))
        weight *= 0.02 * torch.arange(1.0, d + 1).pow(-0.4)
        made[f"layers.{number}.weight"] = (weight + noise * (change * weight.norm() / noise.norm())).bfloat16()
    return made


def _candidate(name: str, shapes: Shapes, work: Work) -> Candidate:
    def make() -> Operation:
        folder = Path(tempfile.mkdtemp())
        files = [folder / f"{name}.safetensors" for name in ("base", "tuned")]
        for path, change in zip(files, (0.0, CHANGE), strict=True):
            save_file(weights(shapes, change), path)

        def operation() -> Sequence[Tensor]:
            work(files[0], files[1])
            return []

        weakref.finalize(operation, shutil.rmtree, folder)
        return operation

    return Candidate(name, make)


def _norms(base: Path, _: Path) -> object:
    return [weight.float().norm(dim=1) for weight in load_file(base).values()]


def _measured(base: Path, _: Path) -> object:
    return gonio.measure(base)


def _compared(base: Path, tuned: Path) -> object:
    return gonio.measure(base, tuned)


def rows(*, quick: bool) -> Iterator[Row]:
    large = {"24×16": [(24, 16)]} if quick else {"4096×4096": [(4096, 4096)], "11008×4096": [(11008, 4096)]}
    small = {"3 of 8×8": [(8, 8)] * 3} if quick else {"2000 of 64×64": [(64, 64)] * 2000}
    for case, shapes in (large | small).items():
        yield Row(case, "measure", _candidate("norms", shapes, _norms), (_candidate("gonio", shapes, _measured),))
    for case, shapes in large.items():
        one = _candidate("measure", shapes, _measured)
        yield Row(case, "difference", one, (_candidate("gonio", shapes, _compared),))
