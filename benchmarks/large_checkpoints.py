"""What checking, measuring and comparing large checkpoints costs: measured on synthetic folders, and beyond by the law.

    python -m benchmarks.large_checkpoints [folder]            10 minutes on two quiet cores, 6 GB of disk
    python -m benchmarks.large_checkpoints --quick [folder]    seconds; the result is not written

A folder has the tensors of a decoder-only transformer in bfloat16, in shards with an index, with falling singular
values as trained ones have them; a second one has a dense change of 2 %. Each command runs in a process of its own,
whose peak of resident memory the kernel keeps; pages of the files are dropped from memory before.

The law is t = a + bP seconds of processors for P parameters of wide models: tensors are computed independently, and no
figure depends on two layers. On c cores of each of n machines a command takes
a + max(bP/(c·n·e), b · largest tensor, bytes/(n·disk)), with e the seconds of one process over those of several. Memory
of a process is a line in the size of the largest tensor, whatever the number of layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.machine import describe, versions
from benchmarks.results import path_of
from gonio import check, measure

RESULT = path_of("large_checkpoints")
SHARD = 2 << 30  # bytes
CHANGE = 0.02  # of a weight's norm, in the second checkpoint
POOL = 10_000_019  # places in the pool at which a tensor can begin, a prime
CORES, NODES = 32, 8  # of the machines in the table
_UNITS = ((1, "s", 100), (60, "min", 6000), (3600, "h", float("inf")))
WORKS = ("check", "measure", "difference")


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder-only transformer; `experts` of `hidden` units each, of which none is shared."""

    layers: int
    width: int = 4096
    hidden: int = 11008
    keys: int = 4096
    vocabulary: int = 32000
    experts: int = 1

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.width)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield from ((f"{at}.self_attn.{name}_proj.weight", (self.width, self.width)) for name in "qo")
            yield from ((f"{at}.self_attn.{name}_proj.weight", (self.keys, self.width)) for name in "kv")
            for expert in range(self.experts):
                mlp = f"{at}.mlp" if self.experts == 1 else f"{at}.mlp.experts.{expert}"
                yield from ((f"{mlp}.{name}_proj.weight", (self.hidden, self.width)) for name in ("gate", "up"))
                yield f"{mlp}.down_proj.weight", (self.width, self.hidden)
            yield from ((f"{at}.{name}_layernorm.weight", (self.width,)) for name in ("input", "post_attention"))
        yield "model.norm.weight", (self.width,)
        yield "lm_head.weight", (self.vocabulary, self.width)

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for _, shape in self.tensors())

    @property
    def largest(self) -> int:
        """Entries of the largest tensor."""
        return max(prod(shape) for _, shape in self.tensors())


WIDE = 4096  # width of the narrowest model of the law: of narrower ones all filters are compared with each other
MEASURED = (
    Decoder(16, width=1536, hidden=4096, keys=1536),
    Decoder(1),
    Decoder(2),
    Decoder(4),
    Decoder(1, width=8192, hidden=22016, keys=1024),
)
QUICK = (Decoder(1, 256, 688, 256, 2000), Decoder(2, 256, 688, 256, 2000), Decoder(1, 512, 1376, 64, 2000))
WANTED = {  # of Llama 3, and of a mixture of experts as wide as DeepSeek's V3
    "70 B": Decoder(80, 8192, 28672, 1024, 128256),
    "405 B": Decoder(126, 16384, 53248, 1024, 128256),
    "1 T": Decoder(61, 7168, 2048, 1024, 163840, experts=368),
}


# --- folders --------------------------------------------------------------------------------------------------------


