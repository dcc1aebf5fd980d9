"""`gonio.lab.retrain_`: chosen layers are trained alone, from the best of several starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import NoMatchError
from gonio.lab import Split
from lab.treating.test_doctor import network, same, task


@torch.no_grad()
def loss(model: nn.Module) -> float:
    data = task()
    return float(data.loss(model(data.train.inputs), data.train.targets))


def test_only_the_layer_changes_and_undo_is_exact() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight.zero_()
    before = copy.deepcopy(model)
    edited = gonio.lab.retrain_(model, task(), where="3", epochs=3)
    assert [change.path for change in edited.changes] == ["3"]
    assert loss(model) < 0.5 * loss(before)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert changed <= {"3.weight", "3.bias"}
    assert all(parameter.requires_grad for parameter in model.parameters())
    edited.undo_()
    assert same(model, before)


def test_the_same_seed_gives_the_same_weights() -> None:
    made = []
    for _ in range(2):
        model = network()
        with torch.no_grad():
            model[0].weight.zero_()
        gonio.lab.retrain_(model, task(), where="0", epochs=2)
        made.append(model)
        torch.randn(7)  # the global generator has no influence
    assert same(*made)


def test_dead_filters_are_drawn_anew() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[1:] = 0
    gonio.lab.retrain_(model, task(), where="0", epochs=2)
    assert bool(model[0].weight.any(1).all())


def test_validation_and_test_data_are_not_used() -> None:
    data, models = task(), []
    other = Split(torch.full_like(data.test.inputs, 1e6), data.test.targets)
    for given in (data, replace(data, validation=other, test=other)):
        model = network()
        with torch.no_grad():
            model[3].weight.zero_()
        gonio.lab.retrain_(model, given, where="3", epochs=2)
        models.append(model)
    assert same(*models)


def test_a_healthy_layer_is_refused() -> None:
    model = network()
    before = copy.deepcopy(model)
    with pytest.raises(gonio.GonioError, match="does not improve the score on the training data"):
        gonio.lab.retrain_(model, task(), where="3")
    assert same(model, before)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(gonio.GonioError, match="no start of the training gives a finite loss"):
        gonio.lab.retrain_(model, task(), where="3", epochs=1)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(gonio.GonioError, match=r"retrain_ needs epochs >= 1 and lr > 0; found epochs=0, lr=0\.1"):
        gonio.lab.retrain_(network(), task(), where="0", epochs=0, lr=0.1)
    with pytest.raises(gonio.GonioError, match="retrain_: where=2 matches no suitable module"):
        gonio.lab.retrain_(network(), task(), where="2")


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda layer: torch.compile(layer, backend="eager")], ids=["parallel", "compiled"]
)
def test_a_layer_in_a_wrapper_of_its_own_is_trained(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    with torch.no_grad():
        model[3].weight.zero_()
    model = nn.Sequential(*model[:3], wrap(model[3])).eval()
    before = copy.deepcopy(model)
    edited = gonio.lab.retrain_(model, task(), where="3", epochs=3)
    assert [change.path for change in edited.changes] == ["3"]
    assert loss(model) < 0.5 * loss(before)
    assert all(same(mine, theirs) for mine, theirs in zip(model[:3], before[:3], strict=True))
    edited.undo_()
    assert same(model, before)


def test_a_lazy_layer_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(NoMatchError, match=r"0 \(it is lazy; run one batch first\)"):
        gonio.lab.retrain_(model, task(), where="0")
