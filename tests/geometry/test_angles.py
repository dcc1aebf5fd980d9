"""Cosines and angles: accurate at both ends, within bounds, with live and bounded gradients."""

from __future__ import annotations

from math import cos, pi, sin, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from geometry.examples import REPEATABLE
from gonio.errors import InvalidArgumentError
from gonio.geometry import (
    alignment,
    alignment_zscore,
    angle_between,
    angles,
    coherence,
    cosines,
    matrix_view,
    near_duplicates,
    normalize,
    welch_bound,
)
from gonio.geometry.angles import BLOCK_ENTRIES
from references import geometry as reference
from tolerances import close, exact

ANGLE_ACCURACY = 1e-7  # what the documentation promises near 0 and π, in float32
THETAS = [0.0, 1e-8, 1e-7, 1e-6, 1e-4, 1e-2, 1.0, pi / 2, 3.0, pi - 1e-2, pi - 1e-4, pi - 1e-6, pi - 1e-7, pi]


FUNCTIONS = (cosines, angles, coherence, alignment, alignment_zscore)
EACH_FUNCTION = pytest.mark.parametrize("function", FUNCTIONS)


def pair_at(theta: float, dtype: torch.dtype = torch.float64, d: int = 16) -> Tensor:
    """Two vectors of different lengths at an angle that is exact in float64."""
    basis, _ = torch.linalg.qr(torch.randn(d, 2, dtype=torch.float64))
    first, second = basis.T
    # cos θ·a + sin θ·b with θ near π written as −(cos(π−θ)·a − sin(π−θ)·b), so that no digit is lost
    other = cos(theta) * first + sin(theta) * second
    return torch.stack([3 * first, 0.5 * other]).to(dtype)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_angles_are_accurate_everywhere(theta: float, dtype: torch.dtype) -> None:
    pair = pair_at(theta, dtype)
    truth = reference.exact_angle(pair[0].tolist(), pair[1].tolist())  # of the rounded vectors
    ulp_of_pi = 2.4e-7 / 2 if dtype == torch.float32 else 0.0  # of a float32 result near π
    assert abs(float(angles(pair)[0, 1]) - truth) <= ANGLE_ACCURACY + ulp_of_pi
    assert abs(float(angle_between(pair[0], pair[1])) - truth) <= 2.5 * ANGLE_ACCURACY


@pytest.mark.parametrize("theta", THETAS)
def test_gradient_of_the_angle_is_bounded_and_right(theta: float) -> None:
    """∂θ/∂b is the unit tangent at b over |b|: norm exactly 1/|b|, and 0 by convention at 0 and π."""
    a, b = pair_at(theta).unbind()
    b.requires_grad_()
    (gradient,) = torch.autograd.grad(angle_between(a, b), b)
    assert gradient.isfinite().all()
    parallel = theta < 1e-15 or pi - theta < 1e-15
    size = float(gradient.norm() * b.detach().norm())
    assert size <= 1 + 1e-6
    if not parallel and 1e-7 < theta < pi - 1e-7:
        assert abs(size - 1) < 1e-6
    pair = pair_at(theta).requires_grad_()
    (gradient,) = torch.autograd.grad(angles(pair).sum(), pair)
    assert gradient.isfinite().all()
    assert float((gradient * pair.detach().norm(dim=1, keepdim=True)).norm(dim=1).max()) < 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@EACH_FUNCTION
def test_finite_at_zero_duplicate_and_opposite_filters(function, dtype: torch.dtype) -> None:
    row = torch.randn(8)
    matrix = torch.stack([row, row, -row, 2 * row, torch.zeros(8), torch.randn(8)]).to(dtype).requires_grad_()
    value = function(matrix)
    (gradient,) = torch.autograd.grad(value.sum(), matrix)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@EACH_FUNCTION
