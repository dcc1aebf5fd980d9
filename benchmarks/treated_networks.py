"""Networks on images, text, points and regression, each with the task that it was trained on; in seconds on one core.

The images and their six architectures are those of `healthy_networks.py`. A network depends on its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import sklearn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.healthy_networks import ARCHITECTURES, TRAINED_ON, digits
from benchmarks.healthy_networks import healthy as image_network
from gonio.lab import Split, Task, TrainingConfig
from gonio.lab.tasks import ACCURACY, Metric, points

__all__ = ["KINDS", "Network", "network", "score"]

SIZES = (1500, 250, 500)  # training, validation and test examples of text and regression
WINDOW = 56  # bytes
LEARNT = {"digits": 90.0, "text": 80.0, "points": 75.0, "regression": 90.0}  # a network below it is left out


def explained(outputs: Tensor, targets: Tensor) -> float:
    """Explained variance in per cent of targets whose variance is 1: 100 · (1 − mean squared error)."""
    return float(100 * (1 - (outputs.double() - targets.double()).square().mean()))


@dataclass(frozen=True)
class Network:
    """A trained network in evaluation mode, its task, and its score on the test split."""

    architecture: str
    model: nn.Module
    task: Task
    score: float

    @property
    def learnt(self) -> bool:
        return self.score >= LEARNT[self.task.name]


# --- tasks -----------------------------------------------------------------------------------------------------------


@cache
def images() -> Task:
    """The images that the networks were trained on; further ones to prove, and others to score."""
    inputs, classes = digits()
    middle = TRAINED_ON + (len(inputs) - TRAINED_ON) // 2
    parts = (slice(TRAINED_ON), slice(TRAINED_ON, middle), slice(middle, None))
    return _task("digits", *(Split(inputs[part], classes[part]) for part in parts))


@cache
def text() -> Task:
    """What a window of 56 bytes is from: scikit-learn's descriptions of data, its Python source, torch's C++."""
    sources = (
        Path(sklearn.__file__).parent.glob("datasets/descr/*.rst"),
        Path(sklearn.__file__).parent.glob("linear_model/*.py"),
        Path(torch.__file__).parent.glob("include/ATen/*.h"),
    )
    count = sum(SIZES) // len(sources)
    random_order = torch.Generator().manual_seed(0)
    kinds = []
    for files in sources:
        raw = b"".join(file.read_bytes() for file in sorted(files))
        starts = torch.randperm(len(raw) // WINDOW, generator=random_order)[:count] * WINDOW
        kinds.append(torch.stack([torch.tensor(list(raw[at : at + WINDOW])) for at in starts.tolist()]))
    windows, classes = torch.cat(kinds), torch.arange(len(kinds)).repeat_interleave(count)
    order = torch.randperm(len(windows), generator=random_order)
    parts = zip(windows[order].split(SIZES), classes[order].split(SIZES), strict=True)
    return _task("text", *(Split(*part) for part in parts))


@cache
def clouds() -> Task:
    """Solids as clouds of points, each seen from five sides in training."""
    whole = points()
    train, test = whole.train, whole.test
    turn = torch.arange(5) * 1.2566
    turns = torch.stack([torch.tensor([[a.cos(), -a.sin(), 0], [a.sin(), a.cos(), 0], [0, 0, 1]]) for a in turn])
    seen = Split((turns[:, None] @ train.inputs).flatten(0, 1), train.targets.repeat(5))
    return _task("points", seen, whole.validation, Split(test.inputs[:600], test.targets[:600]))


@cache
def regression() -> Task:
    """Friedman's first function of ten numbers, with noise (J. H. Friedman, Annals of Statistics 19, 1991)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(sum(SIZES), 10, generator=generator)
    noise = 0.3 * torch.randn(len(x), generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + noise
    x, y = (x - 0.5) * 12**0.5, ((y - y.mean()) / y.std())[:, None]
    splits = [Split(*part) for part in zip(x.split(SIZES), y.split(SIZES), strict=True)]
    return _task("regression", *splits, metric=Metric("explained variance", explained, "max", "%"), loss=F.mse_loss)


def _task(
    name: str, train: Split, validation: Split, test: Split, *, metric: Metric = ACCURACY,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Task:  # fmt: skip
    return Task(
        name=name, train=train, validation=validation, test=test, model="", sizes={}, sesoi=1.0, metric=metric,
        loss=loss, training=TrainingConfig(epochs=1, batch_size=64, lr=0.05),
    )  # fmt: skip


# --- networks --------------------------------------------------------------------------------------------------------


class Bytes(nn.Module):
    """The tokens of a window, embedded, as an encoder or a convolution reads them."""

    def __init__(self, width: int, *, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.1 * torch.randn(WINDOW, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        conv = nn.Conv1d(width, 2 * width, 5, padding=2, bias=False)
        self.body = block if attends else nn.Sequential(conv, nn.BatchNorm1d(2 * width), nn.ReLU())
        self.attends = attends
        self.hidden = nn.Linear(width if attends else 2 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions
        x = self.body(x).mean(1) if self.attends else self.body(x.mT).mean(2)
        return self.head(F.relu(self.hidden(x)))


class PointNet(nn.Module):
    """Each point alone, then the largest value of each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.points = nn.Sequential(*[
            part
            for a, b in pairwise(widths)
            for part in (nn.Conv1d(a, b, 1, bias=False), nn.BatchNorm1d(b), nn.ReLU())
        ])  # fmt: skip
        self.head = nn.Sequential(nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(2))


def plain_regressor(pick: random.Random) -> nn.Module:
    width = pick.choice([32, 64])
    hidden = [nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def normalised_regressor(pick: random.Random) -> nn.Module:
    widths = (10, pick.choice([32, 48]), pick.choice([48, 64]))
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


@dataclass(frozen=True)
class Kind:
    """An architecture with its task."""

    make: Callable[[random.Random], nn.Module]
    task: Callable[[], Task]
    epochs: int


KINDS: dict[str, Kind | None] = {  # None: one of the images
    "perceptron": None,
    "regression perceptron with batch norm": Kind(normalised_regressor, regression, 40),
    "perceptron with layer norm": None,
    "text convolutional with batch norm": Kind(lambda pick: Bytes(pick.choice([16, 24]), attends=False), text, 8),
    "regression perceptron": Kind(plain_regressor, regression, 40),
    "convolutional": None,
    "points with batch norm": Kind(lambda pick: PointNet(pick.choice([12, 16])), clouds, 8),
    "convolutional with batch norm": None,
    "text transformer": Kind(lambda pick: Bytes(pick.choice([16, 24, 32]), attends=True), text, 8),
    "residual with batch norm": None,
    "transformer": None,
}


def network(number: int) -> Network:
    """The network of a number; kinds alternate."""
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    if kind is None:
        place = list(ARCHITECTURES).index(name)
        name, model, _ = image_network(number * len(ARCHITECTURES) + place)
        return Network(name, model, images(), score(model, images()))
    pick = random.Random(number)
    torch.manual_seed(number)  # torch's own initialisations read the global generator
    model, task = kind.make(pick), kind.task()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=pick.choice([2e-3, 4e-3]), weight_decay=pick.choice([0.0, 1e-2])
    )
    for _ in range(kind.epochs):
        for part in torch.randperm(len(task.train)).split(64):
            optimizer.zero_grad()
            inputs, targets = task.train.take(part)  # type: ignore[arg-type]
            task.loss(model(inputs), targets).backward()
            optimizer.step()
    return Network(name, model.eval(), task, score(model, task))


@torch.no_grad()
def score(model: nn.Module, task: Task) -> float:
    """The metric on images, windows or points that proved nothing, at least 0; 0 if an output is not finite."""
    outputs = model.eval()(task.test.inputs)
    return max(0.0, task.metric.function(outputs, task.test.targets)) if bool(torch.isfinite(outputs).all()) else 0.0
