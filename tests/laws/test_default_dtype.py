"""Law: a default dtype (`torch.set_default_dtype`) changes nothing that gonio does to tensors and models that exist."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import geometry as G
from gonio import optim
from gonio import parametrizations as P
from laws.factories import calls_of_torch

MADE = {"empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randn", "zeros"}
OTHER = [torch.float64, torch.bfloat16]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    made = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*made, nn.Flatten(), nn.Linear(128, 3))
    with torch.no_grad():
        model[3].weight[1] = 0
    return model


def stepped(model: nn.Module, _x: Tensor) -> optim.Muon:
    optimizer = optim.Muon(gonio.param_groups(model, matrices=True), lr=0.02)
    for _ in range(300):  # more than bfloat16 counts
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return optimizer


ACTS: dict[str, Callable[[Any, Tensor], object]] = {
    "measure": lambda m, x: gonio.measure(m, batch=x),
    "difference": lambda m, _x: gonio.measure(m, copy.deepcopy(m)),
    "balance_": lambda m, x: gonio.balance_(m, example=x),
    "lsuv_": lambda m, x: gonio.lsuv_(m, x),
    "recycle_": lambda m, x: gonio.recycle_(m, example=x),
    "match_statistics_": lambda m, x: gonio.match_statistics_(m, [x]),
    "SpectralNorm": lambda m, _x: gonio.parametrize_(m, P.SpectralNorm(), where=nn.Linear),
    "certify": lambda m, x: gonio.certify(m, example=x),
    "Muon": stepped,
}


@pytest.mark.parametrize("dtype", OTHER)
@pytest.mark.parametrize("name", ACTS)
def test_models_are_treated_the_same(name: str, dtype: torch.dtype) -> None:
    x, plain, other = seeded(4, 3, 8, 8), network(), network()
    expected: Any = ACTS[name](plain, x)
    with default(dtype):
        found: Any = ACTS[name](other, x)
    if hasattr(expected, "to_dict"):
        assert json.dumps(found.to_dict(), default=str) == json.dumps(expected.to_dict(), default=str)
    if isinstance(expected, optim.Muon):
        steps = [
            [float(state["step"]) for state in each.state.values() if "step" in state] for each in (found, expected)
        ]
        assert steps[0] == steps[1]
    for key, value in other.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=0)


OF_VECTORS: dict[str, Callable[[Tensor], object]] = {
    "SignIndex": lambda x: G.SignIndex(x).query(x[:5], 3).indices,
    "match": lambda x: torch.tensor(G.match(x[:30], x[20:40]).chance, dtype=torch.float64),
    "near_duplicates": lambda x: G.near_duplicates(torch.cat([x, x[:40] + 1e-3]), cosine=0.9, recall=0.9).pairs,
    "sign_hash": G.sign_hash,
    "spectral_norm": lambda x: G.spectral_norm(x[:200], steps=4),
    "top_subspace": lambda x: G.top_subspace(x[:200], 3).values,
}


@pytest.mark.parametrize("dtype", OTHER)
@pytest.mark.parametrize("name", OF_VECTORS)
def test_vectors_are_compared_the_same(name: str, dtype: torch.dtype) -> None:
    vectors = seeded(3000, 24)
    expected = OF_VECTORS[name](vectors)
    with default(dtype):
        found = OF_VECTORS[name](vectors)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *OTHER])
@pytest.mark.parametrize("kind", [gonio.nn.SwitchableNorm2d, gonio.nn.DecoupledConv2d])
def test_an_average_of_all_batches_is_their_mean(kind: type[nn.Module], dtype: torch.dtype) -> None:
    sizes = (3,) if kind is gonio.nn.SwitchableNorm2d else (3, 3, 1)
    layer: Any = kind(*sizes, momentum=None, dtype=torch.float64)
    batches = [seeded(2, 3, 4, 4, seed=seed, dtype=torch.float64) * 3.0**seed for seed in range(7)]
    with default(dtype):
        for batch in batches:
            layer(batch)
    if kind is gonio.nn.SwitchableNorm2d:
        expected = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
        torch.testing.assert_close(layer.running_mean, expected, rtol=1e-12, atol=1e-12)
    else:
        expected = torch.stack([batch.norm(dim=1).mean() for batch in batches]).mean(0, keepdim=True)
        torch.testing.assert_close(layer.mean_norm, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *OTHER])
@pytest.mark.parametrize("factor", [0.7, 0.1, 1 / 3])
def test_a_constant_of_the_graph_keeps_its_digits(factor: float, dtype: torch.dtype) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * factor

    x = seeded(2, 3)
    with default(dtype):
        assert gonio.certify(Scaled(), x).upper == pytest.approx(factor, rel=1e-8)


def test_whatever_makes_numbers_names_their_dtype() -> None:
    loose = [
        where for where, words in calls_of_torch(MADE) if not ({"dtype", "out", None} & set(words) or _meta(words))
    ]
    assert not loose


def _meta(words: dict[str | None, ast.expr]) -> bool:
    device = words.get("device")
    return isinstance(device, ast.Constant) and device.value == "meta"
