"""What strength does to angles and accuracy: `python -m benchmarks.self_orthogonality_strengths`.

A convolutional network without normalisation on 1,000 digits, the penalty on the outputs of its three convolutions.
Writes `results/self_orthogonality_strengths.json` and the table of docs/howto/self-orthogonality.md.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gonio.geometry import angles
from gonio.regularizers import SelfOrthogonality

RESULT = Path(__file__).with_name("results") / "self_orthogonality_strengths.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "self-orthogonality.md"
MARKS = ("<!-- strengths -->", "<!-- /strengths -->")
STRENGTHS = {"paper()": (0.0, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-3), "default": (1e-3, 1e-2, 1e-1, 1.0)}
SEEDS = 3
TRAINING = {
    "adam": (8, lambda parameters: torch.optim.Adam(parameters, lr=2e-3)),
    "sgd": (15, lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9)),
}


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images, dtype=torch.float32)[order][:, None]
    return (x - x[:1000].mean()) / x[:1000].std(), torch.tensor(digits.target)[order]


def trained(form: str, strength: float, optimizer: str, seed: int) -> dict[str, float | None]:
    """Accuracy in percent, spread of the second layer's angles in degrees or None if its weights are not finite, ratio.

    The ratio is that of penalty and loss at the start.
    """
    torch.manual_seed(seed)
    model, (x, y), (epochs, make) = network(), data(), TRAINING[optimizer]
    rule = SelfOrthogonality.paper(strength) if form == "paper()" else SelfOrthogonality(strength)
    steps, draw, outputs, first = make(model.parameters()), torch.Generator().manual_seed(seed), {}, None
    for layer in (model[0], model[2], model[5]):
        layer.register_forward_hook(lambda module, _, output: outputs.__setitem__(module, output))
    for _ in range(epochs):
        for rows in torch.randperm(1000, generator=draw).split(64):
            steps.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            penalty = torch.stack([rule(output) for output in outputs.values()]).sum()
            first = float(penalty.detach() / loss.detach()) if first is None else first
            (loss + penalty).backward()
            steps.step()
    with torch.no_grad():
        score = 100 * float((model(x[1397:]).argmax(1) == y[1397:]).double().mean())
    degrees = angles(model[2].weight.detach().double()).rad2deg()
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
            found = [cells[f"{form} {strength:g} {optimizer}"] for optimizer in TRAINING]
            ratio = statistics.fmean(run["ratio"] or 0.0 for run in found[0])
            shown = [
                f"≈ {statistics.fmean(run['accuracy'] or 0.0 for run in runs):.0f} %, {_spread(runs)}" for runs in found
            ]
            name = form if strength else "none"
            lines.append(f"| {name} | {strength:g} | {ratio:.2g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table of the committed result."""
    before, _, rest = page.partition(MARKS[0])
    cells = json.loads(RESULT.read_text(encoding="utf-8"))["cells"]
    return f"{before}{MARKS[0]}\n{table(cells)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    torch.set_num_threads(1)
    made = json.loads(RESULT.read_text()) if RESULT.exists() else {"torch": torch.__version__, "cells": {}}
    for form, strengths in STRENGTHS.items():
        for strength in strengths:
            for optimizer in TRAINING:
                key = f"{form} {strength:g} {optimizer}"
                if key not in made["cells"]:
                    made["cells"][key] = [trained(form, strength, optimizer, seed) for seed in range(SEEDS)]
                    RESULT.write_text(json.dumps(made, indent=1) + "\n")
                    print(key, made["cells"][key], flush=True)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
