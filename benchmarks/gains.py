"""Which gain trains saturating activations over depth: `python -m benchmarks.gains` writes `results/gains.json`.

Perceptrons of width 64 on the digits, orthogonal weights, zero biases, SGD with momentum 0.9 for 15 epochs. Of five
rates that with the best validation accuracy, mean of the seeds, is taken for each cell; then test accuracy is shown.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gonio

RESULT = Path(__file__).with_name("results") / "gains.json"
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "softsign": nn.Softsign, "hardtanh": nn.Hardtanh}
DEPTHS, SEEDS, RATES = (5, 10, 20, 50, 100), 3, (0.1, 0.03, 0.01, 0.003, 0.001)
WIDTH, EPOCHS, BATCH = 64, 15, 64


def gains_of(name: str) -> dict[str, float]:
    """The alternatives that :func:`gonio.init.gain` knows by name."""
    kinds = ("small", "rms", "torch") if name == "tanh" else ("small", "rms")
    return {kind: gonio.init.gain(name, kind) for kind in kinds}  # type: ignore[arg-type]


def data() -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and labels, each of training, validation and test."""
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    x = (x - x[:1000].mean(0)) / x[:1000].std()
    return list(x.split((1000, 397, 400))), list(y.split((1000, 397, 400)))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).double().mean())


def trained(activation: type[nn.Module], gain: float, depth: int, rate: float, seed: int) -> tuple[float, float]:
    """Validation and test accuracy in percent."""
    (x, held, test), (y, held_y, test_y) = data()
    torch.manual_seed(seed)
    layers = [part for _ in range(depth - 1) for part in (nn.Linear(WIDTH, WIDTH), activation())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    gonio.init_(model, gonio.init.orthogonal_, gain=gain, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=draw).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return accuracy(model, held, held_y), accuracy(model, test, test_y)


def cell(activation: type[nn.Module], gain: float, depth: int) -> dict[str, float]:
    """Mean test accuracy at the rate that is best in validation."""
    found = {rate: [trained(activation, gain, depth, rate, seed) for seed in range(SEEDS)] for rate in RATES}
    rate = max(found, key=lambda each: statistics.fmean(score for score, _ in found[each]))
    return {"gain": gain, "rate": rate, "accuracy": statistics.fmean(score for _, score in found[rate])}


PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "initialisation.md"
MARKS = ("<!-- gains -->", "<!-- /gains -->")


def table(cells: dict[str, dict[str, float]]) -> str:
    """The page's table: a row per activation and kind of gain, a column per depth."""
    head = ["activation", "gain", *(f"{depth} layers" for depth in DEPTHS)]
    rows = [
        [name, f"{kind}, {gain:.4g}", *(f"≈ {cells[f'{name} {depth} {kind}']['accuracy']:.0f}" for depth in DEPTHS)]
        for name in ACTIVATIONS
        for kind, gain in gains_of(name).items()
    ]
    lines = [head, ["---", "---", *["--:"] * len(DEPTHS)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def with_table(page: str) -> str:
    """The page with the table of the committed result."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    cells = json.loads(RESULT.read_text(encoding="utf-8"))["cells"]
    return f"{before}{MARKS[0]}\n{table(cells)}\n{MARKS[1]}{after}"


def main() -> None:
    torch.set_num_threads(1)
    made = json.loads(RESULT.read_text()) if RESULT.exists() else {"torch": torch.__version__, "cells": {}}
    for name, activation in ACTIVATIONS.items():
        for depth in DEPTHS:
            for kind, gain in gains_of(name).items():
                key = f"{name} {depth} {kind}"
                if key not in made["cells"]:
                    made["cells"][key] = cell(activation, gain, depth)
                    RESULT.write_text(json.dumps(made, indent=1) + "\n")
                    print(key, made["cells"][key], flush=True)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
