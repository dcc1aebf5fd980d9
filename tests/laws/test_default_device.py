"""Law: a default device (`torch.set_default_device`) changes nothing that gonio does to a model.

The default device here is the one without values, on which whatever is made there by mistake cannot be read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import init, optim
from gonio import parametrizations as P
from gonio import regularizers as R
from laws.factories import calls_of_torch

Act = Callable[[Any, Tensor], object]
MADE = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
MADE |= {"as_tensor", "tril_indices", "triu_indices"}


class Attending(nn.Module):
    """A transformer layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, dropout=0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x))
        return out


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    made = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*made, nn.Flatten(), nn.Linear(128, 3)).double()
    with torch.no_grad():
        model[3].weight[1] = 0
    return model


def attending() -> Attending:
    torch.manual_seed(0)
    return Attending().double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(model: nn.Module, x: Tensor) -> None:
    optimizer = optim.Muon(gonio.param_groups(model, matrices=True), lr=0.02)
    gonio.Tracker(model, optimizer=optimizer, every=1)
    penalty = gonio.Penalty(model, [(nn.Linear, each(1e-2)) for each in (R.SRIP, R.ScaleShift, R.SelfOrthogonality)])
    for _ in range(2):
        optimizer.zero_grad()
        (model(x).square().mean() + penalty()).backward()
        optimizer.step()


BOTH: dict[str, Act] = {
    "measure": lambda m, x: gonio.measure(m, batch=x),
    "difference": lambda m, _x: gonio.measure(m, copy.deepcopy(m)),
    "balance_": lambda m, x: gonio.balance_(m, example=x),
    "fold_ gains": lambda m, x: gonio.fold_(gonio.parametrize_(m, P.WeightNorm(), where=nn.Linear) and m, example=x),
    "init_": lambda m, _x: gonio.init_(m, init.orthogonal_),
    "lsuv_": lambda m, x: gonio.lsuv_(m, x),
    "SpectralNorm": lambda m, _x: gonio.parametrize_(m, P.SpectralNorm(), where=nn.Linear),
    "Orthogonal": lambda m, _x: gonio.parametrize_(m, P.Orthogonal(), where=nn.Linear),
    "hold_": lambda m, _x: gonio.hold_(m, sgd(m), where=nn.Linear, norm="filters"),
    "train": trained,
}
OF_CONVOLUTIONS: dict[str, Act] = {
    "fold_": lambda m, _x: gonio.fold_(m),
    "recycle_": lambda m, x: gonio.recycle_(m, example=x),
    "calibrate_": lambda m, x: gonio.calibrate_(m, [x]),
    "match_statistics_": lambda m, x: gonio.match_statistics_(m, [x]),
    "certify": lambda m, x: gonio.certify(m, example=x),
    "equivalent": lambda m, _x: gonio.equivalent(m, m),
}
OF_ATTENTION: dict[str, Act] = {
    "rotate_": lambda m, x: gonio.rotate_(m, example=x),
    "clip_qk_": lambda m, x: gonio.clip_qk_(m, sgd(m), example=x),
    "anatomy": lambda m, x: gonio.surgery.anatomy(m, example=x),
}
CASES = [
    *((convolutions, name, act) for name, act in (BOTH | OF_CONVOLUTIONS).items()),
    *((attending, name, act) for name, act in (BOTH | OF_ATTENTION).items()),
]


@pytest.mark.parametrize(("make", "act"), [pytest.param(m, a, id=f"{m.__name__} {n}") for m, n, a in CASES])
def test_the_same_with_a_default_device(make: Callable[[], nn.Module], act: Act) -> None:
    x = seeded(*((4, 3, 8, 8) if make is convolutions else (2, 5, 8)), dtype=torch.float64)
    plain, other = make(), make()
    expected = act(plain, x)
    with torch.device("meta"):
        found = act(other, x)
    assert type(found) is type(expected)
    if isinstance(found, gonio.measuring.Measurements):
        assert [str(each) for each in found.findings] == [str(each) for each in expected.findings]
        assert "not measured" not in str(found)
        assert str(found).splitlines()[0] == str(expected).splitlines()[0]
    ours, theirs = other.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-12)


def test_whatever_makes_a_tensor_names_its_device() -> None:
    assert not [where for where, words in calls_of_torch(MADE) if not {"device", None} & set(words)]
