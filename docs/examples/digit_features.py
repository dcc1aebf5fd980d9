"""A network whose last features have two dimensions, plain and decoupled: class by angle, confidence by length.

    python docs/examples/digit_features.py

It trains on scikit-learn's handwritten digits for about half a minute on one core, prints a table and draws
docs/images/digit-features.png. Needs the extra `lab`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gonio
from gonio.nn import magnitude

IMAGE = Path(__file__).parents[1] / "images" / "digit-features.png"
HELD_OUT = 500
EPOCHS = 60


@dataclass(frozen=True)
class Features:
    """What a network makes of the digits that it was not trained on."""

    points: Tensor  # (digits, 2)
    directions: Tensor  # (10, 2): the classifier's rows
    confidence: Tensor  # the largest probability
    right: Tensor
    labels: Tensor


def network() -> nn.Sequential:
    """Without biases at the end: the class of a feature is then decided by its direction alone."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(256, 2, bias=False),
        nn.Linear(2, 10, bias=False),
    )


def decouple_(model: nn.Module) -> None:
    """Bounded convolutions, and linear layers that take lengths as they are but have unit filters."""
    gonio.swap_(model, gonio.nn.DecoupledConv2d.from_conv, where=nn.Conv2d, magnitude=magnitude.Tanh())
    gonio.swap_(model, gonio.nn.DecoupledLinear.from_linear, where=nn.Linear, magnitude=magnitude.Linear())


def train_(model: nn.Sequential, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps = EPOCHS * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=order)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def look(model: nn.Sequential, images: Tensor, labels: Tensor) -> Features:
    model.eval()
    points = model[:-1](images)
    probabilities = model[-1](points).softmax(1)
    confidence, found = probabilities.max(1)
    return Features(points, F.normalize(model[-1].weight), confidence, found == labels, labels)


def describe(name: str, seen: Features) -> str:
    """Accuracy, how well angles alone tell classes, and how lengths of right and wrong answers compare."""
    length = seen.points.norm(dim=1)
    ranks = torch.stack([length, seen.confidence]).argsort(1).argsort(1).double()
    relative = length / length.median()
    right, wrong = relative[seen.right].median(), relative[~seen.right].median()
    return (
        f"| {name} | {seen.right.double().mean():.1%} | {torch.corrcoef(ranks)[0, 1]:.2f} | {right:.2f} | {wrong:.2f} |"
    )


def draw(ax: Axes, title: str, seen: Features) -> None:
    points = seen.points / seen.points.norm(dim=1).max()
    colors = mpl.colormaps["tab10"](seen.labels.numpy())
    for x, y in seen.directions.tolist():
        ax.plot([0, x], [0, y], color="0.8", linewidth=0.8, zorder=0)
    for chosen, marker, size in ((seen.right, "o", 5), (~seen.right, "x", 30)):
        ax.scatter(*points[chosen].T.numpy(), c=colors[chosen.numpy()], s=size, marker=marker, linewidths=1)
    for digit in range(10):
        of_class = points[seen.labels == digit]
        ax.annotate(str(digit), (1.12 * F.normalize(of_class.mean(0), dim=0)).tolist(), ha="center", va="center")
    ax.set(title=title, xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal", xticks=[], yticks=[])


def main(image: Path) -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.as_tensor(digits.target)
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    print("| network | accuracy | rank correlation of length and confidence | length where right | where wrong |")
    print("|---|--:|--:|--:|--:|")
    for ax, name in zip(figure.subplots(1, 2), ("plain", "decoupled"), strict=True):
        torch.manual_seed(0)
        model = network()
        if name == "decoupled":
            decouple_(model)
        train_(model, images[:-HELD_OUT], labels[:-HELD_OUT])
        seen = look(model, images[-HELD_OUT:], labels[-HELD_OUT:])
        print(describe(name, seen))
        draw(ax, name, seen)
    figure.savefig(image, metadata={"Software": None}, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE)
