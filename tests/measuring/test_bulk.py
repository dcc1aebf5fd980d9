"""The spectrum beside the law of random matrices, the orthogonality defect, and the norm of the layer as a map."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gonio
from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.geometry import layout_of, matrix_view
from gonio.measuring import measure
from gonio.geometry.chance import (spectrum_deviation, random_orthogonality_defect, random_spectrum_distance, random_largest_singular_value)
from references.spectra import defect, distance_from_marchenko_pastur
from tolerances import close

SHAPES = [(2, 9), (9, 2), (12, 12), (30, 20), (20, 30), (64, 65), (100, 1000)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e150])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_distance_and_the_defect_follow_their_definitions(shape: tuple[int, int], scale: float) -> None:
    for matrix in (normal(*shape), normal(*shape) + 0.3, torch.eye(*shape, dtype=torch.float64)):
        found = spectrum_deviation(torch.linalg.svdvals(matrix * scale), *shape)
        assert found is not None
        values = np.linalg.svd(matrix.numpy(), compute_uv=False)
        # The law is tabulated at 4097 points of a smooth variable; between them the share moves by at most 1/2000.
        assert found.distance == pytest.approx(distance_from_marchenko_pastur(values, *shape), abs=5e-4)
        assert found.defect == pytest.approx(defect(matrix.numpy()), rel=1e-6, abs=1e-9)


def test_they_are_figures_of_a_layer() -> None:
    layer = nn.Conv2d(6, 20, 3)
    matrix = layer.weight.detach().double().flatten(1).numpy()
    found = measure(layer)["weight"]
    assert found.orthogonality_defect == pytest.approx(defect(matrix), rel=close(torch.float32)["rtol"])
    values = np.linalg.svd(matrix, compute_uv=False)
    assert found.spectrum_distance == pytest.approx(distance_from_marchenko_pastur(values, 20, 54), abs=5e-4)
    assert found.spectrum_distance_random == random_spectrum_distance(20, 54)
    assert found.orthogonality_defect_random == pytest.approx(sqrt(21 / 54))


@pytest.mark.parametrize("shape", [(4, 40), (16, 27), (64, 64), (200, 100), (100, 1500)])
def test_random_matrices_show_what_is_said_of_them(shape: tuple[int, int]) -> None:
    found = [spectrum_deviation(torch.linalg.svdvals(normal(*shape, seed=seed)), *shape) for seed in range(60)]
    bulks = [bulk for bulk in found if bulk is not None]
    distances = torch.tensor([bulk.distance for bulk in bulks])
    assert float(distances.mean()) == pytest.approx(random_spectrum_distance(*shape), rel=0.15)
    assert float(distances.max()) < 2 * random_spectrum_distance(*shape)
    squares = torch.tensor([bulk.defect**2 for bulk in bulks])
    assert float(squares.mean().sqrt()) == pytest.approx(random_orthogonality_defect(*shape), rel=0.08)


def test_the_largest_of_random_matrices_stays_below_the_stated_value() -> None:
    """999 of 1000: among 1000 matrices 5 or more would be above in 4 of 1000 cases only."""
    edge = random_largest_singular_value(20, 30) * sqrt(30)
    largest = torch.linalg.svdvals(normal(1000, 20, 30))[:, 0]
    assert int((largest > edge).sum()) < 5
    assert float(largest.max()) > 0.97 * edge  # and the value is no idle bound


def test_what_stands_out_is_counted() -> None:
    matrix = normal(60, 80)
    spike = 12 * torch.outer(normal(60, seed=1) / sqrt(60), normal(80, seed=2) / sqrt(80)) * sqrt(80) / 3
    two = matrix + spike + 4 * torch.outer(normal(60, seed=3), normal(80, seed=4)) / sqrt(60)
    values = torch.linalg.svdvals(two)
    found = spectrum_deviation(values, 60, 80)
    assert found is not None
    assert found.outliers == 2
    assert found.outlier_share == pytest.approx(float(values[:2].square().sum() / values.square().sum()))
    plain = spectrum_deviation(torch.linalg.svdvals(matrix), 60, 80)
    assert plain is not None
    assert (plain.outliers, plain.outlier_share) == (0, 0.0)
    assert found.distance > 1.5 * plain.distance


def test_an_orthogonal_weight_has_no_defect_and_is_far_from_random() -> None:
    layer = nn.Linear(40, 30)
    gonio.init_(layer, gonio.init.orthogonal_)
    found = measure(layer)["weight"]
    assert found.orthogonality_defect == pytest.approx(0, abs=1e-5)
    assert found.spectrum_distance is not None
    assert found.spectrum_distance > 0.4
    assert found.spectrum_outliers == 0


def test_weights_at_the_end_of_the_range_of_float32() -> None:
    """Their largest singular value is beyond it."""
    found = measure({"w.weight": torch.full((5, 6), 3e38)})["w"]
    assert found.status == "measured"
    assert found.sigma_max == pytest.approx(3e38 * sqrt(30), rel=1e-6)
    assert found.orthogonality_defect == pytest.approx(2)  # of squares 5, 0, 0, 0, 0 about their mean 1


@pytest.mark.parametrize("shape", [(1, 7), (7, 1)])
def test_a_single_row_or_column_has_no_spectrum_to_compare(shape: tuple[int, int]) -> None:
    found = measure({"w.weight": normal(*shape)})["w"]
    assert (found.sigma_error, found.spectrum_distance, found.orthogonality_defect) == (0, None, None)


def test_opposite_filters_are_told_from_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(300, 40).float()
    weight[7], weight[8], weight[9] = 2 * weight[3], -weight[4], -3 * weight[5]
    found = measure({"w.weight": weight})["w"]
    assert (found.near_duplicates, found.near_antipodal) == (3, 2)
    monkeypatch.setattr("gonio.geometry.pairs.SAMPLE", 50)
    assert (measure({"w.weight": weight})["w"].near_duplicates, found.near_antipodal) == (3, 2)


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(3, 5, 3),
    "even": lambda: nn.Conv2d(3, 5, 4, padding=1),
    "stride": lambda: nn.Conv2d(3, 5, 3, stride=2),
    "stride 3": lambda: nn.Conv2d(2, 5, 5, stride=3),
    "dilation": lambda: nn.Conv2d(3, 4, 3, dilation=2),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "reflect": lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
    "1d": lambda: nn.Conv1d(4, 6, 5),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 4, stride=2),
}


def periodic_operator(layer: nn.Module, side: int) -> Tensor:
    """The dense map of a convolution on a periodic grid; that of a transposed one is the adjoint of the same map."""
    weight, dims = layer.weight.detach().double(), layer.weight.ndim - 2
    channels = weight.shape[1] * layer.groups
    basis = torch.eye(channels * side**dims, dtype=torch.float64).unflatten(1, (channels, *(side,) * dims))
    spans = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    around = F.pad(basis, [end for span in reversed(spans) for end in (0, span)], mode="circular")
    convolve = {1: F.conv1d, 2: F.conv2d}[dims]
    return convolve(around, weight, None, layer.stride, 0, layer.dilation, layer.groups).flatten(1)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_operator_norm_is_that_of_the_dense_operator(name: str) -> None:
    layer = CONVOLUTIONS[name]()
    assert measure(layer)["weight"].operator_norm is None
    found = measure(layer, also=("operator_norm",))["weight"]
    side = 18 if name == "stride 3" else 16
    assert found.notes[-1] == f"operator norm on a periodic grid of {'×'.join([str(side)] * (layer.weight.ndim - 2))}"
    dense = periodic_operator(layer, side)
    assert found.operator_norm == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-5)
    assert found.operator_norm >= found.sigma_max * (1 - 1e-5)


@pytest.mark.parametrize("layer", [nn.Linear(5, 7), nn.Conv2d(6, 4, 1, groups=2), nn.Conv1d(4, 4, 1, stride=2)])
def test_a_kernel_of_one_position_has_the_norm_of_its_matrix(layer: nn.Module) -> None:
    found = measure(layer)["weight"]
    matrices = matrix_view(layer.weight.detach().double(), layout_of(layer))
    assert found.operator_norm == found.sigma_max
    assert found.operator_norm == pytest.approx(float(torch.linalg.matrix_norm(matrices, 2).max()), rel=1e-5)


def test_a_figure_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no figure named 'operator_nrm'\. Did you mean operator_norm"):
        measure(nn.Linear(2, 2), also=("operator_nrm",))
    with pytest.raises(InvalidArgumentError, match=r"is a tuple of figures; found 'operator_norm'"):
        measure(nn.Linear(2, 2), also="operator_norm")
