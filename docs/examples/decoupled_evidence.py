"""Decoupled convolutions against plain ones on handwritten digits: accuracy, speed of learning, attacks.

    python docs/examples/decoupled_evidence.py [SEEDS [norm|none]]

Each recipe of docs/recipes, with and without batch norm, trains with the settings of the plain network. Needs
the extra `lab`; a run takes a few seconds on one core. The same network serves the command line:

    gonio compare docs/recipes/decoupled-*.yaml --task digits --model docs/examples/decoupled_evidence.py:network
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gonio
from gonio.lab import AttackConfig
from gonio.lab.running.robustness import fgsm, pgd, survive

RECIPES = Path(__file__).parents[1] / "recipes"
WIDTH, EPOCHS, BATCH, RATE = 64, 12, 64, 3e-3
LOSS = 0.1  # of the fixed loss that steps are counted to, averaged over the last 20 steps
ATTACKED = 200
BALL = AttackConfig(epsilon=0.1, low=0.0, high=1.0, steps=20, restarts=1)  # pixels are between 0 and 1

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Result:
    """Percentages of held-out digits, but for `steps`: until the loss was reached, infinite if it never was."""

    accuracy: float
    steps: float
    fgsm: float
    pgd: float
    transfer: float
    unbounded: float  # PGD at ten times the distance: what stays right there hides its gradient


def network(*, norm: bool = True) -> nn.Sequential:
    """Three convolutions of 64 filters."""

    def block(channels: int) -> Iterator[nn.Module]:
        yield nn.Conv2d(channels, WIDTH, 3, padding=1, bias=not norm)
        if norm:
            yield nn.BatchNorm2d(WIDTH)
        yield nn.ReLU()

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
    return nn.Sequential(*block(1), nn.MaxPool2d(2), *block(WIDTH), *block(WIDTH), *head)


def digits(seed: int) -> tuple[Data, Data]:
    """Training and held-out digits, 1,297 and 500."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.as_tensor(data.target)[order]
    return (images[:-500], labels[:-500]), (images[-500:], labels[-500:])


def train_(model: nn.Module, data: Data, seed: int) -> list[float]:
    images, labels = data
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images), generator=draw).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def steps_to(losses: list[float], goal: float) -> float:
    reached = (step for step in range(20, len(losses) + 1) if statistics.mean(losses[step - 20 : step]) <= goal)
    return next(reached, float("inf"))


def evaluate(model: nn.Module, losses: list[float], data: Data, foreign: Tensor, seed: int) -> Result:
    images, labels = data
    some, targets = images[:ATTACKED], labels[:ATTACKED]

    def percent(inputs: Tensor, wanted: Tensor) -> float:
        return 100 * survive(model, inputs, wanted).double().mean().item()

    def attacked(epsilon: float) -> float:
        draw = torch.Generator().manual_seed(seed)
        moved = pgd(model, some, targets, replace(BALL, epsilon=epsilon), generator=draw)
        return percent(moved, targets)

    return Result(
        accuracy=percent(images, labels),
        steps=steps_to(losses, LOSS),
        fgsm=percent(fgsm(model, some, targets, BALL), targets),
        pgd=attacked(BALL.epsilon),
        transfer=percent(foreign, targets),
        unbounded=attacked(10 * BALL.epsilon),
    )


def run(recipe: Path | None, *, norm: bool, seed: int, foreign: Tensor | None = None) -> tuple[Result, Tensor]:
    """Train and attack; also returns inputs that mislead this network."""
    learned, held_out = digits(seed)
    torch.manual_seed(seed + (1000 if foreign is None else 0))  # the network that others are attacked by is another
    model = network(norm=norm)
    if recipe is not None:
        gonio.Recipe.load(recipe).apply_(model)
    losses = train_(model, learned, seed)
    model.eval()
    some, targets = (t[:ATTACKED] for t in held_out)
    draw = torch.Generator().manual_seed(seed)
    moved = pgd(model, some, targets, BALL, generator=draw)
    return evaluate(model, losses, held_out, moved if foreign is None else foreign, seed), moved


def summary(results: list[Result]) -> str:
    """Means over seeds with their standard errors; the steps as a median, a dash where most runs never reached it."""
    cells = []
    for field, values in zip(fields(Result), zip(*(astuple(r) for r in results), strict=True), strict=True):
        if field.name == "steps":
            median = statistics.median_high(values)
            cells.append("–" if median == float("inf") else f"{median:.0f}")
        else:
            error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{error}")
    return " | ".join(cells)


def differences(results: list[Result], plain: list[Result]) -> str:
    """Means over seeds of the differences from the plain network of the same seed, with their standard errors.

    Bold is what a t test shows at 5 % over all differences of the study, by Bonferroni.
    """
    named = [f.name for f in fields(Result) if f.name not in ("steps", "unbounded")]
    beyond = stats.t.ppf(1 - 0.05 / 2 / (2 * len(named) * len(recipes())), len(results) - 1)
    cells = []
    for name in named:
        found = [getattr(ours, name) - getattr(theirs, name) for ours, theirs in zip(results, plain, strict=True)]
        mean, error = statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5
        cell = f"{mean:+.1f} ± {error:.1f}".replace("-", "−")
        cells.append(f"**{cell}**" if abs(mean) > beyond * error else cell)
    return " | ".join(cells)


def recipes() -> list[Path]:
    return sorted(RECIPES.glob("decoupled-*.yaml"))


def main(seeds: int, norms: tuple[bool, ...]) -> None:
    torch.set_num_threads(1)
    print(f"| convolutions | norm | accuracy | steps to {LOSS} | FGSM | PGD | transfer | PGD × 10 |")
    print("|---|---|--:|--:|--:|--:|--:|--:|", flush=True)
    below = []
    for norm in norms:
        foreign = [run(None, norm=norm, seed=seed)[1] for seed in range(seeds)]
        plain: list[Result] = []
        for recipe in (None, *recipes()):
            results = [run(recipe, norm=norm, seed=seed, foreign=foreign[seed])[0] for seed in range(seeds)]
            plain = plain or results
            name = "plain" if recipe is None else recipe.stem.removeprefix("decoupled-")
            row = f"| {name} | {'batch norm' if norm else 'none'} |"
            print(row, summary(results), "|", flush=True)
            if recipe is not None and seeds > 1:
                below.append(f"{row} {differences(results, plain)} |")
    if below:
        print("\n| convolutions | norm | accuracy | FGSM | PGD | transfer |\n|---|---|--:|--:|--:|--:|")
        print("\n".join(below))


if __name__ == "__main__":
    count, *chosen = sys.argv[1:] or ["3"]
    main(int(count), {"norm": (True,), "none": (False,)}.get("".join(chosen), (True, False)))
