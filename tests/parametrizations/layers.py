"""Layers and members that the tests of parametrizations run over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from catalog import PARAMETRIZATIONS, ParametrizationCase, seeded
from gonio import parametrizations as P

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 4),
    "tall linear": lambda: nn.Linear(3, 7, bias=False),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, dilation=2),
    "conv2d": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "grouped conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise conv2d": lambda: nn.Conv2d(4, 8, 3, groups=4),
    "1x1 conv2d": lambda: nn.Conv2d(4, 6, 1),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "transposed conv1d": lambda: nn.ConvTranspose1d(4, 6, 3, stride=2),
    "transposed conv2d": lambda: nn.ConvTranspose2d(4, 6, 3),
    "grouped transposed conv2d": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
}
MEMBERS: dict[str, ParametrizationCase] = {}
for _case in PARAMETRIZATIONS:
    MEMBERS.setdefault(type(_case.make()).__name__ + str(_case.make().extra_repr()), _case)


def make(name: str, seed: int = 0) -> nn.Module:
    layer = LAYERS[name]()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=seed + index))
    return layer


def parametrized(member: str, name: str = "linear", seed: int = 0) -> nn.Module:
    layer = make(name, seed)
    P.attach(layer, "weight", MEMBERS[member].make())
    return layer


def sample(layer: nn.Module, batch: int = 2) -> Tensor:
    """An input that the layer accepts."""
    if isinstance(layer, nn.Linear):
        return seeded(batch, layer.in_features, seed=99)
    return seeded(batch, layer.in_channels, *(3 * k for k in layer.kernel_size), seed=99)
