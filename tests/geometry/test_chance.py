"""The random-direction laws against simulation with fixed seeds, and against other formulas."""

from __future__ import annotations

from functools import partial
from math import pi, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.errors import InvalidArgumentError
from gonio.geometry import (
    alignment,
    alignment_deviation,
    alignment_zscore,
    coherence,
    expected_coherence,
    marchenko_pastur,
    random_angle_density,
    singular_values,
    welch_bound,
)
from gonio.geometry.chance import (
    SpectrumDeviation,
    expected_pairs_above,
    random_angle_std,
    random_coherence,
    random_largest_singular_value,
    random_orthogonality_defect,
    random_spectrum_distance,
    spectrum_deviations,
)
from references import geometry as reference
from references.measuring import angle_std_by_chance, coherence_by_chance, defect, distance_from_marchenko_pastur
from tolerances import close

SIGMAS = 4.5  # a right simulation fails this far out once in 1e5 tests
normal = partial(seeded, dtype=torch.float64)


def _deviation(values: torch.Tensor, rows: int, cols: int) -> SpectrumDeviation | None:
    return spectrum_deviations(values[None], rows, cols)[0]


def directions(count: int, n: int, d: int) -> Tensor:
    return torch.randn(count, n, d, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("d", [2, 3, 7, 64, 4608])
def test_the_density_of_angles(d: int) -> None:
    theta = torch.linspace(0, pi, 200_001, dtype=torch.float64)
    density = random_angle_density(theta, d)
    assert float(torch.trapezoid(density, theta)) == pytest.approx(1, abs=1e-8)
    assert float(torch.trapezoid(density * theta.cos() ** 2, theta)) == pytest.approx(1 / d, rel=1e-8)
    if d < 100:  # beyond, the gamma functions of the formula overflow
        assert float(density[60_000]) == pytest.approx(reference.angle_density(float(theta[60_000]), d), rel=1e-9)
    assert torch.equal(random_angle_density(torch.tensor([-0.1, 3.2]), d), torch.zeros(2))


@pytest.mark.parametrize(("n", "d"), [(4, 3), (16, 27), (64, 16), (40, 300)])
def test_alignment_of_random_directions_is_one_with_the_stated_deviation(n: int, d: int) -> None:
    matrices, sigma = directions(2000, n, d), alignment_deviation(n, d)
    values = alignment(matrices).double()
    assert abs(float(values.mean()) - 1) < SIGMAS * sigma / sqrt(2000)
    assert float(values.std()) == pytest.approx(sigma, rel=0.12)
    torch.testing.assert_close(alignment_zscore(matrices).double(), (values - 1) / sigma, **close(torch.float32))


def test_alignment_sees_a_common_direction() -> None:
    """Negative control: a mean of a fifth of the spread is far outside chance."""
    matrix = directions(1, 64, 576)[0]
    assert abs(float(alignment_zscore(matrix))) < 3 < 20 < float(alignment_zscore(matrix + 0.2 * seeded(576, seed=1)))


@pytest.mark.parametrize(("n", "d"), [(5, 3), (10, 10), (64, 27), (64, 576), (200, 20)])
def test_expected_coherence_is_the_mean_of_simulations(n: int, d: int) -> None:
    values = coherence(directions(150, n, d)).double()
    error = float(values.std()) / sqrt(150)
    assert abs(float(values.mean()) - expected_coherence(n, d)) < SIGMAS * error + 0.01 * expected_coherence(n, d)
    assert expected_coherence(n, d) > welch_bound(n, d)


@pytest.mark.parametrize(("rows", "cols"), [(400, 100), (100, 400), (200, 200)])
def test_marchenko_pastur_law(rows: int, cols: int) -> None:
    std = 0.3
    law = marchenko_pastur(rows, cols, std=std)
    grid = torch.linspace(law.lower, law.upper, 400_001, dtype=torch.float64)
    density = law.density(grid)
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1, abs=1e-6)
    # E s² = |W|_F² / min(rows, cols) = σ² max(rows, cols)
    assert float(torch.trapezoid(density * grid**2, grid)) == pytest.approx(std**2 * max(rows, cols), rel=1e-6)
    assert float(law.density(torch.tensor(law.upper * 1.01))) == 0
    values = singular_values(std * directions(20, rows, cols)).double().flatten()
    assert float(values.max()) < law.upper * 1.05
    assert float(values.min()) > law.lower * 0.95 - 0.02
    below = (values < (law.lower + law.upper) / 2).double().mean()
    half = grid < (law.lower + law.upper) / 2
    assert float(below) == pytest.approx(float(torch.trapezoid(density * half, grid)), abs=0.02)


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (10, 5), (2016, 27), (2016, 576), (10**7, 4096)])
def test_quantities_of_random_directions(count: int, dim: int) -> None:
    assert random_angle_std(dim) == pytest.approx(angle_std_by_chance(dim), rel=1e-6)
    assert random_coherence(count, dim) == pytest.approx(coherence_by_chance(count, dim), rel=2e-2)
    assert expected_pairs_above(0.5, 1000, 3) == pytest.approx(500, rel=1e-6)  # in three dimensions |cos| is uniform
    assert expected_pairs_above(0.95, 5, 1) == 5


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e150])
@pytest.mark.parametrize("shape", [(2, 9), (9, 2), (12, 12), (30, 20), (20, 30), (64, 65), (100, 1000)])
def test_distance_and_defect_of_a_spectrum_follow_their_definitions(shape: tuple[int, int], scale: float) -> None:
    for matrix in (normal(*shape), normal(*shape) + 0.3, torch.eye(*shape, dtype=torch.float64)):
        found = _deviation(torch.linalg.svdvals(matrix * scale), *shape)
        values = np.linalg.svd(matrix.numpy(), compute_uv=False)
        # The law is tabulated at 4097 points of a smooth variable; between them the share moves by at most 1/2000.
        assert found.distance == pytest.approx(distance_from_marchenko_pastur(values, *shape), abs=5e-4)
        assert found.defect == pytest.approx(defect(matrix.numpy()), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("shape", [(4, 40), (16, 27), (64, 64), (200, 100), (100, 1500)])
def test_distance_and_defect_of_random_matrices(shape: tuple[int, int]) -> None:
    found = [_deviation(torch.linalg.svdvals(normal(*shape, seed=seed)), *shape) for seed in range(60)]
    distances = torch.tensor([deviation.distance for deviation in found])
    assert float(distances.mean()) == pytest.approx(random_spectrum_distance(*shape), rel=0.15)
    assert float(distances.max()) < 2 * random_spectrum_distance(*shape)
    squares = torch.tensor([deviation.defect**2 for deviation in found])
    assert float(squares.mean().sqrt()) == pytest.approx(random_orthogonality_defect(*shape), rel=0.08)


def test_the_largest_singular_value_of_random_matrices_stays_below_its_quantile() -> None:
    """0.999: among 1000 matrices 5 or more would be above in 4 of 1000 cases only."""
    edge = random_largest_singular_value(20, 30) * sqrt(30)
    largest = torch.linalg.svdvals(normal(1000, 20, 30))[:, 0]
    assert int((largest > edge).sum()) < 5
    assert float(largest.max()) > 0.97 * edge


def test_outliers_are_counted() -> None:
    matrix = normal(60, 80)
    spike = 12 * torch.outer(normal(60, seed=1) / sqrt(60), normal(80, seed=2) / sqrt(80)) * sqrt(80) / 3
    two = matrix + spike + 4 * torch.outer(normal(60, seed=3), normal(80, seed=4)) / sqrt(60)
    values = torch.linalg.svdvals(two)
    found = _deviation(values, 60, 80)
    plain = _deviation(torch.linalg.svdvals(matrix), 60, 80)
    assert found.outliers == 2
    assert found.outlier_share == pytest.approx(float(values[:2].square().sum() / values.square().sum()))
    assert (plain.outliers, plain.outlier_share) == (0, 0.0)
    assert found.distance > 1.5 * plain.distance
    assert _deviation(values[:1], 1, 80) is None


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (random_angle_density, (0.5, 1), "dim >= 2; found dim=1"),
        (alignment_deviation, (1, 5), r"alignment_deviation\(\) needs n >= 2 .*found n=1, d=5"),
        (expected_coherence, (5, 1), r"expected_coherence\(\) needs .* d >= 2 dimensions; found n=5, d=1"),
        (welch_bound, (0, 3), r"welch_bound\(\) needs n >= 1"),
        (partial(marchenko_pastur, std=0), (3, 3), "std > 0; found std=0"),
    ],
)
def test_refusals(function, arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        function(*arguments)


@pytest.mark.parametrize("dim", [2, 3, 4, 50])
def test_the_density_has_a_derivative_where_directions_are_parallel(dim: int) -> None:
    theta = torch.tensor([0.0, 0.7, pi], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(random_angle_density(theta, dim).sum(), theta)
    height = float(random_angle_density(torch.tensor(pi / 2, dtype=torch.float64), dim))
    expected = [height * (dim - 2) * np.sin(t) ** (dim - 3) * np.cos(t) if t else height * (dim == 3) for t in (0, 0.7)]
    assert slope[:2].tolist() == pytest.approx(expected)
    assert slope.isfinite().all()
