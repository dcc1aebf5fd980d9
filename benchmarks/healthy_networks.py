"""Small networks of six architectures, trained on handwritten digits until they classify them; in seconds on one core.

A network depends on its number alone: architecture, widths, optimizer, learning rate and weight decay.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

__all__ = ["ARCHITECTURES", "LEARNT", "accuracy", "batch", "digits", "healthy"]

LEARNT = 0.9  # accuracy on images that were not trained on: a network below it is left out
EPOCHS = 15
BATCH = 64
TRAINED_ON = 1500  # of 1797 images


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All images (N, 1, 8, 8) with mean 0 and variance 1, shuffled, and their classes."""
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order].view(-1, 1, 8, 8)
    return (x - x.mean()) / x.std(), torch.tensor(classes)[order]


def batch() -> Tensor:
    """Images that no network was trained on."""
    return digits()[0][TRAINED_ON : TRAINED_ON + BATCH]


def perceptron(pick: random.Random) -> nn.Module:
    widths = [64, *(pick.choice([32, 64, 128]) for _ in range(pick.choice([1, 2, 3])))]
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 10))


def normalised_perceptron(pick: random.Random) -> nn.Module:
    width = pick.choice([32, 64, 96])
    layers = [
        part
        for a in (64, *[width] * pick.choice([1, 2]))
        for part in (nn.Linear(a, width), nn.LayerNorm(width), nn.GELU())
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))


def convolutional(pick: random.Random) -> nn.Module:
    width = pick.choice([16, 24, 32])
    body = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * width, 10))


def batch_normalised(pick: random.Random) -> nn.Module:
    widths = [1, pick.choice([16, 24]), pick.choice([24, 32]), pick.choice([32, 48])]
    layers = [
        part
        for a, b in pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Residual(nn.Module):
    """Two residual blocks with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """The rows of an image as eight tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.positions = nn.Parameter(torch.randn(8, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.positions).mean(1))


ARCHITECTURES = {
    "perceptron": perceptron,
    "perceptron with layer norm": normalised_perceptron,
    "convolutional": convolutional,
    "convolutional with batch norm": batch_normalised,
    "residual with batch norm": lambda pick: Residual(pick.choice([24, 32])),
    "transformer": lambda pick: Transformer(pick.choice([32, 48])),
}


def healthy(number: int) -> tuple[str, nn.Module, float]:
    """The architecture's name, the network in evaluation mode, and its accuracy."""
    pick = random.Random(number)
    name = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
    torch.manual_seed(number)  # torch's own initialisations read the global generator
    model = ARCHITECTURES[name](pick)
    decay = pick.choice([0.0, 1e-4, 5e-4])
    if name == "transformer" or pick.random() < 0.5:
        lr = pick.choice([1e-3, 2e-3])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=pick.choice([0.02, 0.05]), momentum=0.9, weight_decay=decay)
    x, y = digits()
    for _ in range(EPOCHS):
        for part in torch.randperm(TRAINED_ON).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return name, model.eval(), accuracy(model)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the images it was not trained on that it classifies right; NaN counts as wrong."""
    x, y = digits()
    right = model(x[TRAINED_ON:]).argmax(1) == y[TRAINED_ON:]
    return float(right.double().mean())
