"""Recipes as data, and small models that the recipe tests act on."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from gonio.recipes import Recipe


def recipe(**parts: Any) -> Recipe:
    """A recipe of these verbs and settings."""
    return Recipe.from_dict({"name": "mine", **parts})


def convnet() -> nn.Sequential:
    """conv-norm-ReLU twice, then two linear layers."""
    layers = [
        ("conv1", nn.Conv2d(1, 4, 3, padding=1, bias=False)),
        ("norm1", nn.BatchNorm2d(4)),
        ("act1", nn.ReLU()),
        ("conv2", nn.Conv2d(4, 6, 3, padding=1, bias=False)),
        ("norm2", nn.BatchNorm2d(6)),
        ("act2", nn.ReLU()),
        ("pool", nn.AdaptiveAvgPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(24, 8)),
        ("act3", nn.ReLU()),
        ("fc2", nn.Linear(8, 3)),
    ]
    return nn.Sequential(OrderedDict(layers))


class Reversed(nn.Module):
    """Registers its layers in the reverse of the order in which it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Linear(4, 4)
        self.entry = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(torch.relu(self.entry(x)))))


class Untraceable(Reversed):
    """The same with control flow that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def state(model: nn.Module) -> dict[str, object]:
    """Everything that undo has to restore: classes, parameter objects in order, values, hooks."""
    return {
        "classes": [(path, type(module)) for path, module in model.named_modules()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "values": [tensor.clone().numpy().tobytes() for tensor in model.state_dict().values()],
        "keys": list(model.state_dict()),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def model_for(recipe: str) -> nn.Module:
    """A small network for (N, 1, 8, 8) that a built-in recipe fits."""
    if not recipe.endswith("-1d"):
        return convnet()
    return nn.Sequential(
        nn.Flatten(2),
        nn.Conv1d(1, 4, 9, stride=4, bias=False),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Conv1d(4, 6, 3, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
