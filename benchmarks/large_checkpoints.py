"""Memory and time of `gonio measure` on synthetic bf16 checkpoints of a billion parameters and more.

    python -m benchmarks.large_checkpoints [layers] [folder]

The file has the tensors of a decoder-only transformer (a vocabulary of 32,000; width 4096; 11,008 hidden
units; 32 layers are 6.7 billion parameters) in shards with an index, filled from one pool of normal numbers at
a different place for each tensor. It is measured by a process of its own, whose peak of resident memory the
kernel keeps; the file is deleted afterwards.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, versions
from gonio import measure
from gonio.measuring import outline

RESULT = Path(__file__).resolve().parent / "results" / "large_checkpoints.json"
WIDTH, HIDDEN, VOCABULARY = 4096, 11008, 32000
SHARD = 2 << 30  # bytes
ALLOWED = 300 * 10**6  # bytes beyond twice the largest tensor


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield from ((f"{at}.self_attn.{name}_proj.weight", (WIDTH, WIDTH)) for name in "qkvo")
        yield from ((f"{at}.mlp.{name}_proj.weight", (HIDDEN, WIDTH)) for name in ("gate", "up"))
        yield f"{at}.mlp.down_proj.weight", (WIDTH, HIDDEN)
        yield from ((f"{at}.{name}_layernorm.weight", (WIDTH,)) for name in ("input", "post_attention"))
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCABULARY, WIDTH)


def write(folder: Path, layers: int) -> int:
    """The shards and their index; how many parameters there are."""
    largest = max(prod(shape) for _, shape in tensors(layers))
    pool = torch.randn(largest + 10_000_019, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    data = memoryview(pool.view(torch.uint8).numpy())
    where: dict[str, str] = {}
    shards = list(_shards(layers))
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, data)
        where |= dict.fromkeys((tensor for tensor, _ in shard), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(prod(shape) for _, shape in tensors(layers))


def _shards(layers: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    shard: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in tensors(layers):
        if sum(2 * prod(s) for _, s in shard) + 2 * prod(shape) > SHARD:
            yield shard
            shard = []
        shard.append((name, shape))
    yield shard


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], data: memoryview) -> None:
    header, place = {}, 0
    for name, shape in shard:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + 2 * prod(shape)]}
        place += 2 * prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shard:
            start = 2 * (sum(map(ord, name)) * 7919 % 10_000_019)
            file.write(data[start : start + 2 * prod(shape)])


def measured_alone(folder: Path) -> dict[str, Any]:
    """What the child prints: its peaks, before and after, and the time."""
    command = [sys.executable, "-m", "benchmarks.large_checkpoints", "--child", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(folder: str) -> dict[str, Any]:
    measure(torch.nn.Linear(4, 4))  # what is imported late belongs to the start
    before, start, cpu = _peak(), time.perf_counter(), time.process_time()
    found = measure(folder)
    return {
        "peak before": before,
        "peak": _peak(),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu seconds": round(time.process_time() - cpu, 1),
        "tensors": len(found),
        "measured": len(found.layers),
        "coverage": found.coverage,
        "findings": len(found.findings),
        "largest sigma error": max(t.sigma_error or 0.0 for t in found.layers),
        "largest alignment error": max(t.alignment_error or 0.0 for t in found.layers),
    }


def _peak() -> int:
    """Most bytes that were resident at once, the mapped pages of files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main(layers: int, folder: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        parameters = write(Path(made), layers)
        start = time.process_time()
        headers = outline(made)
        seconds = time.process_time() - start
        found = measured_alone(Path(made))
    largest = 2 * max(prod(shape) for _, shape in tensors(layers))
    return {
        "parameters": parameters,
        "bytes": 2 * parameters,
        "largest tensor": largest,
        "allowed peak": 2 * largest + ALLOWED,
        "threads": torch.get_num_threads(),
        "header cpu seconds": round(seconds, 4),
        "header tensors": len(headers),
        **found,
        "machine": describe(),
        "versions": versions(),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2])))
    else:
        layers = int(sys.argv[1]) if len(sys.argv) > 1 else 32
        rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        rows[str(layers)] = main(layers, sys.argv[2] if len(sys.argv) > 2 else None)
        RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(rows[str(layers)], indent=1))
        sys.exit(int(rows[str(layers)]["peak"] > rows[str(layers)]["allowed peak"]))
