"""Gradual conversion: from the plain to the decoupled product, in the model, its copies, averages and states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError
from gonio.nn import magnitude
from nn.operators import conversions
from tolerances import close, exact

SGD = torch.optim.SGD


@pytest.mark.parametrize("weighted", [None, "linear"])
def test_from_the_plain_to_the_decoupled_product(weighted: Any) -> None:
    for name, plain, convert, x in conversions():
        options = {"magnitude": magnitude.Ball(), "weighted": weighted}
        target = convert(plain, **options)(x)
        layer = convert(plain, **options)
        optimizer = SGD(layer.parameters(), lr=0.0)
        conversion = gonio.convert_gradually_(layer, optimizer, steps=4)
        torch.testing.assert_close(
            layer(x), plain(x), msg=lambda text, name=name: f"{name}: {text}", **exact(torch.float64)
        )
        for done in (1, 2, 3):
            optimizer.step()
            share = conversion.share
            assert share == done / 4
            torch.testing.assert_close(layer(x), (1 - share) * plain(x) + share * target, **close(torch.float64))
        optimizer.step()
        assert (conversion.share, layer.blends) == (1.0, False)
        torch.testing.assert_close(layer(x), target, **exact(torch.float64))
        conversion.undo_()
        optimizer.step()
        assert layer.blend is None


def test_thousands_of_steps_end_in_time() -> None:
    """The share is a sum of float32 numbers."""
    layer = gnn.DecoupledLinear(2, 2)
    optimizer = SGD(layer.parameters(), lr=0.0)
    conversion = gonio.convert_gradually_(layer, optimizer, steps=3001)
    for _ in range(3000):
        optimizer.step()
    assert layer.blends
    assert conversion.share == pytest.approx(3000 / 3001, abs=1e-4)
    optimizer.step()
    assert (conversion.share, layer.blends) == (1.0, False)


def converting(steps: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(gnn.DecoupledLinear(3, 4), nn.ReLU(), gnn.DecoupledLinear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    gonio.convert_gradually_(model, optimizer, steps=steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(seeded(6, 3)).square().sum().backward()
    optimizer.step()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    x = seeded(5, 3, seed=2)
    torch.testing.assert_close(a.eval()(x), b.eval()(x), **exact(torch.float32))
    a.train()
    b.train()


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.0)], ids=["mean", "ema"])
@pytest.mark.parametrize("buffers", [False, True])
def test_an_averaged_model_follows_through_the_end(average: Any, buffers: bool) -> None:
    model, optimizer = converting()
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=buffers)
    for step in range(6):
        train(model, optimizer)
        averaged.update_parameters(model)
        if average is not None:  # a decay of 0: the average is the model
            assert_same(averaged, model)
        if average is not None or not buffers:  # otherwise it is the mean of the shares so far
            shares = [float(blend) for name, blend in averaged.named_buffers() if "blend" in name]
            assert shares == [min(1.0, (step + 1) / 4)] * 2
    fresh = nn.Sequential(gnn.DecoupledLinear(3, 4), nn.ReLU(), gnn.DecoupledLinear(4, 2))
    fresh.load_state_dict(averaged.module.state_dict())
    assert_same(fresh, averaged)


def test_a_copy_keeps_its_share_and_can_go_on() -> None:
    model, optimizer = converting()
    train(model, optimizer)
    twin = copy.deepcopy(model)
    assert_same(twin, model)
    for _ in range(3):
        train(model, optimizer)
    assert [float(layer.blend) for layer in (twin[0], twin[2])] == [0.25, 0.25]
    conversion = gonio.convert_gradually_(twin, (own := SGD(twin.parameters(), lr=0.1)), steps=4)
    assert conversion.share == 0.25
    for _ in range(3):
        train(twin, own)
    assert not twin[0].blends
    assert_same(twin, model)


def test_a_state_loads_at_every_stage() -> None:
    """Into a fresh model, one in conversion, and one whose conversion has ended."""
    model, optimizer = converting()
    states = [copy.deepcopy(model.state_dict())]
    for _ in range(4):
        train(model, optimizer)
        states.append(copy.deepcopy(model.state_dict()))
    assert [float(state["0.blend"]) for state in states] == [0.0, 0.25, 0.5, 0.75, 1.0]
    states.append({name: value for name, value in states[-1].items() if "blend" not in name})  # of no conversion
    x = seeded(5, 3, seed=2)
    for state in states:
        fresh = nn.Sequential(gnn.DecoupledLinear(3, 4), nn.ReLU(), gnn.DecoupledLinear(4, 2))
        under_way, _ = converting()
        ended, last = converting(steps=1)
        last.step()
        outputs = []
        for target in (fresh, under_way, ended):
            target.load_state_dict(state)
            outputs.append(target.eval()(x))
        torch.testing.assert_close(outputs[1], outputs[0], **exact(torch.float32))
        torch.testing.assert_close(outputs[2], outputs[0], **exact(torch.float32))
    torch.testing.assert_close(outputs[0], model.eval()(x), **exact(torch.float32))


def test_training_that_loads_an_earlier_state_ends_later() -> None:
    model, optimizer = converting()
    train(model, optimizer)
    early = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    model.load_state_dict(early)
    for _ in range(2):
        train(model, optimizer)
    assert model[0].blends
    assert float(model[0].blend) == 0.75
    train(model, optimizer)
    assert not model[0].blends


@pytest.mark.parametrize("order", ["load, then convert", "convert, then load"])
@pytest.mark.parametrize("taken", [1, 3, 4, 6])
def test_a_resumed_training_ends_at_the_same_step(taken: int, order: str) -> None:
    model, optimizer = converting()
    for _ in range(taken):
        train(model, optimizer)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = nn.Sequential(gnn.DecoupledLinear(3, 4), nn.ReLU(), gnn.DecoupledLinear(4, 2))
    resumed = SGD(other.parameters(), lr=0.1)
    if order.startswith("load"):
        other.load_state_dict(state[0])
    conversion = gonio.convert_gradually_(other, resumed, steps=4)
    if order.startswith("convert"):
        other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    assert conversion.share == min(taken / 4, 1)
    for _ in range(5):
        assert other[0].blends == model[0].blends
        assert_same(other, model)
        train(model, optimizer)
        train(other, resumed)
    assert not other[0].blends


def test_an_average_of_state_dicts_pairs_the_same_tensors_through_the_end() -> None:
    """Averages of timm (`ModelEmaV3`) pair the values of both state dicts by their order."""
    model, optimizer = converting()
    average = copy.deepcopy(model)
    for _ in range(6):
        train(model, optimizer)
        assert list(average.state_dict()) == list(model.state_dict())
        for mine, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(new)
        assert_same(average, model)


def test_a_state_that_is_loaded_after_the_end_goes_on() -> None:
    model, optimizer = converting()
    train(model, optimizer)
    early = copy.deepcopy(model.state_dict())
    for _ in range(4):
        train(model, optimizer)
    assert not model[0].blends
    model.load_state_dict(early)
    shares = []
    for _ in range(3):
        shares.append(float(model[0].blend))
        train(model, optimizer)
    assert shares == [0.25, 0.5, 0.75]
    assert not model[0].blends


def test_start_and_selection() -> None:
    model = nn.Sequential(gnn.DecoupledLinear(3, 4), gnn.DecoupledLinear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    conversion = gonio.convert_gradually_(model, optimizer, steps=10, start=4, where="1")
    assert conversion.share == pytest.approx(0.4)
    assert str(conversion) == "convert_gradually_: 1 module\n  1  plain → decoupled product in 10 steps"
    assert model[0].blend is None
    with pytest.raises(AlreadyAppliedError, match="found a gradual conversion there already"):
        gonio.convert_gradually_(model, optimizer, steps=10)
    conversion.undo_()
    assert not any("blend" in name for name in model.state_dict())
    gonio.convert_gradually_(model, optimizer, steps=10).undo_()


class _Wrapper:
    """An optimizer inside a plain object, as accelerate has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_steps_of_an_optimizer_in_a_wrapper_count() -> None:
    layer = gnn.DecoupledLinear(3, 2)
    wrapper = _Wrapper(SGD(layer.parameters(), lr=0.1))
    conversion = gonio.convert_gradually_(layer, wrapper, steps=2)
    wrapper.step()
    assert conversion.share == 0.5
    wrapper.step()
    assert not layer.blends


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, o: gonio.convert_gradually_(m, o, steps=3, start=3), InvalidArgumentError, "steps=3, start=3"),
        (lambda m, o: gonio.convert_gradually_(m, o, steps=0), InvalidArgumentError, "invalid schedule; found steps=0"),
        (
            lambda m, o: gonio.convert_gradually_(gnn.DecoupledLinear(2, 2), o, steps=3),
            InvalidArgumentError,
            "an optimizer that holds none of them",
        ),
        (lambda m, o: gonio.convert_gradually_(m, o, steps=3, where="1"), NoMatchError, "selects no module"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    layer = gnn.DecoupledLinear(3, 2)
    with pytest.raises(error, match=message):
        call(layer, SGD(layer.parameters(), lr=0.1))