def write(folder: Path, decoder: Decoder, *, change: float = 0.0) -> None:
    """The shards and their index."""
    pool = torch.randn(decoder.largest + 2 * POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    where: dict[str, str] = {}
    shards = list(_shards(decoder))
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({tensor: _drawn(tensor, shape, pool, change) for tensor, shape in shard}, folder / name)
        where |= dict.fromkeys((tensor for tensor, _ in shard), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _drawn(name: str, shape: tuple[int, ...], pool: Tensor, change: float) -> Tensor:
    """Numbers from a place in the pool that depends on the name; column j of a matrix scaled by (j + 1)^-0.4."""
    place, size = sum(map(ord, name)) * 7919 % POOL, prod(shape)
    made = pool[place : place + size].view(shape)
    if made.ndim == 2:
        made = made * torch.arange(1.0, shape[1] + 1).pow(-0.4)
    if change:
        noise = pool[place + POOL : place + POOL + size].view(shape)
        made = made + noise * (change * made.norm() / noise.norm())
    return made.bfloat16()


def _shards(decoder: Decoder) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    shard: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in decoder.tensors():
        if sum(2 * prod(s) for _, s in shard) + 2 * prod(shape) > SHARD:
            yield shard
            shard = []
        shard.append((name, shape))
    yield shard


def drop(*folders: Path) -> None:
    """Let the kernel forget the pages of files, which are written to the disk first."""
    os.sync()
    for file in (file for folder in folders for file in folder.iterdir()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Seconds in which `cat` reads all files."""
    start = time.perf_counter()
    subprocess.run(["cat", *sorted(folder.iterdir())], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


# --- measuring ------------------------------------------------------------------------------------------------------


def alone(work: str, jobs: int, *folders: Path) -> dict[str, Any]:
    """What the child prints: the time, the seconds of all cores, and peaks of memory."""
    drop(*folders)
    command = [sys.executable, "-m", "benchmarks.large_checkpoints", "--child", work, str(jobs), *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(work: str, jobs: int, folders: Sequence[str]) -> dict[str, Any]:
    measure(torch.nn.Linear(4, 4))  # what is imported late belongs to the start
    before, start, cpu = _peak(), time.perf_counter(), _cpu()
    if work == "check":
        check(folders[0], jobs=jobs)
    else:
        measure(*folders, jobs=jobs)
    spent = {"seconds": time.perf_counter() - start, "cpu": _cpu() - cpu}
    return {"work": work, "jobs": jobs, **{k: round(v, 3) for k, v in spent.items()}, "before": before, "peak": _peak()}


def _cpu() -> float:
    """Seconds of processors that this process and its children have used."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _peak() -> int:
    """Most bytes that were resident at once in this process, the mapped pages of files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main(words: list[str]) -> None:
    quick = words[:1] == ["--quick"]
    words = words[1:] if quick else words
    rows: list[dict[str, Any]] = []
    disk, cores, disturbed = [], os.cpu_count() or 1, os.getloadavg()[0] > 1
    decoders = QUICK if quick else MEASURED
    most = max(decoders[:-1], key=lambda d: d.parameters)  # also by several processes
    for decoder in decoders:
        with tempfile.TemporaryDirectory(dir=words[0] if words else None) as made:
            base, tuned = Path(made) / "base", Path(made) / "tuned"
            for path, change in ((base, 0.0), (tuned, CHANGE)):
                path.mkdir()
                write(path, decoder, change=change)
            drop(base, tuned)
            disk.append(2 * decoder.parameters / read(base))
            for work in WORKS:
                folders = (base, tuned) if work == "difference" else (base,)
                for jobs in {1: None, cores if decoder == most else 1: None}:
                    rows.append({**asdict(decoder), **alone(work, jobs, *folders)})
                    print(rows[-1], file=sys.stderr, flush=True)
    found = {
        "rows": rows,
        "disk": disk,
        "quick": quick,
        "disturbed": disturbed,
        "machine": describe(),
        "versions": versions(),
    }
    if not quick:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


# --- the law --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """Seconds of processors: `start` + `slope` · parameters; `error`: the largest relative deviation of a measurement.

    `efficiency`: those of one process over those of several. `base` and `memory`: bytes of one process, and bytes per
    byte of the largest tensor.
    """

    start: float
    slope: float
    error: float
    efficiency: float
    base: float
    memory: float

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Law:
        one = [row for row in rows if row["jobs"] == 1]
        sizes, spent = (
            np.array(x) for x in zip(*((_decoder(r).parameters, r["cpu"] or 1e-3) for r in one), strict=True)
        )
        start, slope = line(sizes, spent)
        error = float(np.abs((start + slope * sizes) / spent - 1).max())
        alone = {_decoder(row): row["cpu"] for row in one}
        shares = [alone[_decoder(row)] / (row["cpu"] or 1e-3) for row in rows if row["jobs"] > 1]
        base, memory = line(np.array([2 * _decoder(r).largest for r in one]), np.array([r["peak"] for r in one]))
        return cls(start, slope, error, min(1.0, *shares), base, memory)

    def seconds(self, decoder: Decoder, cores: int, nodes: int, disk: float, files: int) -> float:
        """Of a command on so many cores of each of some nodes, each with a disk of this rate."""
        shared = self.slope * decoder.parameters / (cores * nodes * self.efficiency)
        return self.start + max(shared, self.slope * decoder.largest, files * 2 * decoder.parameters / (nodes * disk))


def line(x: Any, y: Any) -> tuple[float, float]:
    """Start and slope of the line with the least squares of relative deviations; neither is negative."""
    matrix = np.stack([1 / y, x / y], axis=1)
    start, slope = map(float, np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)[0])
    if start < 0:
        start, slope = 0.0, float(np.linalg.lstsq(matrix[:, 1:], np.ones(len(x)), rcond=None)[0][0])
    return start, max(slope, 0.0)


def _decoder(row: Mapping[str, Any]) -> Decoder:
    return Decoder(**{name: row[name] for name in Decoder.__dataclass_fields__})


def laws(found: Mapping[str, Any]) -> dict[str, Law]:
    rows = [row for row in found["rows"] if found["quick"] or row["width"] >= WIDE]
    return {work: Law.of([row for row in rows if row["work"] == work]) for work in WORKS}


# --- the tables -----------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """What was measured, the law, and what it says of larger models."""
    disk = float(np.median(found["disk"]))
    known = laws(found)
    lines = [
        "| parameters | width | processes | `check` | `measure` | `difference` | memory of `measure` |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    places = dict.fromkeys((_decoder(row), row["jobs"]) for row in found["rows"])
    for decoder, jobs in places:
        mine = {row["work"]: row for row in found["rows"] if (_decoder(row), row["jobs"]) == (decoder, jobs)}
        times = " | ".join(_time(mine[work]["seconds"]) for work in WORKS)
        peak = _bytes(mine["measure"]["peak"]) if jobs == 1 else "–"
        lines.append(f"| {decoder.parameters:,} | {decoder.width} | {jobs} | {times} | {peak} |")
    lines += ["", "| law | " + " | ".join(f"`{work}`" for work in WORKS) + " |", "|---|--:|--:|--:|"]
    for name, show in (
        ("parameters per second of a core", lambda law: f"{1 / law.slope / 1e6:,.1f} million"),
        ("start", lambda law: _time(law.start)),
        ("largest deviation of a measurement", lambda law: f"{law.error:.0%}"),
        ("efficiency of several processes", lambda law: f"{law.efficiency:.0%}"),
        ("memory per byte of the largest tensor", lambda law: f"{law.memory:.1f}"),
    ):
        lines.append(f"| {name} | {' | '.join(show(known[work]) for work in WORKS)} |")
    here = found["machine"]["cores"]
    places_of = {f"{here} cores": (here, 1), f"{CORES} cores": (CORES, 1), f"{NODES} × {CORES} cores": (CORES, NODES)}
    lines += ["", f"| model | bytes | command | {' | '.join(places_of)} | memory per process |"]
    lines.append("|---|--:|---|" + "--:|" * (len(places_of) + 1))
    for name, decoder in WANTED.items():
        for work in WORKS:
            files = 2 if work == "difference" else 1
            took = [known[work].seconds(decoder, cores, nodes, disk, files) for cores, nodes in places_of.values()]
            memory = _bytes(known[work].base + known[work].memory * 2 * decoder.largest)
            size = f"{name} ({decoder.parameters / 1e9:,.0f} B)"
            lines.append(
                f"| {size} | {_bytes(2 * decoder.parameters)} | `{work}` | {' | '.join(map(_time, took))} | {memory} |"
            )
    used = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += [
        "",
        f"The upper table is measured, from the disk; the lowest is the law. The disk of this machine delivers "
        f"{disk / 1e9:.2f} GB/s to `cat`, and each machine of the table is taken to have such a one; "
        f"{found['machine']['processor']}, {here} cores; {used}.{' From a quick run.' if found['quick'] else ''}"
        f"{' Other programs were running.' if found['disturbed'] else ''}",
    ]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    value, unit = next((seconds / n, u) for n, u, most in _UNITS if seconds < most)
    return f"{value:.2g} {unit}" if value < 10 else f"{value:,.0f} {unit}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count < 1e12 else f"{count / 1e12:,.2f} TB"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])))
    else:
        main(sys.argv[1:])
