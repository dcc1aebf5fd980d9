"""The matrix of methods and settings: recorded from test results, written as a page.

As a plugin of pytest (`-p laws.matrix --matrix docs/matrix.json`) it records, for each test marked
``matrix("setting")``, the method that its parameter names and the outcome: passed, refused with a sentence, or failed.
As a program (`python -m laws.matrix docs/matrix.json docs/matrix.md`) it writes the page, and refuses a matrix with an
empty or a failing cell.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import torch

from laws.settings import SUBJECTS, row_of

SETTINGS = {
    "compile": "`torch.compile` without a graph break or a recompilation after the first call",
    "autocast": "bfloat16 autocast; norms and penalties keep their precision",
    "checkpoint": "activation checkpointing: the gradient is that of the plain step",
    "func": "`torch.func.grad`, `jvp` and `vmap`",
    "DDP": "two processes, each with half of the batch, equal one process on all of it",
    "FSDP2": "as DDP, with `fully_shard`",
    "HSDP": "as DDP, with `fully_shard` on a mesh of two dimensions; rules on outputs need `process_group=`",
    "TP": "`parallelize_module` with `ColwiseParallel`",
    "DCP": "a sharded training, saved and loaded by `torch.distributed.checkpoint`, `measure` and `Tracker` on the way",
    "fake accelerator": "no mix of devices, and no step that waits for the CPU",
    "Lightning": "`Trainer.fit` equals the loop by hand",
    "HF": "`transformers.Trainer` equals the loop by hand",
    "Accelerate": "`Accelerator.prepare`, `backward` and `save_model`",
    "export": "`torch.export`",
    "ONNX": "`torch.onnx.export`, run by onnxruntime; parametrized layers are folded first",
    "int8": "dynamic quantisation of linear layers; parametrized ones are folded first, decoupled ones stay in floats",
    "safetensors": "`save_model` and `load_model`",
    "meta": "built on the meta device, allocated by `to_empty`, loaded",
}
ROWS = [subject.name for subject in SUBJECTS]
Cells = dict[str, dict[str, str]]  # row -> setting -> "passed", "refused: …" or "failed: …"


# --- the plugin -------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", help="write the matrix of methods and settings to this JSON file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the cell of each test; a slow test runs only where no other fills its cell."""
    if not config.getoption("--matrix"):
        return
    kept, left, fast = [], [], set()
    for item in sorted(items, key=lambda item: item.get_closest_marker("slow") is not None):
        marker, row = item.get_closest_marker("matrix"), _row(item)
        cell = (row, marker.args[0]) if marker is not None and row in ROWS else None
        if cell is None or (item.get_closest_marker("slow") is not None and cell in fast):
            left.append(item)
            continue
        if item.get_closest_marker("slow") is None:
            fast.add(cell)
        item.user_properties.append(("cell", cell))
        kept.append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _row(item: pytest.Item) -> str | None:
    parameters = getattr(item, "callspec", None)
    if parameters is None:
        return None
    given = parameters.params.get("case") or parameters.params.get("name") or parameters.params.get("subject")
    name = getattr(given, "name", given)
    for what in ("module ", "penalty ", "tick ", "attach "):  # of the fake accelerator
        name = name.removeprefix(what) if isinstance(name, str) else name
    return row_of(name) if isinstance(name, str) else None


class Recorder:
    """The worst outcome of each cell: one failing test fails it, one refusal is said. Others stay as they were."""

    def __init__(self, path: Path) -> None:
        before = json.loads(path.read_text())["cells"] if path.exists() else {}
        self.path = path
        self.cells: Cells = {row: dict(before.get(row, {})) for row in ROWS}
        self.run: set[tuple[str, str]] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "cell" not in properties or (report.when != "call" and report.passed):
            return
        row, setting = properties["cell"]
        refusal = properties.get("refused")
        now = "passed" if refusal is None else f"refused: {refusal}"
        now = now if report.passed else f"{report.outcome}: {report.nodeid}"
        before = self.cells[row][setting] if (row, setting) in self.run else "passed"
        self.run.add((row, setting))
        order = ["passed", "refused", "skipped", "failed"]
        self.cells[row][setting] = max(before, now, key=lambda cell: order.index(cell.split(":")[0]))

    def pytest_sessionfinish(self) -> None:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        document = {"versions": versions, "cells": self.cells}
        self.path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--matrix")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)))


# --- the page ---------------------------------------------------------------------------------------


def problems(cells: Cells) -> list[str]:
    """Each cell that is empty, skipped or failed."""
    found = []
    for row in ROWS:
        for setting in SETTINGS:
            cell = cells.get(row, {}).get(setting, "empty")
            if not cell.startswith(("passed", "refused")):
                found.append(f"{row} × {setting}: {cell}")
    return found


def page(document: dict[str, object]) -> str:
    """The page in Markdown: two tables, the refusals, what each setting is."""
    cells: Cells = document["cells"]  # type: ignore[assignment]
    versions: dict[str, str] = document["versions"]  # type: ignore[assignment]
    sentences = list(dict.fromkeys(c for row in ROWS for c in cells[row].values() if c.startswith("refused")))
    names = list(SETTINGS)
    parts = [
        "# What was tested where",
        "Every method in every setting of training and of export. ✓: a test compares it with the plain loop, or with "
        "the model before, and passes. A number: it is refused, with the sentence below. The page is written by "
        f"`make matrix` from test results (torch {versions['torch']}, Python {versions['python']}, CPU; several "
        "processes by gloo).",
        _table("While training", names[:10], cells, sentences),
        _table("Trainers and formats", names[10:], cells, sentences),
        "## What is refused",
        "\n".join(f"{n}. {sentence.removeprefix('refused: ')}" for n, sentence in enumerate(sentences, start=1)),
        "## What each column is",
        "\n".join(f"- **{name}**: {text}." for name, text in SETTINGS.items()),
        "FSDP 1 (`FullyShardedDataParallel`) has no column: it keeps weights as slices of one flat vector, so that "
        "parametrized layers and penalties are refused there. Use FSDP 2.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(title: str, settings: list[str], cells: Cells, sentences: list[str]) -> str:
    def shown(cell: str) -> str:
        return "✓" if cell == "passed" else str(sentences.index(cell) + 1)

    head = f"| | {' | '.join(settings)} |\n|---|{'|'.join([':-:'] * len(settings))}|"
    rows = [f"| {row} | {' | '.join(shown(cells[row][s]) for s in settings)} |" for row in ROWS]
    return f"## {title}\n\n" + "\n".join([head, *rows])


def main(source: str, target: str) -> None:
    document = json.loads(Path(source).read_text())
    wrong = problems(document["cells"])
    if wrong:
        raise SystemExit("the matrix has empty or failing cells:\n" + "\n".join(wrong))
    Path(target).write_text(page(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
