"""Networks trained on handwritten digits by gonio's own recipes, for rules that must stay silent on them.

A network is a small convolutional net or a perceptron of random widths, with the baseline or a recipe that fits it, an
optimizer, a learning rate and a weight decay; all of that depends on its number alone.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import nn

from gonio.lab.plan import TrainingConfig
from gonio.lab.running.training import fit
from gonio.lab.tasks import digits
from gonio.lab.tasks.task import Task
from gonio.measuring import Measurements, measure
from gonio.models import digits_cnn
from gonio.recipes import Recipe

__all__ = ["LEARNT", "RECIPES", "trained"]

EPOCHS = {"digits-cnn": 20, "perceptron": 60}
LEARNT = 80.0  # per cent of the validation split: a network below it has not learnt, and is left out
RECIPES = {
    "digits-cnn": ("", "orthogonal-init", "switchable-norm", "decoupled-tanh", "self-orthogonality", "scale-shift"),
    "perceptron": ("", "orthogonal-init", "decoupled-tanh-linear", "self-orthogonality-linear", "scale-shift"),
}
TRAININGS = (("sgd", 0.02), ("sgd", 0.05), ("sgd", 0.1), ("adamw", 0.002), ("adamw", 0.005))
DECAYS = (0.0, 5e-4, 5e-3)
WIDTHS = (32, 64, 128, 256)


@cache
def task() -> Task:
    return digits()


def trained(number: int) -> tuple[str, float, Measurements | None]:
    """Which recipe, the best validation score, and the measurements of the network; none if it has not learnt."""
    generator = torch.Generator().manual_seed(number)
    kind = list(RECIPES)[number % len(RECIPES)]
    recipe = RECIPES[kind][number // len(RECIPES) % len(RECIPES[kind])]
    optimizer, lr = TRAININGS[int(torch.randint(len(TRAININGS), (), generator=generator))]
    decay = DECAYS[int(torch.randint(len(DECAYS), (), generator=generator))]
    torch.manual_seed(number)  # torch's own initialisations read the global generator
    model = digits_cnn() if kind == "digits-cnn" else perceptron(generator)
    applied = (Recipe.load(recipe) if recipe else Recipe("baseline")).apply_(model, seed=number)
    training = TrainingConfig(epochs=EPOCHS[kind], batch_size=25, lr=lr, optimizer=optimizer, weight_decay=decay)
    done = fit(model, task(), training=training, seed=number, penalty=applied.penalty)
    score = max(done.curve["val_score"], default=0.0)
    learnt = done.diverged is None and score >= LEARNT
    return f"{kind} {recipe or 'baseline'}", score, measure(model) if learnt else None


def perceptron(generator: torch.Generator) -> nn.Module:
    depth = 1 + int(torch.randint(3, (), generator=generator))
    hidden = [WIDTHS[int(i)] for i in torch.randint(len(WIDTHS), (depth,), generator=generator)]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise([64, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 10))
