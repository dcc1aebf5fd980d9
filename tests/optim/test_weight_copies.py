"""Optimizers that train copies of the weights in float32: what acts at each step says that it cannot, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import gonio
from catalog import seeded
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NormNotHeldError, NotApplicableError, PendingRecipeError
from gonio.recipes import Recipe


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)


def attention() -> nn.Module:
    """With logits far above the limit."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).to(torch.bfloat16)
    with torch.no_grad():
        model.self_attn.in_proj_weight[:16] *= 30
    return model


def train(model: nn.Module, step: Callable[[], Any], count: int = 6) -> None:
    for seed in range(count):
        for parameter in model.parameters():
            parameter.grad = None
        first = next(model.parameters())
        shape = (4, 5, 8) if isinstance(model, nn.TransformerEncoderLayer) else (64, 16)
        model(seeded(*shape, seed=seed).to(first.dtype)).float().square().mean().backward()
        step()


def copied(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float().clone())


def groups_exchanged(optimizer: Optimizer) -> Callable[[], None]:
    """As apex and DeepSpeed: the groups of the user's optimizer get the copies; a step that writes the weights."""
    pairs = []
    for group in optimizer.param_groups:
        pairs += [(parameter, copied(parameter)) for parameter in group["params"]]
        group["params"] = [copy for _, copy in pairs[-len(group["params"]) :]]

    def step() -> None:
        for parameter, copy in pairs:
            copy.grad = parameter.grad.float() if parameter.grad is not None else None
        optimizer.step()
        for parameter, copy in pairs:
            parameter.data.copy_(copy.data)

    return step


class Inside(Optimizer):
    """The copies are the parameters of an optimizer in this one."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.pairs = [(p, copied(p)) for group in self.param_groups for p in group["params"]]
        self.inner = SGD([copy for _, copy in self.pairs], lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, copy in self.pairs:
            copy.grad = parameter.grad.float() if parameter.grad is not None else None
        self.inner.step()
        for parameter, copy in self.pairs:
            parameter.copy_(copy)


class InState(Optimizer):
    """The copies are state, as with the master weights of fused optimizers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                state = self.state[parameter]
                state.setdefault("copy", parameter.detach().float().clone())
                state["copy"].add_(parameter.grad.float(), alpha=-group["lr"])
                parameter.copy_(state["copy"])