def test_gradients_are_those_of_the_formula(function) -> None:
    matrix = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, matrix)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_equal_the_references(dtype: torch.dtype) -> None:
    matrix = torch.randn(6, 5, dtype=torch.float64).to(dtype)
    tall = torch.randn(9, 4, dtype=torch.float64)  # of which the other side of the Gram matrix is taken
    torch.testing.assert_close(alignment(tall).item(), reference.alignment(tall.numpy()), **exact(torch.float64))
    array, tolerance = matrix.double().numpy(), close(torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(cosines(matrix).double(), torch.from_numpy(reference.cosines(array)), **tolerance)
    torch.testing.assert_close(coherence(matrix).item(), reference.coherence(array), **tolerance)
    torch.testing.assert_close(alignment(matrix).item(), reference.alignment(array), **tolerance)
    for i in range(6):
        for j in range(6):
            assert abs(float(angles(matrix)[i, j]) - reference.exact_angle(array[i], array[j])) < 3e-7


def test_cosines_stay_within_one() -> None:
    matrix = torch.randn(300, 7)
    unit = normalize(matrix)
    assert float((unit @ unit.T).max()) > 1  # the unclamped product is beyond 1 somewhere
    assert float(cosines(matrix).abs().max()) <= 1


def test_zero_and_equal_filters() -> None:
    row = torch.randn(1, 50, dtype=torch.float64)
    equal = torch.tensor([[0, 0, pi], [0, 0, pi], [pi, pi, 0]], dtype=torch.float64)
    assert torch.equal(angles(torch.cat([row, 3 * row, -row])), equal)
    matrix = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert torch.equal(cosines(matrix)[0], torch.zeros(3))
    torch.testing.assert_close(angles(matrix)[0], torch.full((3,), pi / 2))
    torch.testing.assert_close(alignment(matrix), alignment(matrix[1:]))  # left out, not counted as orthogonal
    assert alignment(torch.zeros(3, 4)) == 1
    assert alignment_zscore(torch.zeros(3, 4)) == 0
    assert alignment_zscore(torch.ones(3, 1)) == 0  # in one dimension chance is certain
    assert float(angle_between(torch.zeros(3), torch.ones(3))) == pytest.approx(pi / 2)
    assert float(angle_between(torch.zeros(3), torch.zeros(3))) == pytest.approx(pi / 2)


@EACH_FUNCTION
def test_groups_are_independent(function) -> None:
    stack = torch.randn(3, 5, 4)
    expected = torch.stack([function(matrix) for matrix in stack])
    torch.testing.assert_close(function(stack), expected, **exact(torch.float32))


def test_coherence_in_blocks_equals_coherence_at_once() -> None:
    n = 4200  # n² is above one block
    assert n * n > BLOCK_ENTRIES
    matrix = torch.randn(n, 3)
    matrix[-1] = -2 * matrix[0]
    assert float(coherence(matrix)) == pytest.approx(1, abs=1e-6)


@REPEATABLE
@given(n=st.integers(2, 12), d=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_bounds_hold_for_any_matrix(n: int, d: int, seed: int) -> None:
    matrix = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mu, a = float(coherence(matrix)), float(alignment(matrix))
    assert welch_bound(n, d) - 1e-12 <= mu <= 1
    assert max(0.0, (n - d) / (n - 1)) - 1e-9 <= a <= d + 1e-9
    assert sqrt(a / d) <= mu + 1e-9


def test_autocast_does_not_reach_the_gram_matrix() -> None:
    matrix = torch.randn(8, 64)
    for function in (cosines, angles, coherence, alignment):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = function(matrix)
        assert torch.equal(inside, function(matrix))


@pytest.mark.parametrize("function", [cosines, coherence, alignment, alignment_zscore])
def test_weights_of_higher_rank_are_pointed_to_the_views(function) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{function.__name__}|alignment\(\) takes.*matrix_view"):
        function(torch.zeros(2, 3, 4, 5, 6, 7))


@pytest.mark.parametrize("kernel", [(3, 3), (2, 3, 2)])
def test_angles_and_duplicates_of_a_kernel_are_those_of_its_filters(kernel: tuple[int, ...]) -> None:
    weight = torch.randn(6, 4, *kernel)
    weight[5] = -2 * weight[1]
    assert torch.equal(angles(weight), angles(matrix_view(weight)[0]))
    assert near_duplicates(weight).pairs.tolist() == near_duplicates(matrix_view(weight)[0]).pairs.tolist() == [[1, 5]]
    for function in (angles, near_duplicates):
        with pytest.raises(InvalidArgumentError, match=rf"{function.__name__}\(\) takes .*found shape \(3,\)"):
            function(torch.ones(3))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 0), (2, 0, 4), (2, 4, 0), (0, 3, 4)])
def test_weights_without_entries_have_values_or_a_clear_error(shape: tuple[int, ...]) -> None:
    empty, n = torch.empty(shape), shape[-2]
    for function in (cosines, angles):
        assert function(empty).shape == (*shape[:-1], n)
    assert torch.equal(alignment(empty), torch.ones(shape[:-2]))
    assert torch.equal(alignment_zscore(empty), torch.zeros(shape[:-2]))
    if n < 2:
        with pytest.raises(InvalidArgumentError, match=r"at least 2 rows; found shape \("):
            coherence(empty)
    else:
        assert torch.equal(coherence(empty), torch.zeros(shape[:-2]))


def test_compiles_to_one_graph() -> None:
    matrix = torch.randn(6, 5)
    for function in (cosines, angles, alignment):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(matrix), function(matrix), **exact(torch.float32))


def test_a_narrow_filter_counts_as_zero_below_what_its_dtype_resolves() -> None:
    """Else the gradient, of size 1/‖w‖, overflows in float16; the same numbers in float32 are no zero filter."""
    narrow = torch.tensor([[1.0, 0.0], [3e-5, 0.0]], dtype=torch.float16, requires_grad=True)
    for dtype, zero in ((torch.float16, True), (torch.float32, False)):
        x = narrow.detach().to(dtype).requires_grad_()
        for found in (cosines(x)[0, 1], angle_between(x[0], x[1]).cos()):
            assert found.item() == pytest.approx(0.0 if zero else 1.0, abs=1e-6)
            (gradient,) = torch.autograd.grad(found, x)
            assert gradient.isfinite().all()
