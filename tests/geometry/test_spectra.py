"""Singular values to the stated error, ranks, defects, and the Lanczos estimate from below."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from geometry.examples import NUMBER, REPEATABLE
from gonio.errors import InvalidArgumentError
from gonio.geometry import (
    condition_number,
    effective_rank,
    orthogonality_defect,
    singular_values,
    spectral_norm,
    stable_rank,
)
from references import geometry as reference
from tolerances import close, exact

FUNCTIONS = {
    "singular_values": singular_values,
    "stable_rank": stable_rank,
    "effective_rank": effective_rank,
    "condition_number": condition_number,
    "spectral_norm": spectral_norm,
    "entrywise": lambda m: orthogonality_defect(m).entrywise,
    "frobenius": lambda m: orthogonality_defect(m).frobenius,
    "spectral": lambda m: orthogonality_defect(m).spectral,
}
EACH_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)
BROKEN = torch.eye(3).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(float("nan")))


def with_spectrum(values: Tensor, n: int, d: int) -> Tensor:
    u, _ = torch.linalg.qr(seeded(n, len(values), dtype=torch.float64))
    v, _ = torch.linalg.qr(seeded(d, len(values), seed=1, dtype=torch.float64))
    return u * values.double() @ v.T


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (25, 25), (1, 7), (7, 1), (3, 10, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_singular_values_equal_numpys(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, dtype=torch.float64).to(dtype)
    expected = torch.from_numpy(np.linalg.svd(matrix.double().numpy(), compute_uv=False))
    value = singular_values(matrix)
    torch.testing.assert_close(value.double(), expected, **close(value.dtype))


@pytest.mark.parametrize("decades", [2, 4, 5, 8, 12])
def test_stated_error_on_ill_conditioned_matrices(decades: int) -> None:
    truth = torch.logspace(0, -decades, 30, dtype=torch.float64)
    value = singular_values(with_spectrum(truth, 40, 30))
    large = truth > 1e-4
    assert float((value / truth - 1)[large].abs().max()) < 1e-6
    assert float((value - truth).abs().max()) < 1e-9


@pytest.mark.parametrize(("scale", "dtype"), [(1e200, torch.float64), (1e-200, torch.float64), (1e30, torch.float32)])
def test_scale_plays_no_part(scale: float, dtype: torch.dtype) -> None:
    """The square of such a matrix is no number of its dtype."""
    matrix = torch.randn(2, 5, 4, dtype=dtype)
    matrix[1] *= 1e-10  # each matrix has a scale of its own
    tolerance = close(dtype)["rtol"]
    torch.testing.assert_close(singular_values(scale * matrix) / scale, singular_values(matrix), rtol=tolerance, atol=0)
    torch.testing.assert_close(spectral_norm(scale * matrix) / scale, spectral_norm(matrix), rtol=tolerance, atol=0)
    for function in (stable_rank, effective_rank, condition_number):
        torch.testing.assert_close(function(scale * matrix), function(matrix), rtol=tolerance, atol=0)


@EACH_FUNCTION
def test_gradients_are_those_of_the_formula(name: str) -> None:
    matrix = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FUNCTIONS[name], matrix)


@EACH_FUNCTION
@pytest.mark.parametrize(
    "matrix",
    [torch.zeros(3, 4), torch.eye(4), torch.ones(4, 6), torch.ones(1, 1), torch.zeros(2, 3, 3), torch.eye(3, 5) * 2],
    ids=["zero", "identity", "rank 1", "1x1", "zero groups", "rows"],
)
def test_gradients_are_finite_at_corners(name: str, matrix: Tensor) -> None:
    """Repeated and zero singular values, where derivatives of singular vectors do not exist."""
    matrix = matrix.clone().requires_grad_()
    value = FUNCTIONS[name](matrix)
    assert not value.isnan().any()
    if value.isfinite().all():
        (gradient,) = torch.autograd.grad(value.sum(), matrix)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("function", [stable_rank, effective_rank])
def test_ranks_at_their_extremes_and_between(function) -> None:
    assert float(function(torch.eye(6, 9))) == pytest.approx(6)
    assert float(function(torch.ones(6, 9))) == pytest.approx(1)
    assert float(function(torch.zeros(6, 9))) == 0
    matrix = torch.randn(8, 5, dtype=torch.float64)
    top = reference.top_singular_value(matrix.numpy())
    stable = float((matrix**2).sum()) / top**2
    expected = stable if function is stable_rank else reference.effective_rank(matrix.numpy())
    assert float(function(matrix)) == pytest.approx(expected)


def test_condition_number() -> None:
    assert float(condition_number(with_spectrum(torch.tensor([4.0, 2.0, 0.5]), 5, 3))) == pytest.approx(8)
    assert condition_number(torch.zeros(2, 2)) == float("inf")


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
def test_orthogonality_defect_is_that_of_the_smaller_gram(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    gram = matrix @ matrix.T if shape[0] <= shape[1] else matrix.T @ matrix
    error = (gram - torch.eye(len(gram), dtype=torch.float64)).numpy()
    defect = orthogonality_defect(matrix)
    torch.testing.assert_close(float(defect.entrywise), float((error**2).mean()), **close(torch.float64))
    torch.testing.assert_close(float(defect.frobenius), float(np.linalg.norm(error)), **close(torch.float64))
    torch.testing.assert_close(float(defect.spectral), float(np.linalg.norm(error, 2)), **close(torch.float64))


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (40, 40), (2, 30, 20), (1, 9, 9)])
def test_spectral_norm_is_exact_when_the_steps_suffice(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    expected = torch.linalg.svdvals(matrix)[..., 0]
    torch.testing.assert_close(spectral_norm(matrix), expected, **close(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("small", [2, 3, 8, 48])
def test_spectral_norm_of_nearly_orthogonal_matrices(small: int, dtype: torch.dtype) -> None:
    """Singular values within 1e-3 of each other: the recurrence is down to rounding before it has them all."""
    for seed in range(6):
        u, v = (torch.linalg.qr(seeded(n, n, seed=seed, dtype=torch.float64)).Q for n in (small, small + seed))
        matrix = (u * (1 + 1e-4 * seeded(small, dtype=torch.float64)) @ v[:small]).to(dtype)
        expected = float(torch.linalg.matrix_norm(matrix.double(), 2))
        assert float(spectral_norm(matrix)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("steps", "error"), [(24, 2e-3), (48, 1e-4)])
def test_spectral_norm_is_below_and_near_on_a_hard_matrix(steps: int, error: float) -> None:
    matrix = torch.randn(700, 700, generator=torch.Generator().manual_seed(0))
    ratio = float(spectral_norm(matrix, steps=steps) / singular_values(matrix)[0])
    assert 1 - error < ratio < 1 + 1e-6


def test_more_steps_never_lower_the_estimate() -> None:
    matrix = torch.randn(200, 200, dtype=torch.float64)
    estimates = [float(spectral_norm(matrix, steps=s)) for s in (1, 2, 4, 8, 16, 32)]
    assert estimates == sorted(estimates)


@REPEATABLE
@given(shape=st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(1, 8)), seed=NUMBER, log=st.integers(-20, 15))
def test_spectral_norm_of_any_small_matrix(shape: tuple[int, int, int], seed: int, log: int) -> None:
    n, rank, d = shape
    matrix = seeded(n, rank, seed=seed) @ seeded(rank, d, seed=seed + 1) * 10.0**log
    top = float(torch.linalg.matrix_norm(matrix.double(), 2))
    assert float(spectral_norm(matrix)) == pytest.approx(top, rel=2e-5)


def test_breakdown_of_the_krylov_space() -> None:
    """Few distinct singular values: the space is complete after one or two steps, and the rest is rounding."""
    for matrix in (torch.eye(40), torch.ones(30, 50), with_spectrum(torch.tensor([3.0, 3.0, 1.0]), 30, 20).float()):
        top = float(torch.linalg.matrix_norm(matrix.double(), 2))
        torch.testing.assert_close(float(spectral_norm(matrix)), top, **exact(torch.float32))


def test_the_start_vector_is_seeded() -> None:
    matrix = torch.randn(300, 300)
    assert torch.equal(spectral_norm(matrix, steps=3), spectral_norm(matrix, steps=3))
    assert not torch.equal(spectral_norm(matrix, steps=3), spectral_norm(matrix, steps=3, seed=1))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: singular_values(BROKEN), r"finite entries; found 1 of 9 NaN or infinite"),
        (lambda: stable_rank(torch.zeros(0, 3)), r"spectrum\(\) needs a matrix with entries; found shape \(0, 3\)"),
        (lambda: spectral_norm(BROKEN, steps=0), r"spectral_norm\(\) needs steps >= 1; found steps=0"),
        (lambda: spectral_norm(BROKEN), r"spectral_norm\(\) needs finite entries; found 1 of 9 NaN"),
    ],
)
def test_refusals(call: Callable[[], Tensor], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        call()


def test_values_of_nothing() -> None:
    assert singular_values(torch.zeros(0, 3)).shape == (0,)
    assert spectral_norm(torch.zeros(0, 3)) == 0
