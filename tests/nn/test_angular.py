"""Angular activations and the arcsine under them."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from catalog import decoupled as reference
from gonio.errors import InvalidArgumentError
from gonio.nn import angular
from gonio.nn.angular import FLOOR, bounded_asin
from tolerances import close, exact

ODD = (angular.Cosine(), angular.Linear(), angular.Sigmoid(), angular.Sigmoid(k=0.7), angular.SquaredCosine())
ALL = (*ODD, angular.RectifiedCosine())
by_name = pytest.mark.parametrize("g", ALL, ids=repr)
ANGLES = torch.linspace(0.01, math.pi - 0.01, 50, dtype=torch.float64)


@by_name
def test_values_are_the_papers(g: angular.Angular) -> None:
    torch.testing.assert_close(g(ANGLES), reference.angular(g, ANGLES), **close(torch.float64))


@pytest.mark.parametrize("g", ODD, ids=repr)
def test_fixed_points_and_symmetry(g: angular.Angular) -> None:
    ends = g(torch.tensor([0.0, math.pi / 2, math.pi], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), **exact(torch.float64))
    torch.testing.assert_close(g(math.pi - ANGLES), -g(ANGLES), **close(torch.float64))


@by_name
def test_it_falls_with_the_angle(g: angular.Angular) -> None:
    assert bool((g(ANGLES).diff() <= 0).all())


@by_name
def test_combine_is_h_times_g(g: angular.Angular) -> None:
    """The short forms of single activations equal the definition."""
    norm = torch.linspace(0.5, 2, 50, dtype=torch.float64)
    slope = torch.linspace(2, 1, 50, dtype=torch.float64)
    combined = g.combine(norm * ANGLES.cos(), norm, slope)
    torch.testing.assert_close(combined, slope * norm * reference.angular(g, ANGLES), **close(torch.float64))


def test_the_rectified_cosine_is_zero_beyond_the_right_angle() -> None:
    """Negative control of the symmetry: it is the one activation that is not odd."""
    ends = angular.RectifiedCosine()(torch.tensor([0.0, math.pi / 2, 2.0, math.pi], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), **exact(torch.float64))


def test_a_narrow_sigmoid_does_not_overflow() -> None:
    """The paper's form is NaN here; the value is checked against 50 digits."""
    k, angles = 0.01, [0.0, 1.5, 1.57, 1.6, math.pi]
    with mpmath.workdps(50):
        a = mpmath.exp(-mpmath.pi / (2 * k))
        inner = [mpmath.exp((mpmath.mpf(t) - mpmath.pi / 2) / k) for t in angles]
        expected = [float((1 + a) / (1 - a) * (1 - e) / (1 + e)) for e in inner]
    found = angular.Sigmoid(k=k)(torch.tensor(angles, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **close(torch.float64))


@pytest.mark.parametrize("k", [0.0, -1.0, float("nan"), float("inf")])
def test_the_width_of_a_sigmoid_is_positive(k: float) -> None:
    with pytest.raises(InvalidArgumentError, match="Sigmoid: invalid width k; found"):
        angular.Sigmoid(k=k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_arcsine_at_its_ends(dtype: torch.dtype) -> None:
    """Exact value, finite gradient that is not cut to zero, also for a cosine that rounding pushed beyond 1."""
    c = torch.tensor([1.0, -1.0, 1.0 + 2 * torch.finfo(dtype).eps, 0.0], dtype=dtype, requires_grad=True)
    value = bounded_asin(c)
    half = math.pi / 2
    torch.testing.assert_close(
        value.double(), torch.tensor([half, -half, half, 0.0], dtype=torch.float64), **exact(dtype)
    )
    value.sum().backward()
    assert bool(c.grad.isfinite().all())
    assert bool((c.grad[:3] >= 0.9 * FLOOR[dtype] ** -0.5).all())
    assert c.grad[3] == 1


@pytest.mark.parametrize("theta", [0.0, 1e-8, 1e-5, 1e-2, 1.0, math.pi / 2, 3.0, math.pi - 1e-5, math.pi])
def test_the_arcsine_against_many_digits(theta: float) -> None:
    """asin(cos θ) in float64: right to the rounding of the cosine, the slope right where it is not floored."""
    c = torch.tensor(math.cos(theta), dtype=torch.float64, requires_grad=True)
    value = bounded_asin(c)
    value.backward()
    with mpmath.workdps(50):
        cosine = mpmath.mpf(c.item())
        expected = float(mpmath.asin(cosine))
        slope = float(1 / mpmath.sqrt(max(1 - cosine**2, FLOOR[torch.float64])))
    assert value.item() == pytest.approx(expected, rel=1e-15)
    assert c.grad.item() == pytest.approx(slope, rel=1e-8)


def test_the_arcsine_under_function_transforms() -> None:
    """Same value and derivative, at the ends too."""
    c = torch.tensor([-1.01, -1.0, -0.99999999, -0.5, 0.0, 0.9, 1.0], dtype=torch.float64)
    slope = torch.func.vmap(torch.func.grad(bounded_asin))(c)
    value, tangent = torch.func.jvp(bounded_asin, (c,), (torch.ones_like(c),))
    x = c.clone().requires_grad_()
    eager = bounded_asin(x)
    (grad,) = torch.autograd.grad(eager.sum(), x)
    torch.testing.assert_close(value, eager.detach(), **exact(torch.float64))
    for found in (slope, tangent):
        torch.testing.assert_close(found, grad, rtol=1e-6, atol=0)


def test_derivatives_of_the_arcsine() -> None:
    c = torch.linspace(-0.9, 0.9, 7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(bounded_asin, (c,))
    assert gradgradcheck(bounded_asin, (c,))
