"""What was set up and never acted says so: trackers, holds, clips and ticks whose optimizer made no step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import GonioWarning, InvalidArgumentError
from gonio.parametrizations import SpectralNorm

WATCHED = {
    "hold_": lambda model, optimizer: gonio.hold_(model, optimizer),
    "clip_qk_": lambda model, optimizer: gonio.clip_qk_(model, optimizer),
    "tick_on_step": lambda model, optimizer: gonio.parametrizations.tick_on_step(optimizer, model),
    "convert_gradually_": lambda model, optimizer: gonio.convert_gradually_(model, optimizer, steps=5),
}


def network(verb: str = "") -> nn.Module:
    torch.manual_seed(0)
    if verb == "clip_qk_":
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    if verb == "tick_on_step":
        gonio.parametrize_(model, SpectralNorm())
    if verb == "convert_gradually_":
        gonio.swap_(model, gonio.nn.DecoupledLinear.from_linear, where=nn.Linear)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8)).square().sum().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("verb", WATCHED)
def test_an_edit_of_another_optimizer_than_the_one_that_trains_says_so(verb: str) -> None:
    model = network(verb)
    edited = WATCHED[verb](model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = vars(edited)  # the handle alone does not keep the optimizer
    train(model, adam(model))
    with pytest.warns(
        GonioWarning, match=rf"{verb} had no effect: no step of the SGD was observed, although .* changed"
    ):
        edited.undo_()
    assert kept


@pytest.mark.parametrize("verb", WATCHED)
@pytest.mark.parametrize("trained", [True, False])
def test_an_edit_that_acted_or_that_is_undone_at_once_says_nothing(verb: str, trained: bool) -> None:
    model = network(verb)
    optimizer = adam(model)
    edited = WATCHED[verb](model, optimizer)
    if trained:
        train(model, optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        edited.undo_()
    assert said == []


def never(model: nn.Module, every: int) -> gonio.Tracker:
    return gonio.Tracker(model, every=every)


def counted(model: nn.Module, every: int) -> gonio.Tracker:
    tracker = gonio.Tracker(model, every=every)
    tracker.step()
    return tracker


def of_another(model: nn.Module, every: int) -> gonio.Tracker:
    tracker = gonio.Tracker(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), every=every)
    train(model, adam(model))
    return tracker


def too_rare(model: nn.Module, every: int) -> gonio.Tracker:
    optimizer = adam(model)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=every)
    train(model, optimizer)
    return tracker


def without_gradient(model: nn.Module, every: int) -> gonio.Tracker:
    optimizer = adam(model)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    optimizer.step()
    return tracker


def elsewhere(model: nn.Module, every: int) -> gonio.Tracker:
    """Hooks of the gradients change the weights, and the optimizer's step has nothing left to do."""
    optimizer = adam(model)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)

    def release(p: torch.Tensor) -> None:
        p.data.sub_(0.1 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(release)
    train(model, optimizer)
    return tracker


def by_hand(model: nn.Module, every: int) -> gonio.Tracker:
    tracker = gonio.Tracker(model, optimizer=adam(model), every=1)
    for p in model.parameters():
        p.data.mul_(0.5)  # which torch does not count
    return tracker


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (never, r"step\(\) was not called"),
        (counted, r"1 steps were counted, and every=100"),
        (
            of_another,
            r"no step of the SGD was observed, although weights of the model have changed\. Pass the optimizer",
        ),
        (too_rare, r"the Adam made 2 steps, and every=100"),
        (without_gradient, r"no measured step of the Adam changed a weight, as when a gradient scaler"),
        (
            elsewhere,
            r"no step of the Adam changed a weight, although weights of the model have changed: something else",
        ),
        (by_hand, r"no step of the Adam was observed, although weights of the model have changed"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_tracker_that_recorded_nothing_says_why(made: Callable[..., Any], why: str) -> None:
    tracker = made(network(), 100)
    with pytest.warns(GonioWarning, match=f"Tracker: nothing was recorded: {why}"):
        tracker.undo_()
    if tracker.training is not None:
        with pytest.raises(InvalidArgumentError, match=f"Nothing was recorded: {why}"):
            tracker.to_html()


def test_a_trainer_that_keeps_copies_of_the_weights_is_named_in_its_first_step() -> None:
    model = network("hold_")
    optimizer = adam(model)
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1)
    for group in optimizer.param_groups:  # as DeepSpeed does
        group["params"] = [p.detach().clone().requires_grad_() for p in group["params"]]
    with pytest.warns(
        GonioWarning, match=r"an Adam whose groups have other tensors now.*Leave optimizer= out, and call"
    ):
        train(model, optimizer)
    assert tracker.rows == []
