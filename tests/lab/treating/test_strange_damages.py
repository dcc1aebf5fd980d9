"""Damages that no rule was written with, each treated or refused: the score comes back, or the model is unchanged.

They are kept apart from the bank of planted damages: none of them is in `benchmarks/planted_damage.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gonio
from lab.treating.test_doctor import network, same, task

Damage = Callable[[nn.Sequential], None]


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(model: nn.Sequential) -> None:
        tensor = model.state_dict()[name]
        tensor.copy_(change(tensor.clone()))

    return damage


def _first_half(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cat([x[: len(x) // 2] * factor, x[len(x) // 2 :]])


def _both(first: Damage, second: Damage) -> Damage:
    def damage(model: nn.Sequential) -> None:
        first(model)
        second(model)

    return damage


DAMAGES: dict[str, Damage] = {
    "a whole filter NaN": _set("0.weight", lambda w: w.index_fill(0, torch.tensor([3]), torch.nan)),
    "a column NaN": _set("3.weight", lambda w: w.index_fill(1, torch.tensor([3]), torch.nan)),
    "half of the filters times 300": _set("0.weight", _first_half(300)),
    "each filter times another number": _set("0.weight", lambda w: w * torch.logspace(-4, 4, 16)[:, None]),
    "one gain infinite": _set("1.weight", lambda g: g.index_fill(0, torch.tensor([2]), torch.inf)),
    "one gain times 500": _set("1.weight", lambda g: g * torch.tensor([1.0] * 15 + [500.0])),
    "one shift −1000": _set("1.bias", lambda b: b - torch.tensor([0.0] * 15 + [1000.0])),
    "gains and variances swapped": _set("1.running_var", lambda v: v.flip(0) * 1e4),
    "bias of the layer before a norm +200": _set("0.bias", lambda b: b + 200),
    "weights squared": _set("0.weight", lambda w: w.sign() * w * w * 100),
    "a block of the head 0": _set("3.weight", lambda w: w * (torch.arange(16) < 5)),
    "float16 overflow": _set("3.weight", lambda w: (w * 1e6).half().float()),
    "two layers at once": _both(
        _set("0.weight", lambda w: w * torch.tensor([1e4] + [1.0] * 15)[:, None]),
        _set("1.running_mean", lambda m: m.index_fill(0, torch.tensor([5]), torch.nan)),
    ),
}


@torch.no_grad()
def score(model: nn.Module) -> float:
    data = task()
    outputs = model(data.test.inputs)
    return gonio.lab.tasks.accuracy(outputs, data.test.targets) if bool(torch.isfinite(outputs).all()) else 0.0


QUICK = ("a whole filter NaN", "half of the filters times 300", "two layers at once")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in DAMAGES])
def test_a_strange_damage_is_treated_or_refused(name: str) -> None:
    healthy = network()
    damaged = copy.deepcopy(healthy)
    DAMAGES[name](damaged)
    before = copy.deepcopy(damaged)
    treated = gonio.doctor(damaged, task=task())
    assert same(damaged, before)
    if treated.kept:
        assert score(treated.model) >= score(damaged)
        assert score(treated.model) >= score(healthy) - 2.5 or treated.after.findings
    else:
        assert same(treated.model, before)
        assert not treated.before.findings or treated.untreated or treated.steps
    treated.undo_()
    assert same(treated.model, before)
