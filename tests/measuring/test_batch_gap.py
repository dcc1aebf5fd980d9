"""What a norm gives in training beside what it gives in evaluation."""

from __future__ import annotations

import copy
from math import sqrt

import pytest
import torch
from torch import nn

import gonio
from gonio.measuring import measure
from gonio.measuring.figures.signals import Signal


def gap(norm: nn.Module, x: torch.Tensor) -> Signal:
    (signal,) = measure(nn.Sequential(norm), batch=x).signals
    return signal


def trained(kind: str, *, shift: float = 0.0, scale: float = 1.0) -> nn.Module:
    """A norm with running statistics of many normal batches, and a scale and shift of its own."""
    norm: nn.Module = {
        "batch": lambda: nn.BatchNorm2d(4),
        "plain": lambda: nn.BatchNorm2d(4, affine=False),
        "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        "switchable": lambda: gonio.nn.SwitchableNorm2d(4),
    }[kind]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(200):
            norm(shift + scale * torch.randn(64, 4, 6, 6, generator=generator))
        for parameter in (p for p in (norm.weight, norm.bias) if p is not None):
            parameter.copy_(torch.randn(4, generator=generator))
    return norm


def batch(count: int, shift: float = 0.0) -> torch.Tensor:
    return shift + torch.randn(count, 4, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["batch", "plain", "instance", "switchable"])
def test_the_gap_is_between_the_two_modes(kind: str) -> None:
    norm, x = trained(kind, shift=0.5, scale=2.0), batch(8)
    before = copy.deepcopy(norm.state_dict())
    found = gap(norm, x).train_eval_gap
    assert all(torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values(), strict=True))
    assert norm.training
    there, here = copy.deepcopy(norm).train()(x).detach().double(), copy.deepcopy(norm).eval()(x).detach().double()
    expected = float((there - here).square().mean().sqrt() / here.std(correction=0))
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 0.1


@pytest.mark.parametrize("count", [8, 100])
def test_a_batch_of_the_training_shows_what_its_size_makes(count: int) -> None:
    found = gap(trained("plain"), batch(count)).train_eval_gap
    assert found == pytest.approx(sqrt(1.5 / (36 * count)), rel=0.5)


def test_other_data_show_more_than_that() -> None:
    norm = trained("plain")
    assert gap(norm, batch(100, shift=1.0)).train_eval_gap == pytest.approx(1.0, rel=0.1)


def test_calibration_closes_the_gap() -> None:
    model = nn.Sequential(trained("batch"))
    batches = [batch(50, shift=2.0)]
    assert gap(model[0], batches[0]).train_eval_gap > 0.5
    gonio.calibrate_(model, batches)
    assert gap(model[0], batches[0]).train_eval_gap < 0.01


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (nn.BatchNorm2d(4), batch(8)),  # has seen no batch
        (nn.BatchNorm2d(4, track_running_stats=False), batch(8)),
        (nn.GroupNorm(2, 4), batch(8)),
        (nn.Linear(6, 4), batch(8)),
    ],
)
def test_what_has_no_running_statistics_has_no_gap(norm: nn.Module, x: torch.Tensor) -> None:
    assert gap(norm, x).train_eval_gap is None


def test_one_value_per_channel_has_no_statistics() -> None:
    norm = trained("batch")
    assert gap(norm, torch.randn(1, 4, 1, 1)).train_eval_gap is None
    assert norm.training


def test_it_is_shown() -> None:
    found = measure(nn.Sequential(trained("batch")), batch=batch(8, shift=3.0))
    assert "train–eval" in str(found)
    assert f"{found.signals[0].train_eval_gap:.2f}" in str(found)
    assert "train–eval" in found.to_html()
