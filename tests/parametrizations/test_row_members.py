"""Sphere, weight norm and weight standardisation: one filter at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from catalog import seeded
from gonio import geometry
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.parametrizations import filters as module
from parametrizations.layers import LAYERS, make, sample
from tolerances import exact

EVERY = pytest.mark.parametrize("name", LAYERS)


def filters(layer: nn.Module) -> torch.Tensor:
    return geometry.matrix_view(layer.weight.detach(), geometry.layout_of(layer)).flatten(0, 1)


@EVERY
def test_weight_norm_has_one_gain_per_output_filter(name: str) -> None:
    layer = make(name)
    before = layer.weight.detach().clone()
    norm = P.attach(layer, "weight", P.WeightNorm())
    torch.testing.assert_close(layer.weight, before, **exact(torch.float32))
    x = sample(layer)
    y = layer(x)
    bias = torch.zeros(()) if layer.bias is None else layer.bias.view(-1, *[1] * (y.dim() - 2))
    with torch.no_grad():
        norm.magnitude.mul_(torch.arange(1.0, 1 + norm.magnitude.numel()))
    scale = torch.arange(1.0, 1 + y.shape[1]).view(-1, *[1] * (y.dim() - 2))
    torch.testing.assert_close(layer(x) - bias, (y - bias) * scale, rtol=1e-4, atol=1e-5)


@EVERY
def test_kernel_and_formula_of_weight_norm_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(name).double()
    norm = P.attach(layer, "weight", P.WeightNorm())
    raw, magnitude = layer._parameters["weight"], norm.magnitude
    cotangent = seeded(*raw.shape, seed=1, dtype=torch.float64)
    found = torch.autograd.grad((layer.weight * cotangent).sum(), (raw, magnitude))
    weight = layer.weight
    monkeypatch.setattr(module, "applies_to", lambda *_: False)
    formula = layer.weight
    torch.testing.assert_close(weight, formula)
    expected = torch.autograd.grad((formula * cotangent).sum(), (raw, magnitude))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["linear", "grouped conv2d", "grouped transposed conv2d"])
def test_derivatives_of_weight_norm_in_both_arguments(name: str) -> None:
    layer = make(name).double()
    P.attach(layer, "weight", P.WeightNorm())
    parameters = {key: p.detach().requires_grad_() for key, p in layer.named_parameters() if key != "bias"}

    def weight(raw: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
        twin = copy.deepcopy(layer)
        twin._parameters["weight"] = raw
        twin.weight_parametrization._parameters["magnitude"] = magnitude
        return twin.weight

    assert gradcheck(weight, tuple(parameters.values()))
    assert gradgradcheck(weight, tuple(parameters.values()))


def test_zero_filters_of_weight_norm_stay_apart_from_the_others() -> None:
    layer = make("conv2d")
    with torch.no_grad():
        layer.weight[1] = 0
    norm = P.attach(layer, "weight", P.WeightNorm())
    layer(sample(layer)).square().sum().backward()
    gradient = layer._parameters["weight"].grad
    assert bool((layer.weight[1] == 0).all())
    assert bool((gradient[1] == 0).all())
    assert norm.magnitude.grad[1] == 0
    assert bool((gradient[0].abs() > 0).any())
    again = torch.autograd.grad(layer.weight.square().sum(), layer.parameters(), create_graph=True, allow_unused=True)
    sum(g.square().sum() for g in again if g is not None).backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("scale", ["std", "fan_in"])
@EVERY
def test_standardised_filters(name: str, scale: str) -> None:
    layer = make(name)
    standard = P.attach(layer, "weight", P.WeightStandardization(scale=scale, gain=1.7))
    rows = filters(layer).double()
    expected = 1.7 / (rows.shape[1] ** 0.5 if scale == "fan_in" else 1)
    assert float(rows.mean(1).abs().max()) < 1e-6
    torch.testing.assert_close(rows.std(1), torch.full((len(rows),), expected).double(), rtol=1e-5, atol=0)
    assert standard.holds(layer.weight)
    assert not standard.holds(1.1 * layer.weight)
    assert not standard.holds(layer.weight + 0.01)


def test_the_fan_in_scale_with_the_std_gain_keeps_variances() -> None:
    """Brock et al.: a ReLU of unit normal inputs, standardised weights, the gain for it."""
    layer = nn.Linear(2000, 500, bias=False)
    P.attach(layer, "weight", P.WeightStandardization(scale="fan_in", gain=1.7129))
    variance = layer(seeded(200, 2000, seed=5).relu()).var()
    assert abs(float(variance.detach()) - 1) < 0.05


@EVERY
def test_learned_gains_start_with_the_deviations(name: str) -> None:
    layer = make(name)
    rows = filters(layer)
    standard = P.attach(layer, "weight", P.WeightStandardization(scale="fan_in", gain=2.0, learn_gain=True))
    torch.testing.assert_close(filters(layer), rows - rows.mean(1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert standard.gains.shape == (len(rows),)
    assert standard.holds(layer.weight)


def test_constant_filters_become_zero() -> None:
    layer = make("conv2d")
    with torch.no_grad():
        layer.weight[0] = 0.1
        layer.weight[1] = 1e4
    P.attach(layer, "weight", P.WeightStandardization())
    layer(sample(layer)).square().sum().backward()
    assert bool((layer.weight[:2] == 0).all())
    assert bool((layer._parameters["weight"].grad[:2] == 0).all())
    assert bool((layer.weight[2] != 0).any())


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: P.WeightStandardization(scale="fan_out"), 'scale="std" or "fan_in"; found \'fan_out\''),
        (lambda: P.WeightStandardization(gain=0), "finite gain > 0; found 0"),
        (lambda: P.Sphere(radius=-1.0), "finite radius > 0; found -1"),
    ],
)
def test_refusals(make_it: Callable[[], P.Parametrization], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_it()


def test_a_filter_of_one_entry_has_no_deviation() -> None:
    with pytest.raises(NotApplicableError, match="filters have one entry"):
        P.attach(nn.Conv2d(4, 4, 1, groups=4), "weight", P.WeightStandardization())
