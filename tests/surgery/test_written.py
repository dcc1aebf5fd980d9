"""A model whose forward writes to its own parameters is read without a change of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from gonio.editing.twin import evaluating


def replaced(layer: nn.Linear) -> None:
    layer.weight.data = F.normalize(layer.weight.data)


def uncounted(layer: nn.Linear) -> None:
    layer.weight.data.copy_(F.normalize(layer.weight.data))


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(F.normalize(layer.weight))


def in_part(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[0].div_(2 * layer.weight[0].norm())


def together(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch._foreach_mul_([layer.weight, layer.bias], 0.5)


def to_out(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch.mul(layer.weight, 0.5, out=layer.weight)


def twice(layer: nn.Linear) -> None:
    replaced(layer)
    in_place(layer)


WRITES = [replaced, uncounted, in_place, in_part, together, to_out, twice]


class Writing(nn.Module):
    """A layer that its own forward changes, between two others."""

    def __init__(self, write: Callable[[nn.Linear], None]) -> None:
        super().__init__()
        self.first, self.own, self.last, self.write = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4), write

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        self.write(self.own)
        return self.last(self.own(x).relu())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("write", WRITES)
def test_what_reads_a_model_gives_its_parameters_back(write: Callable[[nn.Linear], None]) -> None:
    model, x = Writing(write), torch.randn(16, 6)
    before, kept = state(model), model.own.weight
    memory = kept.data_ptr()
    gonio.measure(model, batch=x)
    gonio.surgery.anatomy(model, example=x)
    gonio.equivalent(model, model, example=x)
    gonio.param_groups(model, matrices=True)
    assert model.own.weight is kept
    assert kept.data_ptr() == memory
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(x)
    assert not torch.equal(model.own.weight, before["own.weight"]), "the control: the model itself does change it"


@pytest.mark.parametrize("write", WRITES)
def test_gradients_are_those_of_what_the_forward_wrote(write: Callable[[nn.Linear], None]) -> None:
    model, x = Writing(write), torch.randn(16, 6)
    before = state(model)
    with evaluating(model) as plain:
        for _ in range(2):
            plain(x).sum().backward()
    found, model.own.weight.grad = model.own.weight.grad, None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for _ in range(2):
        model(x).sum().backward()
    assert found is not None
    torch.testing.assert_close(found, model.own.weight.grad)


def test_what_a_verb_writes_between_two_forwards_stays() -> None:
    model, x = Writing(in_place), torch.randn(16, 6)
    with evaluating(model) as plain:
        plain(x)
        with torch.no_grad():
            model.own.weight.fill_(3.0)
        plain(x)
    assert torch.equal(model.own.weight, torch.full((8, 8), 3.0))


def test_a_forward_that_fails_after_its_write_leaves_nothing_changed() -> None:
    def failing(layer: nn.Linear) -> None:
        in_place(layer)
        raise ValueError("after the write")

    model = Writing(failing)
    before = state(model)
    with pytest.raises(ValueError, match="after the write"), evaluating(model) as plain:
        plain(torch.randn(2, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
