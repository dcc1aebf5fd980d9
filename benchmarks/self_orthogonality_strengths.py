"""What strength does to angles and accuracy: `python -m benchmarks.self_orthogonality_strengths [NAME=FOLDER …]`.

A convolutional network without normalisation, the penalty on the outputs of its three convolutions: on 1,000 digits,
and with `fashion-mnist=FOLDER` and `cifar10=FOLDER` on 2,000 images of each. Writes
`results/self_orthogonality_strengths.json` after each setting, and the tables of docs/howto/self-orthogonality.md.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gonio.geometry import angles
from gonio.lab.tasks.built_in import resolve
from gonio.regularizers import SelfOrthogonality

RESULT = Path(__file__).with_name("results") / "self_orthogonality_strengths.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "self-orthogonality.md"
MARKS = ("<!-- strengths -->", "<!-- /strengths -->")
STRENGTHS = {"paper()": (0.0, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-3), "default": (1e-3, 1e-2, 1e-1, 1.0)}
TITLES = {
    "digits": "1,000 digits of 8 × 8 pixels, accuracy on 400 others",
    "fashion-mnist": "2,000 images of Fashion-MNIST at 14 × 14, accuracy on 1,000 others",
    "cifar10": "2,000 images of CIFAR-10, averaged to 16 × 16, accuracy on 1,000 others",
}
SEEDS = 3
TRAINING = {
    "adam": (8, lambda parameters: torch.optim.Adam(parameters, lr=2e-3)),
    "sgd": (15, lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9)),
}


@dataclass(frozen=True)
class Images:
    """Inputs and labels for training and for the score."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


def network(channels: int, size: int) -> nn.Sequential:
    """Three convolutions; images of more than 8 pixels are halved after the first of them."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2) if size > 8 else nn.Identity()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def data(name: str, folder: str) -> Images:
    if name == "digits":
        digits = load_digits()
        order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(digits.images, dtype=torch.float32)[order][:, None]
        x, y = (x - x[:1000].mean()) / x[:1000].std(), torch.tensor(digits.target)[order]
        return Images(x[:1000], y[:1000], x[1397:], y[1397:])
    splits = resolve(f"{name}:{folder}").splits
    train, test = splits["train"], splits["test"]
    x, y, held_x, held_y = train.inputs[:2000], train.targets[:2000], test.inputs[:1000], test.targets[:1000]
    if name == "cifar10":
        x, held_x = F.avg_pool2d(x, 2), F.avg_pool2d(held_x, 2)
    return Images((x - x.mean()) / x.std(), y, (held_x - x.mean()) / x.std(), held_y)


def trained(images: Images, form: str, strength: float, optimizer: str, seed: int) -> dict[str, float | None]:
    """Accuracy in percent, spread of the second layer's angles in degrees or None if its weights are not finite, ratio.

    The ratio is that of penalty and loss at the start.
    """
    torch.manual_seed(seed)
    model, (epochs, make) = network(*images.x.shape[1:3]), TRAINING[optimizer]
    rule = SelfOrthogonality.paper(strength) if form == "paper()" else SelfOrthogonality(strength)
    steps, draw, outputs, first = make(model.parameters()), torch.Generator().manual_seed(seed), {}, None
    for layer in (model[0], model[3], model[6]):
        layer.register_forward_hook(lambda module, _, output: outputs.__setitem__(module, output))
    for _ in range(epochs):
        for rows in torch.randperm(len(images.x), generator=draw).split(64):
            steps.zero_grad()
            loss = F.cross_entropy(model(images.x[rows]), images.y[rows])
            penalty = torch.stack([rule(output) for output in outputs.values()]).sum()
            first = float(penalty.detach() / loss.detach()) if first is None else first
            (loss + penalty).backward()
            steps.step()
    with torch.no_grad():
        score = 100 * float((model(images.held_x).argmax(1) == images.held_y).double().mean())
    degrees = angles(model[3].weight.detach().double()).rad2deg()
    spread = degrees[~torch.eye(len(degrees), dtype=torch.bool)].std()
    return {"accuracy": score, "spread": float(spread) if spread.isfinite() else None, "ratio": first or 0.0}


def _spread(runs: list[dict[str, float | None]]) -> str:
    known = [run["spread"] for run in runs if run["spread"] is not None]
    lost = len(runs) - len(known)
    return f"{lost} of {len(runs)} diverged" if lost else f"{statistics.fmean(known):.1f}°"


def table(cells: dict[str, list[dict[str, float | None]]]) -> str:
    lines = [
        "| form | strength | penalty / loss at the start | Adam: accuracy, spread | SGD: accuracy, spread |",
        "|---|--:|--:|--:|--:|",
    ]
    for form, strengths in STRENGTHS.items():
        for strength in strengths:
            keys = [f"{form} {strength:g} {optimizer}" for optimizer in TRAINING]
            if not {*keys} <= {*cells}:
                continue
            found = [cells[key] for key in keys]
            ratio = statistics.fmean(run["ratio"] or 0.0 for run in found[0])
            shown = [
                f"≈ {statistics.fmean(run['accuracy'] or 0.0 for run in runs):.0f} %, {_spread(runs)}" for runs in found
            ]
            name = form if strength else "none"
            lines.append(f"| {name} | {strength:g} | {ratio:.2g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the tables of the committed result."""
    before, _, rest = page.partition(MARKS[0])
    cells = json.loads(RESULT.read_text(encoding="utf-8"))["cells"]
    tables = "\n\n".join(f"{TITLES[name]}:\n\n{table(cells[name])}" for name in TITLES if name in cells)
    return f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    torch.set_num_threads(1)
    made = json.loads(RESULT.read_text()) if RESULT.exists() else {"torch": torch.__version__, "cells": {}}
    for name, _, folder in (word.partition("=") for word in ("digits", *sys.argv[1:])):
        images, cells = data(name, folder), made["cells"].setdefault(name, {})
        for form, strengths in reversed(STRENGTHS.items()):  # the default form first
            for strength in strengths:
                for optimizer in TRAINING:
                    key = f"{form} {strength:g} {optimizer}"
                    if key not in cells:
                        cells[key] = [trained(images, form, strength, optimizer, seed) for seed in range(SEEDS)]
                        RESULT.write_text(json.dumps(made, indent=1) + "\n")
                        print(name, key, cells[key], flush=True)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
