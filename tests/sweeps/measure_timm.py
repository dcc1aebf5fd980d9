"""`gonio measure` on every architecture of timm: shapes on the meta device, figures with random weights.

    PYTHONPATH=tests python -m sweeps.measure_timm meta --out meta.jsonl
    PYTHONPATH=tests python -m sweeps.measure_timm weights --out weights.jsonl

One JSON line per model; the same command run again goes on where the last one stopped. Each model runs in a
process of its own with a time limit, so that nothing of one model, its memory included, reaches the next.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import torch
from torch import nn

import gonio
from foreign import timm
from gonio.measuring import Measurements

__all__ = ["SWEEPS", "build", "main", "on_meta", "with_weights"]

MOST_PARAMETERS = 30_000_000


def build(name: str, device: str) -> nn.Module:
    """The architecture with torch's and timm's own initialisation."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = timm().create_model(name, pretrained=False)
    return model


def on_meta(name: str, **_: int) -> dict[str, Any]:
    """Shapes and layouts of a model without memory; one whose constructor reads values is built in memory."""
    try:
        model = build(name, "meta")
    except (RuntimeError, NotImplementedError) as error:
        built = f"in memory, because on meta: {type(error).__name__}: {str(error).splitlines()[0]}"
        model = build(name, "cpu").to("meta")
    else:
        built = "on meta"
    measured = gonio.measure(model)
    _check(measured, model)
    weights = [t for t in measured.values() if len(t.shape) >= 2 and t.name.endswith("weight")]
    laid_out = [t for t in weights if t.filters is not None or "tied" in t.reason]
    return {"built": built, "weights": len(weights), "laid out": len(laid_out), **_size(measured)}


def with_weights(name: str, *, most: int = MOST_PARAMETERS) -> dict[str, Any]:
    """Every figure of a model with random weights, unless it has more than `most`."""
    shapes = build(name, "meta")
    parameters = sum(p.numel() for p in shapes.parameters())
    if parameters > most:
        return {"outcome": f"left out: {parameters} parameters"}
    model = build(name, "cpu")
    start = time.perf_counter()
    measured = gonio.measure(model)
    seconds = round(time.perf_counter() - start, 2)
    _check(measured, model)
    skipped = [t.path for t in measured.values() if t.status == "skipped" and "tied" not in t.reason]
    findings = dict(Counter(finding.code for finding in measured.findings))
    return {"seconds": seconds, "skipped": skipped, "findings": findings, **_size(measured)}


def _check(measured: Measurements, model: nn.Module) -> None:
    """Every tensor has a row with figures or a reason, and the whole can be shown."""
    named, state = {t.name for t in measured.values()}, model.state_dict(keep_vars=True)
    seen = {id(tensor) for name, tensor in state.items() if name in named}  # a shared layer has several names
    missing = [name for name, tensor in state.items() if name not in named and id(tensor) not in seen]
    assert not missing, f"no row for {missing[:5]}"
    assert all(t.status == "measured" or t.reason for t in measured.values()), "a row without figures and reason"
    assert str(measured)
    assert measured.coverage


def _size(measured: Measurements) -> dict[str, int]:
    return {
        "tensors": len(measured),
        "layers": len(measured.layers),
        "entries": sum(t.entries for t in measured.values()),
    }


SWEEPS: dict[str, Callable[..., dict[str, Any]]] = {"meta": on_meta, "weights": with_weights}


def _child(sweep: str, name: str, most: int, send: Connection) -> None:
    torch.set_num_threads(1)
    try:
        send.send({"outcome": "passed", **SWEEPS[sweep](name, most=most)})
    except Exception as error:  # the outcome for this model; the sweep goes on
        send.send({"outcome": f"failed: {type(error).__name__}: {error}"[:400]})


def run(sweep: str, name: str, *, seconds: float, most: int) -> dict[str, Any]:
    """One model in a process of its own."""
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(sweep, name, most, send))
    child.start()
    send.close()
    try:
        if not receive.poll(seconds):
            return {"model": name, "outcome": f"unfinished: {seconds:.0f} s are over"}
        return {"model": name, **receive.recv()}
    except EOFError:
        child.join()
        return {"model": name, "outcome": f"failed: the process ended with {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts of outcomes, and everything that is not as it should be by name."""
    counts = Counter(row["outcome"].split(":")[0] for row in rows)
    lines = [f"{len(rows)} models: {', '.join(f'{n} {what}' for what, n in counts.items())}"]
    lines += [f"  {row['model']}: {row['outcome']}" for row in rows if row["outcome"].startswith(("failed", "unf"))]
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """The command; 1 if any model failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600, help="limit per model")
    parser.add_argument("--most", type=int, default=MOST_PARAMETERS, help="parameters of a model, with weights")
    parser.add_argument("--stride", type=int, default=1, help="take every n-th architecture")
    options = parser.parse_args(words)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {row["model"] for row in rows}
    with options.out.open("a", encoding="utf-8") as out:
        for name in timm().list_models()[:: options.stride]:
            if name not in done:
                rows.append(run(options.sweep, name, seconds=options.seconds, most=options.most))
                out.write(json.dumps(rows[-1]) + "\n")
                out.flush()
    sys.stdout.write(summary(rows) + "\n")
    return int(any(row["outcome"].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
