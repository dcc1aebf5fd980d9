"""Decoupled layers at points where norms or angles do not exist; other such points are in the laws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import angular, magnitude
from laws.support import differentiate
from nn.operators import OPERATORS, is_bounded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_finite(layer: torch.nn.Module, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    output = layer(x)
    found = [output, *differentiate(output, [x, *layer.parameters()])]
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


def test_a_tap_that_alone_meets_an_output_may_be_tiny() -> None:
    """1e-15 of a filter of norm 1: as a filter of its own it counts as zero, or its direction's slope is 1e15."""
    layer = gnn.DecoupledConvTranspose1d(1, 1, 3, stride=3, bias=False, magnitude=magnitude.Sphere())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[0.0, 1.0, 1e-15]]]))
    assert_finite(layer, torch.ones(1, 1, 2))
    assert layer(torch.ones(1, 1, 2)).tolist() == [[[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]]]


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


# of float16, which every dtype holds, and of float32, down to numbers whose squares are 0
numbers = st.one_of(*(st.floats(-1e4, 1e4, width=width, allow_subnormal=True) for width in (16, 32)))
Make = Callable[..., torch.nn.Module]
KINDS: dict[str, Make] = {  # each with filters of three entries, and inputs of three
    "linear": functools.partial(gnn.DecoupledLinear, 3, 1, bias=False),
    "padded": functools.partial(gnn.DecoupledConv1d, 1, 2, 3, padding=1, bias=False),
    "circular": functools.partial(gnn.DecoupledConv1d, 1, 1, 3, padding=2, padding_mode="circular", bias=False),
    "depthwise": functools.partial(gnn.DecoupledConv1d, 2, 2, 3, padding=1, groups=2, bias=False),
    "transposed": functools.partial(gnn.DecoupledConvTranspose1d, 1, 2, 3, stride=2, bias=False),
}


@dataclass(frozen=True)
class Problem:
    """An operator, a layer, and a filter and an input, or the same for both."""

    options: dict[str, Any]
    dtype: torch.dtype
    kind: str
    training: bool
    row: list[float]
    entries: list[float]

    def layer(self) -> torch.nn.Module:
        found = KINDS[self.kind](dtype=self.dtype, **self.options).train(self.training)
        with torch.no_grad():
            found.weight.copy_(torch.tensor(self.row).expand_as(found.weight))
        return found

    def input(self) -> Tensor:
        rows = [self.entries, self.row, [-v for v in self.row]]
        x = torch.tensor(rows, dtype=self.dtype)
        if self.kind == "linear":
            return x
        return x.unsqueeze(1).repeat(1, 2 if self.kind == "depthwise" else 1, 1)

    @property
    def may_leave_float16(self) -> bool:
        """Whether the formula itself is beyond 65504 for some of these numbers."""
        unbounded = not is_bounded(self.options["magnitude"]) or self.options["weighted"] == "linear"
        return self.dtype is torch.float16 and unbounded


problems = st.builds(
    Problem,
    st.sampled_from(OPERATORS),
    st.sampled_from(DTYPES),
    st.sampled_from(list(KINDS)),
    st.booleans(),
    st.lists(numbers, min_size=3, max_size=3),
    st.lists(numbers, min_size=3, max_size=3),
)


def check_finite(problem: Problem) -> None:
    """The output is finite, and as large as it may be; so is the gradient, where it is within the dtype's range."""
    layer, x = problem.layer(), problem.input()
    output = layer(x).detach()
    if problem.may_leave_float16:
        return
    assert bool(output.isfinite().all())
    if is_bounded(layer.operator.magnitude) and layer.operator.weighted != "linear":
        assert float(output.abs().max()) <= layer.operator.magnitude.alpha * 1.02
    if problem.dtype is not torch.float16:  # 1/‖w‖ of the smallest filter times the largest input is 1e8
        assert_finite(layer, x)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(problems)
def test_finite_for_any_numbers(problem: Problem) -> None:
    """Vectors from subnormal to 1e4, parallel or not, in every operator, kind of layer and dtype."""
    check_finite(problem)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, derandomize=True, database=None)
@given(problems)
def test_finite_for_ten_thousand_numbers(problem: Problem) -> None:
    check_finite(problem)


def test_an_angle_between_equal_vectors_has_a_finite_gradient_in_bfloat16_autocast() -> None:
    layer = gnn.DecoupledLinear(4, 1, magnitude=magnitude.Sphere(), angular=angular.Linear())
    x = layer.weight.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    (grad,) = torch.autograd.grad(output.float().sum(), x)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("g", [angular.Linear(), angular.Sigmoid()], ids=repr)
def test_a_patch_of_one_input_has_almost_no_gradient(g: angular.Angular, dtype: torch.dtype) -> None:
    """Its cosine is ±1 but for the rounding of half precision; with the bound of float32 it would be 1e4 or NaN."""
    for layer in (
        gnn.DecoupledConv2d(1, 64, 1, magnitude=magnitude.Sphere(), angular=g, dtype=dtype),
        gnn.DecoupledConvTranspose2d(1, 64, 1, magnitude=magnitude.Sphere(), angular=g, dtype=dtype),
    ):
        x = seeded(8, 1, 8, 8, dtype=dtype).requires_grad_()
        layer(x).sum().backward()
        for grad in (x.grad, layer.weight.grad):
            assert float(grad.abs().max()) < 50
    layer = gnn.DecoupledConv2d(1, 64, 1, magnitude=magnitude.Sphere(), angular=g)
    x = seeded(8, 1, 8, 8).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        output = layer(x)
    output.float().sum().backward()
    assert float(x.grad.abs().max()) < 50
