"""Gains by quadrature: closed forms, sampling, the field's constants, any callable."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.init import gain
from gonio.init.gain import ACTIVATIONS, resolve_gain
from references.init import sampled_gain

# name: (rms, std), the table of the field's known values to four digits
TABLE = {
    "relu": (1.4142, 1.7129),
    "leaky_relu": (1.4141, 1.7048),
    "tanh": (1.5925, 1.5925),
    "gelu": (1.5335, 1.7009),
    "silu": (1.6765, 1.7872),
    "mish": (1.4868, 1.5920),
    "elu": (1.2452, 1.2708),
    "selu": (1.0000, 1.0000),
    "softplus": (1.0419, 1.9191),
    "sigmoid": (1.8462, 4.8013),
    "hardswish": (1.7367, 1.8139),
}


@pytest.mark.parametrize("name", TABLE)
def test_known_values(name: str) -> None:
    assert (gain(name), gain(name, kind="std")) == pytest.approx(TABLE[name], abs=6e-5)


def test_any_callable() -> None:
    assert gain(lambda z: 3 * z) == pytest.approx(1 / 3)
    assert gain(nn.LeakyReLU(0.2)) == pytest.approx(1.3868, abs=5e-5)
    module = nn.PReLU(init=0.2)
    assert gain(module) == pytest.approx(1.3868, abs=5e-5)
    assert (module.weight.dtype, module.training) == (torch.float32, True)  # it was not changed
    assert gain(nn.ReLU(inplace=True)) == pytest.approx(gain("relu"))
    assert gain("relu") == pytest.approx(gain(F.relu))  # and the nodes were not changed in place
    assert resolve_gain(2) == resolve_gain(torch.tensor(2.0)) == 2.0
    assert resolve_gain("relu") == pytest.approx(sqrt(2))


ARGUMENTS: dict[str, tuple[float, ...]] = {"Threshold": (0.1, 0.2)}  # of modules without defaults
NOT_ELEMENTWISE = {"GLU", "MultiheadAttention", "Softmin", "Softmax", "Softmax2d", "LogSoftmax"}
MODULES = sorted(set(nn.modules.activation.__all__) - NOT_ELEMENTWISE)


@pytest.mark.parametrize("kind", ["rms", "std"])
@pytest.mark.parametrize("name", MODULES)
def test_every_module_equals_a_million_samples(name: str, kind: str) -> None:
    activation = getattr(nn, name)(*ARGUMENTS.get(name, ())).double().eval()

    @torch.no_grad()
    def function(z: np.ndarray) -> np.ndarray:
        return activation(torch.from_numpy(z)).numpy()

    assert gain(activation, kind=kind) == pytest.approx(sampled_gain(function, kind), rel=0.01)


def moments(function, kinks: tuple[float, ...] = ()) -> tuple[float, float]:
    """E f, E f² for standard normal input, by panels five times as fine as the library's, with ends at the kinks."""
    node, weight = np.polynomial.legendre.leggauss(16)
    edges = np.union1d(np.arange(-160, 161) / 10, kinks)
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    z = (middle[:, None] + half[:, None] * node).ravel()
    w = (half[:, None] * weight).ravel() * np.exp(-z * z / 2) / sqrt(2 * pi)
    value = function(torch.from_numpy(z)).numpy()
    return float((w * value).sum()), float((w * value**2).sum())


PIECEWISE = {
    "jump": (nn.Threshold(0.3, 1.0), (0.3,)),
    "kinks": (nn.Hardtanh(-0.7, 0.3), (-0.7, 0.3)),
    "sign": (torch.sign, (0.0,)),
    "shrinkage": (nn.Hardshrink(0.123), (-0.123, 0.123)),
}


@pytest.mark.parametrize("name", [*sorted(ACTIVATIONS), *PIECEWISE])
def test_the_quadrature_is_accurate_to_nine_digits(name: str) -> None:
    """Also with kinks and jumps anywhere."""
    activation, kinks = PIECEWISE.get(name) or (ACTIVATIONS[name], ())
    mean, square = moments(activation, kinks)
    assert gain(activation) == pytest.approx(1 / sqrt(square), rel=1e-9)
    assert gain(activation, kind="std") == pytest.approx(1 / sqrt(square - mean**2), rel=1e-9)


NUMBER = "gain must be a finite number, the name of an activation"


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: gain("rleu"), UnknownNameError, r"no activation named 'rleu'\. Did you mean relu"),
        (lambda: gain("relu", kind="mean"), InvalidArgumentError, "kind among rms, .*; found 'mean'"),
        (lambda: gain("gelu", "torch"), InvalidArgumentError, r"torch's table of gains has linear, .*; found 'gelu'"),
        (lambda: gain("sigmoid", "small"), InvalidArgumentError, r"an activation that is 0 at 0 and has a slope there"),
        (lambda: gain(torch.ones_like, kind="std"), InvalidArgumentError, r"positive std .* found a squared std of 0"),
        (lambda: gain(nn.GLU()), InvalidArgumentError, r"elementwise activation.*found shape \(512,\)"),
        (lambda: gain(lambda z: 1.0), InvalidArgumentError, r"elementwise activation.*found float"),
        (lambda: gain(True), InvalidArgumentError, r"name of an activation or a function; found True"),
        *((lambda x=x: resolve_gain(x), InvalidArgumentError, NUMBER) for x in (float("nan"), None, torch.ones(2))),
    ],
)
def test_refusals(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_a_steep_activation_and_one_that_draws_numbers() -> None:
    assert gain(lambda z: torch.tanh(1e4 * (z - 0.2))) == pytest.approx(1, rel=1e-4)  # nearly a sign
    g = torch.Generator().manual_seed(0)
    assert gain(lambda z: z + torch.randn(z.shape, generator=g, dtype=z.dtype)) == pytest.approx(1 / sqrt(2), rel=0.1)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("tanh", 1.0), ("hardtanh", 1.0), ("softsign", 1.0), ("sin", 1.0), (lambda z: torch.atan(2 * z), 0.5),
     ("relu", 2**0.5), ("leaky_relu", (2 / (1 + 0.01**2)) ** 0.5), ("gelu", 2.0), ("silu", 2.0)],
)  # fmt: skip
def test_small_gains_are_one_over_the_slopes_at_0(activation: Any, expected: float) -> None:
    assert gain(activation, "small") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_the_gain_that_trains_is_small_for_odd_bounded_activations_alone(name: str) -> None:
    kind = "small" if name in ("tanh", "hardtanh", "softsign", "sin") else "rms"
    assert gain(name, "trains") == gain(name, kind)


@pytest.mark.parametrize("name", ["linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu"])
def test_the_table_of_torch(name: str) -> None:
    assert gain(name, "torch") == nn.init.calculate_gain(name)