class Averaging(InState):
    """Its state has an average in float32, from which nothing is computed, and which begins at the weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
                mean = self.state[parameter].setdefault("average", parameter.detach().float().clone())
                mean.lerp_(parameter.float(), 0.1)


PLACES = {Inside: r"in the SGD of the Inside", InState: r"'copy' in the state of the InState"}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("step", ["free", "fixed"])
def test_a_hold_of_weights_that_are_computed_from_copies_is_refused(kind: Any, step: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=1.0)
    gonio.hold_(model, optimizer, radius=1.0, step=step)
    message = rf"0.weight is not held; each step computes it from a copy in a wider type \({PLACES[kind]}\)"
    with pytest.raises(NormNotHeldError, match=message):
        train(model, optimizer.step, 3)


@pytest.mark.parametrize("kind", PLACES)
def test_a_clip_of_weights_that_are_computed_from_copies_is_refused(kind: Any) -> None:
    model = attention()
    optimizer = kind(model.parameters(), lr=0.01)
    gonio.clip_qk_(model, optimizer, limit=5.0)
    message = rf"in_proj_weight'; each step computes it from a copy in a wider type \({PLACES[kind]}\), and undoes a"
    with pytest.raises(NotApplicableError, match=message):
        train(model, optimizer.step, 3)


@pytest.mark.parametrize("kind", [SGD, Averaging])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_other_state_in_float32_is_no_copy(kind: Any, rate: float) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=rate)
    held = gonio.hold_(model, optimizer, radius=1.0)
    train(model, optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer.step)
    for weight, radius in zip((model[0].weight, model[2].weight), held.state_dict().values(), strict=True):
        assert float(weight.detach().float().norm()) == pytest.approx(float(radius), rel=1e-2)


def test_copies_in_the_groups_are_named_however_late_a_weight_changes() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=1e-7)  # of a warm-up: no entry in half precision changes
    gonio.hold_(model, optimizer, radius=1.0)
    step = groups_exchanged(optimizer)
    train(model, step)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(NormNotHeldError, match="and the parameter groups of the optimizer do not have it any more"):
        train(model, step)


def test_a_clip_names_copies_in_the_groups() -> None:
    model = attention()
    optimizer = SGD(model.parameters(), lr=0.01)
    gonio.clip_qk_(model, optimizer, limit=5.0)
    step = groups_exchanged(optimizer)
    with pytest.raises(NotApplicableError, match="in_proj_weight'; it changes, and the parameter groups of"):
        train(model, step, 3)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("verb", ["hold_", "clip_qk_", "parametrize_"])
def test_an_optimizer_of_copies_is_told_from_one_of_another_model(verb: str, flat: bool) -> None:
    model = attention() if verb == "clip_qk_" else network()
    optimizer = SGD(model.parameters(), lr=0.1)
    groups_exchanged(optimizer)
    if flat:
        optimizer.param_groups[0]["params"] = [torch.cat([p.flatten() for p in optimizer.param_groups[0]["params"]])]
    act: dict[str, Callable[[Optimizer], Any]] = {
        "hold_": lambda each: gonio.hold_(model, each),
        "clip_qk_": lambda each: gonio.clip_qk_(model, each),
        "parametrize_": lambda each: gonio.parametrize_(model, P.WeightNorm(), optimizer=each),
    }
    with pytest.raises(InvalidArgumentError, match="found an optimizer that trains copies of them"):
        act[verb](optimizer)
    with pytest.raises(InvalidArgumentError, match="found an optimizer that holds none of them"):
        act[verb](SGD(nn.Linear(16, 32).parameters(), lr=0.1))


def test_a_recipe_that_waits_for_an_optimizer_names_one_of_copies() -> None:
    model = network()
    recipe = Recipe.from_dict({"name": "held", "hold": {"where": "type:Linear", "radius": 1.0}})
    applied = recipe.apply_(model)
    optimizer = SGD(model.parameters(), lr=0.5)
    step = groups_exchanged(optimizer)
    with pytest.raises(PendingRecipeError, match="found SGD, which was not handed over to it"):
        train(model, step, 1)
    with pytest.raises(InvalidArgumentError, match="found an optimizer that trains copies of them"):
        applied.hold_(optimizer)
    applied.undo_()


def test_a_recipe_does_not_wait_for_the_optimizer_of_a_second_model() -> None:
    model, second = network(), network()
    recipe = Recipe.from_dict({"name": "held", "hold": {"where": "type:Linear", "radius": 1.0}})
    applied = recipe.apply_(model)
    before = [p.detach().clone() for p in model.parameters()]
    train(second, SGD(second.parameters(), lr=0.1).step, 2)
    assert all(map(torch.equal, before, model.parameters()))
    applied.hold_(SGD(model.parameters(), lr=0.1))  # it is still asked for the model's own
    applied.undo_()


def test_an_optimizer_of_a_model_without_values_holds_none_of_the_parameters() -> None:
    other = [nn.Linear(4, 4, device="meta").weight, nn.LazyLinear(4).weight, nn.Parameter(torch.zeros(0, 4))]
    with pytest.raises(InvalidArgumentError, match="found an optimizer that holds none of them"):
        gonio.hold_(network(), SGD(other, lr=0.1))
    model = nn.Sequential(*network(), nn.LazyLinear(4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(InvalidArgumentError, match="found an optimizer that holds none of them"):
        gonio.hold_(model, SGD(nn.Linear(4, 4).parameters(), lr=0.1))
