"""Decoupled layers at points where norms or angles do not exist; other such points are in the laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import angular, magnitude
from nn.operators import OPERATORS, gradients

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_finite(layer: torch.nn.Module, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    output = layer(x)
    found = [output, *gradients(output, [x, *layer.parameters()])]
    assert all(bool(t.isfinite().all()) for t in found), layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_patches_and_zero_filters(dtype: torch.dtype) -> None:
    """A dead filter, a black corner, a black image; and both at once."""
    x = seeded(2, 4, 6, 6, dtype=dtype)
    x[0, :, :4, :4] = 0
    for options in OPERATORS:
        for layer in (
            gnn.DecoupledConv2d(4, 6, 3, padding=1, groups=2, dtype=dtype, **options),
            gnn.DecoupledConvTranspose2d(4, 6, 3, stride=2, groups=2, dtype=dtype, **options),
        ):
            with torch.no_grad():
                layer.weight[:2] = 0
            assert_finite(layer, x)


def test_what_a_zero_patch_and_a_zero_filter_give() -> None:
    for options in OPERATORS:
        layer = gnn.DecoupledLinear(4, 3, **options)
        with torch.no_grad():
            layer.weight[0] = 0
        x = torch.stack([torch.zeros(4), torch.ones(4)])
        output = layer(x)
        torch.testing.assert_close(output[0], layer.bias)  # h·g is 0 where a direction is missing
        torch.testing.assert_close(output[1, 0], layer.bias[0])


def test_the_gradient_at_a_zero_patch_is_the_limit() -> None:
    """tanh(‖x‖/ρ) cos θ has the slope 1/ρ along the filter at x = 0; the sphere has no limit, and gives 0."""
    for h, slope in ((magnitude.Tanh(radius=2.0, radius_in="absolute"), 0.5), (magnitude.Sphere(), 0.0)):
        layer = gnn.DecoupledLinear(3, 1, bias=False, magnitude=h)
        x = torch.zeros(1, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x).sum(), x)
        direction = layer.weight.detach() / layer.weight.detach().norm()
        torch.testing.assert_close(grad, slope * direction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_that_overflow_float16(dtype: torch.dtype) -> None:
    layer = gnn.DecoupledConv2d(4, 3, 3, bias=False, dtype=dtype)
    output = layer(300 * torch.ones(1, 4, 5, 5, dtype=dtype))
    assert float(output.detach().abs().max()) > 0
    assert_finite(layer, 300 * torch.ones(1, 4, 5, 5, dtype=dtype))


def test_an_empty_batch_moves_nothing() -> None:
    layer = gnn.DecoupledConv2d(3, 4, 3)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    output = layer(torch.zeros(0, 3, 5, 5))
    output.sum().backward()
    assert output.shape == (0, 4, 3, 3)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key


numbers = st.floats(-1e4, 1e4, width=16, allow_subnormal=True)


@st.composite
def problems(draw: Any) -> tuple[dict[str, Any], torch.dtype, list[float], list[float]]:
    return (
        draw(st.sampled_from(OPERATORS)),
        draw(st.sampled_from(DTYPES)),
        draw(st.lists(numbers, min_size=3, max_size=3)),
        draw(st.lists(numbers, min_size=3, max_size=3)),
    )


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(problems())
def test_finite_for_any_numbers(problem: tuple[dict[str, Any], torch.dtype, list[float], list[float]]) -> None:
    """Vectors from subnormal to 1e4, parallel or not: the output is finite and as large as it may be."""
    options, dtype, row, entries = problem
    layer = gnn.DecoupledLinear(3, 1, bias=False, dtype=dtype, **options)
    layer.weight.data.copy_(torch.tensor([row]))
    x = torch.tensor([entries, row, [-v for v in row]], dtype=dtype)
    output = layer(x)
    if dtype is torch.float16 and not layer.magnitude.bounded:
        return  # an unbounded operator may leave the range of float16
    if options["weighted"] == "linear" and dtype is torch.float16:
        return
    assert bool(output.isfinite().all())
    if layer.magnitude.bounded and options["weighted"] != "linear":
        assert float(output.detach().abs().max()) <= layer.magnitude.alpha * 1.02
    if dtype is not torch.float16:
        assert_finite(layer, x)


def test_an_angle_between_equal_vectors_has_a_finite_gradient_in_bfloat16_autocast() -> None:
    layer = gnn.DecoupledLinear(4, 1, magnitude=magnitude.Sphere(), angular=angular.Linear())
    x = layer.weight.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    (grad,) = torch.autograd.grad(output.float().sum(), x)
    assert bool(grad.isfinite().all())
