"""Images with augmentation per item, as a task and as a training script; user code as far as gonio knows.

`GONIO_FASHION_MNIST` is the folder with the four files of Fashion-MNIST; without it the images are made up.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gonio.lab import Run, Split, Task, TrainingConfig
from gonio.lab.tasks import fashion_mnist
from gonio.models import digits_cnn

EPOCHS, BATCH, RATE, AVERAGE, WORKERS = 3, 25, 0.1, 0.9, 4
SIZES = {"train": 300, "validation": 200, "test": 500}


class Shifted(Dataset[Any]):
    """Images moved by up to two pixels, each time elsewhere, and mirrored half of the time."""

    def __init__(self, split: Any) -> None:
        self.inputs, self.targets = split.inputs, split.targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        down, right = torch.randint(0, 5, (2,)).tolist()
        image = F.pad(self.inputs[index], (2, 2, 2, 2))[:, down : down + 14, right : right + 14]
        return image.flip(2) if torch.rand(()) < 0.5 else image, int(self.targets[index])


def splits() -> dict[str, Split]:
    folder = os.environ.get("GONIO_FASHION_MNIST")
    if folder:
        known = fashion_mnist(folder).splits
        return {name: Split(*known[name].take(range(count))) for name, count in SIZES.items()}
    draw = torch.Generator().manual_seed(0)
    shapes = F.interpolate(torch.randn(10, 1, 5, 5, generator=draw), (14, 14), mode="bilinear")
    found = {}
    for name, count in SIZES.items():
        targets = torch.arange(count) % 10
        found[name] = Split(shapes[targets] + 0.5 * torch.randn(count, 1, 14, 14, generator=draw), targets)
    return found


def task() -> Task:
    parts: dict[str, Any] = splits()
    return Task(
        name="fashion",
        train=Shifted(parts["train"]),  # type: ignore[arg-type]
        validation=parts["validation"],
        test=parts["test"],
        model="digits-cnn",
        sizes={"num_classes": 10, "in_channels": 1},
        training=TrainingConfig(epochs=EPOCHS, batch_size=BATCH, lr=RATE),
        sesoi=1.0,
    )


def train(run: Run) -> float:
    """The same training in plain torch: bf16 autocast, one cycle, a moving average of the parameters."""
    parts = splits()
    model = digits_cnn(num_classes=10, in_channels=1)
    run.apply_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    loader = DataLoader(Shifted(parts["train"]), BATCH, shuffle=True, num_workers=WORKERS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=EPOCHS * len(loader) + 1, cycle_momentum=False
    )
    average = copy.deepcopy([*model.parameters()])
    for epoch in range(EPOCHS):
        for x, y in loader:
            with run.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                (loss + run.penalty()).backward()
                optimizer.step()
            schedule.step()
            with torch.no_grad():
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    mean.lerp_(parameter, 1 - AVERAGE)
        run.log(epoch, train_loss=loss)
    with torch.no_grad():
        for mean, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(mean)
        return 100 * float((model.eval()(parts["test"].inputs).argmax(1) == parts["test"].targets).float().mean())


def smallest() -> nn.Module:
    """For a quick look at the task: `--model tests/slow/fashion.py:smallest`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 10))
