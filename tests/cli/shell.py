"""Run the command line as a shell would, and in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'gonio'; from gonio.cli import main; main()"]

# Three classes of noisy 8 × 8 prototypes; a run takes a fraction of a second.
TASK = """
import time
import torch
from torch import nn
from gonio.lab.plan import TrainingConfig
from gonio.lab.tasks.task import Split, Task


def tiny():
    random = torch.Generator().manual_seed(0)
    prototypes = torch.randn(3, 1, 8, 8, generator=random)

    def split(count):
        targets = torch.arange(count) % 3
        return Split(prototypes[targets] + torch.randn(count, 1, 8, 8, generator=random), targets)

    return Task(
        name="tiny", train=split(24), validation=split(12), test=split(30), model="digits-cnn",
        sizes={"num_classes": 3, "in_channels": 1},
        training=TrainingConfig(epochs=1, batch_size=12, lr=0.05), sesoi=1.0,
    )


def linear(num_classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


class Broken(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 2:  # not in the first step of a check, with a batch of 2
            raise RuntimeError("the network is broken")
        return super().forward(x)


def broken():
    return nn.Sequential(nn.Flatten(), Broken(64, 3))


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)


def slow():
    return nn.Sequential(nn.Flatten(), Slow(64, 3))


def no_task():
    raise ValueError("no data today")


def no_model():
    return 3
"""


# The caller's own training, for --script.
SCRIPT = """
import torch


def train(run):
    model = torch.nn.Linear(4, 2)
    run.apply_(model)
    return float(model.weight.square().sum())
"""


def write_task(folder: Path) -> str:
    """A file with a task and models, and its name."""
    (folder / "tiny.py").write_text(TASK, encoding="utf-8")
    return "tiny.py"


def invoke(*words: str) -> Result:
    """The command in this process; an exception that the command line let through is raised here."""
    from gonio.cli import app

    wide = {"COLUMNS": "100"}  # what a table shows depends on it
    return CliRunner().invoke(app, [str(word) for word in words], env=wide, catch_exceptions=False)


def shell(*words: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    options.setdefault("env", {**os.environ, "COLUMNS": "100"})
    return subprocess.run(
        [*COMMAND, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600, check=False, **options
    )
