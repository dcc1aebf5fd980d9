"""Models whose tensors torch exchanges when it moves them: what gonio remembers of them does not prevent it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio import parametrizations as P
from gonio.errors import PendingRecipeError, UntrainedParametersError
from gonio.optim.holding import step_of_hold
from gonio.parametrizations import parametrization_of


@pytest.fixture(autouse=True)
def exchanged() -> Iterator[None]:
    """`Module.to()` exchanges the contents of all tensors, as it does for shards and quantised weights."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, _: gonio.init_(model, gonio.init.orthogonal_),
        lambda model, _: gonio.balance_(model),
        lambda model, _: gonio.parametrize_(model, P.WeightNorm()),
        lambda model, optimizer: gonio.parametrize_(model, P.WeightNorm(), optimizer=optimizer),
        lambda model, _: gonio.parametrize_(model, P.SpectralNorm()),
        lambda model, _: gonio.parametrize_(model, P.Orthogonal()),
        lambda model, _: gonio.swap_(model, gonio.nn.DecoupledLinear.from_linear),
        lambda model, optimizer: gonio.hold_(model, optimizer),
        lambda model, optimizer: gonio.hold_(model, optimizer, norm="filters", magnitude="learned", where="4"),
    ],
)
def test_an_edited_model_moves_and_is_restored(verb: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    model = network()
    optimizer, before = sgd(model), {name: value.clone() for name, value in model.state_dict().items()}
    edited = verb(model, optimizer)
    model.double()
    edited.undo_()
    assert {name: value.dtype for name, value in model.state_dict().items()} == dict.fromkeys(before, torch.float64)
    assert all(torch.equal(value.float(), before[name]) for name, value in model.state_dict().items())


def test_a_hold_and_a_tracker_go_on() -> None:
    model = network()
    optimizer = sgd(model)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    gonio.hold_(model, optimizer)
    radius = float(model[0].weight.norm().detach())
    model.double()
    train_(model, optimizer)
    assert step_of_hold(model[0].weight) == "free"
    assert float(model[0].weight.norm().detach()) == pytest.approx(radius, rel=1e-6)
    assert len(tracker.rows) == 3
    gonio.init_(model, gonio.init.orthogonal_)  # an edit of a held weight is still noticed
    moved = float(model[0].weight.norm().detach())
    train_(model, optimizer)
    assert float(model[0].weight.norm().detach()) == pytest.approx(moved, rel=1e-6)


def test_a_parametrization_knows_its_parameter() -> None:
    model = network()
    gonio.parametrize_(model, P.SpectralNorm(), where=nn.Linear)
    model.double()
    found = parametrization_of(model[0])
    assert found is not None
    assert found.trained is model[0]._parameters["weight"]


def test_a_move_is_no_step_of_a_spectral_norm() -> None:
    model = network().double()
    gonio.parametrize_(model, P.SpectralNorm(), where=nn.Linear)
    train_(model, sgd(model))
    with torch.no_grad():  # torch moves no tensor of a graph
        assert model[0].weight is not None  # read after a step: the vectors advance
        before = model[0].weight_parametrization.v.clone()
        model.float().double()
        assert model[0].weight is not None
    assert torch.equal(model[0].weight_parametrization.v, before.float().double())


def test_added_parameters_are_still_missed() -> None:
    model = network()
    optimizer = sgd(model)
    gonio.parametrize_(model, P.WeightNorm())
    model.double()
    with pytest.raises(UntrainedParametersError, match="which parametrize_ added, are in no optimizer"):
        train_(model, optimizer)


def test_a_waiting_recipe_still_waits() -> None:
    model = network()
    gonio.Recipe.from_dict({"name": "held", "hold": {"norm": "filters"}}).apply_(model)
    model.double()
    with pytest.raises(PendingRecipeError, match="recipe 'held'"):
        train_(model, sgd(model))
