"""A task and models so small that a run takes a fraction of a second; user code as far as gonio knows.

Studies in the tests name it as `…/tiny.py:task` and `…/tiny.py:model`.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

from gonio.lab import Split, Task, TrainingConfig


def task() -> Task:
    """Which quadrant a noisy 2-d point came from; with a dropped last batch and an augmentation."""
    draw = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        targets = torch.arange(count) % 4
        corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        points = corners[targets] + torch.randn(count, 2, generator=draw)
        return Split(points[:, None, None, :].repeat(1, 1, 2, 1), targets)

    return Task(
        name="tiny",
        train=split(33),
        validation=split(64),
        test=split(128),
        model=f"{__file__}:model",
        sizes={"num_classes": 4, "in_channels": 1},
        training=TrainingConfig(epochs=4, batch_size=8, lr=0.1),
        sesoi=5.0,
        augment=lambda x, generator: x + 0.1 * torch.randn(x.shape, generator=generator),
    )


def model(num_classes: int, in_channels: int) -> nn.Module:
    """Has a convolution, a norm layer, dropout (global generator) and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def slow_model(num_classes: int, in_channels: int) -> nn.Module:
    """A model whose run takes a second, most of it asleep."""
    time.sleep(1)
    return model(num_classes, in_channels)


class Mishap(nn.Module):
    """Does something bad in the fourth step of training, which no plan takes, if the model's initial weights say so.

    Which of a study's runs that is depends on the seed alone: a recipe's run and its baseline's alike.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.happens, self.steps = float(torch.rand(())) < 0.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if not (self.happens and self.training and self.steps > 3):
            return x
        if self.what == "raise":
            raise RuntimeError("<b>no</b> memory")
        return x * float("nan")


def _with(what: str) -> nn.Module:
    return nn.Sequential(Mishap(what), model(4, 1))


def raising_model() -> nn.Module:
    """Half of the seeds raise."""
    return _with("raise")


def diverging_model() -> nn.Module:
    """Half of the seeds have a loss that is not a number."""
    return _with("diverge")


def regression() -> Task:
    """A task whose metric falls and has no worst value."""
    from gonio.lab.tasks import Metric

    kept = task()
    metric = Metric("error", lambda outputs, targets: float(F.cross_entropy(outputs, targets)), "min")
    return Task(**{**vars(kept), "name": "regression", "metric": metric, "sesoi": 0.1})
