"""Memory and time of `gonio measure` on synthetic bf16 checkpoints of a billion parameters and more.

    python -m benchmarks.large_checkpoints [layers] [folder]
    python -m benchmarks.large_checkpoints --pair [layers] [folder]

The file has the tensors of a decoder-only transformer (a vocabulary of 32,000; width 4096; 11,008 hidden
units; 32 layers are 6.7 billion parameters) in shards with an index, filled from one pool of normal numbers at
a different place for each tensor. It is measured by a process of its own, whose peak of resident memory the
kernel keeps; the file is deleted afterwards. With `--pair` the weights have falling singular values, as trained ones
do, and a second checkpoint with a dense change of 2 % is compared with the first; 4 layers are 1.1 billion parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.machine import describe, versions
from gonio import measure
from gonio.measuring import outline

RESULT = Path(__file__).resolve().parent / "results" / "large_checkpoints.json"
WIDTH, HIDDEN, VOCABULARY = 4096, 11008, 32000
SHARD = 2 << 30  # bytes
ALLOWED = 300 * 10**6  # bytes beyond twice the largest tensor of each source
CHANGE = 0.02  # of a weight's norm, in the second checkpoint
POOL = 10_000_019  # places in the pool at which a tensor can begin, a prime


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


def write(folder: Path, layers: int, *, falling: bool = False, change: float = 0.0) -> int:
    """The shards and their index; how many parameters there are."""
    largest = max(prod(shape) for _, shape in tensors(layers))
    pool = torch.randn(largest + 2 * POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    where: dict[str, str] = {}
    shards = list(_shards(layers))
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({tensor: _drawn(tensor, shape, pool, falling, change) for tensor, shape in shard}, folder / name)
        where |= dict.fromkeys((tensor for tensor, _ in shard), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(prod(shape) for _, shape in tensors(layers))


def _drawn(name: str, shape: tuple[int, ...], pool: Tensor, falling: bool, change: float) -> Tensor:
    """Numbers from a place in the pool that depends on the name; column j scaled by (j + 1)^-0.4 if they shall fall."""
    place, size = sum(map(ord, name)) * 7919 % POOL, prod(shape)
    made = pool[place : place + size].view(shape)
    if falling and made.ndim == 2:
        made = made * torch.arange(1.0, shape[1] + 1).pow(-0.4)
    if change:
        noise = pool[place + POOL : place + POOL + size].view(shape)
        made = made + noise * (change * made.norm() / noise.norm())
    return made.bfloat16()


def _shards(layers: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    shard: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in tensors(layers):
        if sum(2 * prod(s) for _, s in shard) + 2 * prod(shape) > SHARD:
            yield shard
            shard = []
        shard.append((name, shape))
    yield shard


def measured_alone(*folders: Path) -> dict[str, Any]:
    """What the child prints: its peaks, before and after, and the time."""
    command = [sys.executable, "-m", "benchmarks.large_checkpoints", "--child", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(folders: list[str]) -> dict[str, Any]:
    measure(torch.nn.Linear(4, 4))  # what is imported late belongs to the start
    before, start, cpu = _peak(), time.perf_counter(), time.process_time()
    found: Any = measure(*folders)
    spent = {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu seconds": round(time.process_time() - cpu, 1),
    }
    peaks = {"peak before": before, "peak": _peak(), **spent, "findings": len(found.findings)}
    if len(folders) > 1:
        return peaks | {"tensors": len(found.tensors), "intruders": sum(t.intruders or 0 for t in found.tensors)}
    return peaks | {
        "tensors": len(found),
        "measured": len(found.layers),
        "coverage": found.coverage,
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


def pair(layers: int, folder: str | None) -> dict[str, Any]:
    """Two checkpoints compared, beside one of them measured."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        base, tuned = Path(made) / "base", Path(made) / "tuned"
        for path, change in ((base, 0.0), (tuned, CHANGE)):
            path.mkdir()
            parameters = write(path, layers, falling=True, change=change)
        one, two = measured_alone(base), measured_alone(base, tuned)
    largest = 2 * max(prod(shape) for _, shape in tensors(layers))
    return {
        "parameters": parameters,
        "largest tensor": largest,
        "allowed peak": 2 * 2 * largest + ALLOWED,
        "threads": torch.get_num_threads(),
        "ratio": round(two["seconds"] / one["seconds"], 2),
        "ratio of cpu seconds": round(two["cpu seconds"] / one["cpu seconds"], 2),
        **two,
        "one": one,
        "machine": describe(),
        "versions": versions(),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--child"]:
        print(json.dumps(child(words[1:])))
    else:
        paired = words[:1] == ["--pair"]
        words = words[1:] if paired else words
        layers = int(words[0]) if words else 4 if paired else 32
        rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        key, run = (f"{layers}, pair", pair) if paired else (str(layers), main)
        rows[key] = run(layers, words[1] if len(words) > 1 else None)
        RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(rows[key], indent=1))
        sys.exit(int(rows[key]["peak"] > rows[key]["allowed peak"]))
