"""A ResNet-18 is converted in one line, trains, and is put back bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from catalog import seeded
from foreign import torchvision_resnet18
from gonio.nn import DecoupledConv2d
from networks import ResNet18

CLASSES = 5


def resnet18(classes: int) -> nn.Module:
    return ResNet18(width=64, classes=classes)


both = pytest.mark.parametrize("make", [resnet18, torchvision_resnet18])
Make = Callable[..., nn.Module]


def data() -> tuple[Tensor, Tensor]:
    return seeded(10, 3, 32, 32), torch.arange(10) % CLASSES


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, targets = data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def description(model: nn.Module) -> list[object]:
    """Classes, parameters by identity, buffers by value."""
    modules = [(name, type(module), sorted(module.__dict__)) for name, module in model.named_modules()]
    parameters = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    buffers = [(name, buffer.tolist()) for name, buffer in model.named_buffers()]
    return [modules, parameters, buffers]


@both
def test_it_converts_trains_and_comes_back(make: Make) -> None:
    model = make(CLASSES)
    edited = gonio.swap_(model, DecoupledConv2d.from_conv, where=nn.Conv2d)
    assert sum(isinstance(module, DecoupledConv2d) for module in model.modules()) == 20
    losses = train(model, 8)
    assert losses[-1] < 0.5 * losses[0]
    edited.undo_()
    assert not any(isinstance(module, DecoupledConv2d) for module in model.modules())
    twin = make(CLASSES)
    twin.load_state_dict(model.state_dict())
    x, _ = data()
    assert torch.equal(model.eval()(x), twin.eval()(x))  # what was trained is in the plain network


@both
def test_undoing_is_exact(make: Make) -> None:
    model = make(CLASSES).eval()
    x, _ = data()
    before, output = description(model), model(x)
    edited = gonio.swap_(model, DecoupledConv2d.from_conv, where=nn.Conv2d)
    assert not torch.equal(model(x), output)
    edited.undo_()
    assert description(model) == before
    assert torch.equal(model(x), output)


def test_ours_is_torchvisions() -> None:
    theirs = torchvision_resnet18(CLASSES).eval()
    ours = resnet18(CLASSES).eval()
    ours.load_state_dict(theirs.state_dict())
    x, _ = data()
    assert torch.equal(ours(x), theirs(x))
