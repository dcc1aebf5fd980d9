"""A file checked and measured, beside `cat` and WeightWatcher.

    python -m benchmarks files

`cat` is a process that reads the file to /dev/null; the file lies in memory by then. gonio reads and measures it in
this process; WeightWatcher (`pip install weightwatcher`; left out where it is not installed) takes a model, into which
the file is loaded.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gonio
from benchmarks.harness import Candidate, Operation, Row
from benchmarks.large_networks import Layer, ResNet50, VisionTransformer
from benchmarks.measuring import PEER, analysed
from benchmarks.results import Ratio, path_of

TITLE = "Files"
FLOOR = "`cat` of the file to /dev/null"
RESULT = path_of("files")
WIDTH, HEADS = 1536, 16
Build = Callable[[], nn.Module]
MODELS: dict[str, Build] = {
    "ResNet-50": ResNet50,
    "ViT-B": VisionTransformer,
    "2 layers of a transformer": lambda: nn.Sequential(Layer(WIDTH, HEADS), Layer(WIDTH, HEADS)),
}
QUICK: dict[str, Build] = {"tiny ResNet": lambda: ResNet50(4, (1, 1), 3)}
_SIZE = re.compile(r", ([\d.]+) MB$")


def _cat(path: Path, build: Build) -> object:
    return subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)


def _watched(path: Path, build: Build) -> object:
    model = build()
    model.load_state_dict(load_file(path))
    return analysed(model.eval())


WORK: dict[str, Callable[[Path, Build], object]] = {
    "gonio check": lambda path, _: gonio.check(path),
    "gonio measure": lambda path, _: gonio.measure(path),
    PEER: _watched,
}


def _candidate(name: str, build: Build, work: Callable[[Path, Build], object]) -> Candidate:
    def make() -> Operation:
        folder = Path(tempfile.mkdtemp())
        torch.manual_seed(0)
        save_file(build().state_dict(), folder / "model.safetensors")

        def operation() -> Sequence[Tensor]:
            work(folder / "model.safetensors", build)
            return []  # other figures each

        weakref.finalize(operation, shutil.rmtree, folder)
        return operation

    return Candidate(name, make, compiled=name == PEER)


def rows(*, quick: bool) -> Iterator[Row]:
    """A row for each file, whose name has its size."""
    known = importlib.util.find_spec("weightwatcher") is not None
    if not known:
        print("weightwatcher is not installed: it is left out", file=sys.stderr)
    for name, build in (QUICK if quick else MODELS).items():
        with torch.device("meta"):
            size = sum(value.nbytes for value in build().state_dict().values()) / 1e6
        works = {tool: work for tool, work in WORK.items() if known or tool != PEER}
        candidates = tuple(_candidate(tool, build, work) for tool, work in works.items())
        yield Row(f"{name}, {size:.1f} MB", "F", _candidate("cat", build, _cat), candidates)


def table(found: dict[str, Any]) -> str:
    """Megabytes per second of each, from the median times, and the time of WeightWatcher over that of `measure`."""
    tools = ["cat", *WORK]
    lines = [f"| file | {' | '.join(f'`{tool}`' for tool in tools)} | {PEER} / `gonio measure` |"]
    lines.append("|---|" + "--:|" * (len(tools) + 1))
    for row in found["rows"]:
        size = float(_SIZE.search(row["case"])[1])  # type: ignore[index]
        by_name = {each["name"]: each for each in (row["floor"], *row["candidates"])}
        rates = [1e3 * size / by_name[tool]["milliseconds"] if tool in by_name else None for tool in tools]
        shown = ["–" if rate is None else f"{rate:,.0f} MB/s" if rate >= 10 else f"{rate:.1f} MB/s" for rate in rates]
        ratio = "–"
        if PEER in by_name:
            peer, own = (Ratio(**by_name[name]["wall"]) for name in (PEER, "gonio measure"))
            ratio = f"{peer.median / own.median:.1f}"
        mark = " ¹" if row["disturbed"] else ""
        lines.append(f"| {row['case']}{mark} | {' | '.join(shown)} | {ratio} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    noisy = " ¹ Other programs were running." if any(row["disturbed"] for row in found["rows"]) else ""
    rounds = sorted({row["rounds"] for row in found["rows"]})
    said = "–".join(map(str, {rounds[0]: None, rounds[-1]: None}))
    about = f"{found['machine']['processor']}, {found['threads']} threads; {versions}"
    return "\n".join([*lines, "", f"From memory, medians of {said} interleaved rounds. {about}.{noisy}"])
