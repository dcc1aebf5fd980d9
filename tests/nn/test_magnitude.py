"""Magnitude functions: their formulas, limits and bounds."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re

import pytest
import torch

from catalog import decoupled as reference
from gonio.errors import InvalidArgumentError
from gonio.nn import magnitude
from nn.operators import is_bounded
from tolerances import exact

NORM = torch.linspace(0, 6, 61, dtype=torch.float64)
NUMBERS = {"alpha": 1.5, "beta": 0.2, "radius": 0.7}
ALL = [
    kind(**{field.name: NUMBERS[field.name] for field in dataclasses.fields(kind) if field.name in NUMBERS})
    for kind in (getattr(magnitude, name) for name in magnitude.__all__ if name != "Magnitude")
]
EXACT = exact(torch.float64)
by_name = pytest.mark.parametrize("h", ALL, ids=lambda h: type(h).__name__)


def assert_equal(a: magnitude.Magnitude, b: magnitude.Magnitude, norm: torch.Tensor = NORM) -> None:
    torch.testing.assert_close(a(norm), b(norm), **EXACT)


@by_name
def test_values_are_the_papers(h: magnitude.Magnitude) -> None:
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in h.coefficients.items()}
    torch.testing.assert_close(h(NORM[1:]), reference.magnitude(h, NORM[1:], numbers), **EXACT)


@by_name
def test_slope_is_value_over_norm(h: magnitude.Magnitude) -> None:
    slope = torch.as_tensor(h.slope(NORM[1:], **h.coefficients), dtype=torch.float64)
    torch.testing.assert_close((slope * NORM[1:]).expand(60), h(NORM[1:]), **EXACT)


@by_name
def test_bounds(h: magnitude.Magnitude) -> None:
    """A docstring says whether the function stays below alpha for any input."""
    said = re.search(r"Bounded by|Unbounded", type(h).__doc__ or "")
    assert said is not None
    assert (said[0] == "Bounded by") is is_bounded(h)
    assert h.continuous_at_zero is (float(h(torch.zeros(1))) == 0)


def test_limits() -> None:
    assert_equal(magnitude.Segmented(beta=1.0), magnitude.Linear())
    assert_equal(magnitude.Segmented(alpha=1 / 0.7, beta=0.0, radius=0.7), magnitude.Ball(radius=0.7))
    assert_equal(magnitude.Mixed(beta=0.0), magnitude.Linear())
    assert_equal(magnitude.Mixed(alpha=0.0, beta=2.0), magnitude.Logarithm(alpha=2.0))
    assert_equal(magnitude.Ball(radius=1e-9), magnitude.Sphere(), NORM[1:])
    assert_equal(magnitude.Tanh(radius=1e-3), magnitude.Sphere(), NORM[1:])


def test_a_magnitude_is_a_value() -> None:
    h = magnitude.Tanh(radius=2.0)
    assert h == magnitude.Tanh(radius=2.0)
    assert hash(h) == hash(magnitude.Tanh(radius=2.0))
    assert pickle.loads(pickle.dumps(h)) == copy.deepcopy(h) == h
    assert magnitude.Tanh(**dataclasses.asdict(h)) == h
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'radius'"):
        h.radius = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"radius": 0.0}, "Tanh: invalid value of radius; found 0.0. Pass a positive number"),
        ({"radius": float("inf")}, "found inf. Pass a finite number"),
        ({"alpha": "1"}, "of alpha; found '1'"),
        ({"alpha": True}, "of alpha; found True. Pass a finite number"),
        ({"learn_radius": 1}, "of learn_radius; found 1. Pass True or False"),
        ({"radius_in": "norms"}, 'radius_in; found \'norms\'. Pass "mean_norm" or "absolute"'),
    ],
)
def test_wrong_fields(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        magnitude.Tanh(**fields)  # type: ignore[arg-type]
