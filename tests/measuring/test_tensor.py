"""Every figure of a tensor against a reference written from its formula, and against random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalog import seeded
from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.geometry import layout_of, matrix_view
from gonio.geometry.chance import random_spectrum_distance
from gonio.measuring import measure
from references import geometry as reference_geometry
from references.measuring import closest, defect, distance_from_marchenko_pastur, figures, groups_of
from tolerances import close


def normal(*shape: int, seed: int = 0) -> Tensor:
    return seeded(*shape, seed=seed, dtype=torch.float64)


LAYERS = {
    "linear": (lambda: nn.Linear(20, 12), "plain", 1),
    "wide": (lambda: nn.Linear(3, 40), "plain", 1),
    "one filter": (lambda: nn.Linear(9, 1), "plain", 1),
    "length 1": (lambda: nn.Linear(1, 9), "plain", 1),
    "conv1d": (lambda: nn.Conv1d(4, 10, 3), "plain", 1),
    "conv2d": (lambda: nn.Conv2d(3, 16, 3, dilation=2), "plain", 1),
    "conv3d": (lambda: nn.Conv3d(2, 6, (1, 2, 3)), "plain", 1),
    "1×1": (lambda: nn.Conv2d(8, 8, 1), "plain", 1),
    "grouped": (lambda: nn.Conv2d(8, 12, 3, groups=4), "plain", 4),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), "plain", 6),
    "transposed": (lambda: nn.ConvTranspose2d(6, 10, 3), "transposed", 1),
    "transposed grouped": (lambda: nn.ConvTranspose2d(6, 10, 3, groups=2), "transposed", 2),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 7, 5), "transposed", 1),
    "embedding": (lambda: nn.Embedding(30, 8), "plain", 1),
    "lstm": (lambda: nn.LSTM(6, 5), "plain", 4),
    "gru": (lambda: nn.GRU(6, 5), "plain", 3),
    "attention": (lambda: nn.MultiheadAttention(12, 2), "plain", 3),
}

WEIGHT = {"lstm": "weight_ih_l0", "gru": "weight_ih_l0", "attention": "in_proj_weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_figures_follow_their_formulas(name: str, dtype: torch.dtype) -> None:
    make, kind, groups = LAYERS[name]
    layer = make().to(dtype)
    key = WEIGHT.get(name, "weight")
    weight = getattr(layer, key).detach()
    found = measure(layer)[key]
    expected = figures(groups_of(weight.double().numpy(), kind, groups))
    assert found.status == "measured"
    tolerance = close(torch.float64 if dtype == torch.float64 else torch.float32)
    for figure, value in expected.items():
        got = getattr(found, figure)
        if value is None or isinstance(value, int):
            assert got == value, figure
        else:
            assert math.isclose(got, value, rel_tol=10 * tolerance["rtol"], abs_tol=10 * tolerance["atol"]), figure


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_changes_nothing(memory_format: torch.memory_format) -> None:
    layer = nn.Conv2d(4, 8, 3)
    expected = measure(layer)["weight"]
    assert measure(layer.to(memory_format=memory_format))["weight"] == expected


def test_very_many_filters_are_sampled_always_alike_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.geometry.pairs.SAMPLE", 100)
    layer = nn.Embedding(1000, 12)
    first, second = measure(layer)["weight"], measure(layer)["weight"]
    assert first == second
    assert first.pairs == 100 * 99 // 2
    said = f"angles from 100 of 1000 filters, drawn at random: alignment ± {2 * first.alignment_error:.2g} (95 %)"
    assert said in first.notes
    assert first.alignment == pytest.approx(1.0, abs=0.1)
    assert first.filters == 1000
    assert "near duplicates sought among all of them" in first.notes


def test_deep_figures_are_those_of_all_pairs_and_all_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(40, 300), nn.Conv2d(64, 300, 1))
    expected = measure(model)
    monkeypatch.setattr("gonio.geometry.pairs.SAMPLE", 50)
    for name, value in (("EXACT_WORK", 1000), ("DECOMPOSED", 1000), ("SMALL", 10)):
        monkeypatch.setattr(f"gonio.geometry.spectra.{name}", value)
    quick, deep = measure(model), measure(model, deep=True)
    for path in ("0", "1"):
        assert (quick[path].pairs, quick[path].sigma_min) == (50 * 49 // 2, None)
        assert (deep[path].alignment_error, deep[path].sigma_error, deep[path].notes) == (0, 0, expected[path].notes)
        for figure in ("pairs", "closest", "angle_histogram", "spectrum_outliers"):
            assert getattr(deep[path], figure) == getattr(expected[path], figure)
        for figure in ("alignment", "coherence", "sigma_max", "sigma_min", "effective_rank", "spectrum_distance"):
            assert getattr(deep[path], figure) == pytest.approx(getattr(expected[path], figure), rel=1e-6)


def test_a_duplicate_outside_of_the_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.geometry.pairs.SAMPLE", 50)
    weight = normal(6000, 40).float()
    weight[5987] = -3 * weight[11]
    found = measure({"w.weight": weight})
    assert (found["w"].near_duplicates, found["w"].closest) == (1, (11, 5987))
    assert found["w"].coherence == pytest.approx(1.0)
    texts = {finding.code: finding.found for finding in found.findings}
    assert texts == {"G203": "1 of 6000 filters is proportional to an earlier one: 5987 to 11"}
    monkeypatch.setattr("gonio.geometry.duplicates.SEARCHED", 0)
    unsought = measure({"w.weight": weight})["w"]
    assert unsought.near_duplicates == 0
    assert "near duplicates sought among those drawn alone" in unsought.notes


@pytest.mark.parametrize("groups", [1, 3])
def test_the_closest_pair_is_named(groups: int) -> None:
    layer = nn.Conv2d(6, 12, 3, groups=groups)
    with torch.no_grad():
        layer.weight[4] = 0
    assert measure(layer)["weight"].closest == closest(groups_of(layer.weight.detach().numpy(), "plain", groups))


@pytest.mark.parametrize("limit", ["EXACT_WORK", "EXACT_SIDE"])
def test_the_largest_singular_value_of_a_large_matrix_comes_from_products(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(60, 40)
    exact = measure(layer)["weight"]
    for name in (limit, "SMALL"):
        monkeypatch.setattr(f"gonio.geometry.spectra.{name}", 39)
    fast = measure(layer)["weight"]
    assert fast.effective_rank is None
    assert fast.sigma_max == pytest.approx(exact.sigma_max, rel=1e-3)
    assert fast.stable_rank == pytest.approx(exact.stable_rank, rel=1e-3)


def test_random_weights_look_random_and_others_do_not() -> None:
    drawn = measure({f"{seed}.weight": normal(24, 32, seed=seed) for seed in range(60)})
    z = torch.tensor([row.alignment_z for row in drawn.layers])
    assert abs(float(z.mean())) < 0.5
    assert 0.7 < float(z.std()) < 1.4
    others = {"orthogonal.weight": torch.linalg.qr(normal(32, 24)).Q.mT, "shared.weight": normal(24, 32) + 2}
    orthogonal, shared = measure(others).layers
    assert orthogonal.alignment_z < -5
    assert shared.alignment_z > 100
    assert orthogonal.orthogonality_defect == pytest.approx(0, abs=1e-5)
    assert orthogonal.spectrum_distance > 0.4
    assert orthogonal.spectrum_outliers == 0


def test_the_histogram_counts_every_pair() -> None:
    found = measure(nn.Linear(10, 30))["weight"]
    assert sum(found.angle_histogram) == found.pairs == 435
    identical = measure({"w.weight": torch.full((5, 4), 3.0)})["w"]
    assert identical.angle_histogram[0] == 10
    assert measure({"w.weight": torch.tensor([[1.0, 0], [-1, 0]])})["w"].angle_histogram[179] == 1


def test_they_are_figures_of_a_layer() -> None:
    layer = nn.Conv2d(6, 20, 3)
    matrix = layer.weight.detach().double().flatten(1).numpy()
    found = measure(layer)["weight"]
    assert found.orthogonality_defect == pytest.approx(defect(matrix), rel=close(torch.float32)["rtol"])
    values = np.linalg.svd(matrix, compute_uv=False)
    assert found.spectrum_distance == pytest.approx(distance_from_marchenko_pastur(values, 20, 54), abs=5e-4)
    assert found.spectrum_distance_random == random_spectrum_distance(20, 54)
    assert found.orthogonality_defect_random == pytest.approx(sqrt(21 / 54))


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
    "stride 3": lambda: nn.Conv2d(2, 5, 5, stride=3),
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
    found = measure(layer, extra_figures=("operator_norm",))["weight"]
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


ROUNDED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(256, 6),
    "odd": lambda: nn.Linear(40, 6),
    "grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose1d(4, 6, 3),
    "1x1": lambda: nn.Conv2d(64, 8, 1),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_errors_of_rounding_on_request(name: str) -> None:
    layer = ROUNDED[name]()
    with torch.no_grad():
        layer.weight.copy_(seeded(*layer.weight.shape) * seeded(*layer.weight.shape, seed=1).exp())
    errors = ["int8_tensor", "int8_channel", "int4_tensor", "int4_channel", "int4_128", "int4_32"]
    assert all(getattr(measure(layer)["weight"], f"{each}_error") is None for each in errors)
    found = measure(layer, extra_figures=("quantisation",))["weight"]
    matrices = matrix_view(layer.weight.detach().double(), layout_of(layer))
    rows = matrices.flatten(0, 1).numpy()
    for each in errors:
        bits, per = int(each[3]), each.partition("_")[2]
        if per.isdecimal() and (name not in ("linear", "1x1") or rows.shape[1] % int(per)):
            assert getattr(found, f"{each}_error") is None
            continue
        expected = reference_geometry.quantization_error(rows, bits, int(per) if per.isdecimal() else per)
        assert getattr(found, f"{each}_error") == pytest.approx(expected, rel=1e-4)


def test_weights_with_nan_or_without_values_have_no_error_of_rounding() -> None:
    state = {"a.weight": torch.full((4, 4), torch.nan), "b.weight": torch.zeros(4, 4)}
    found = measure(state, extra_figures=("quantisation",))
    assert found["a"].int8_tensor_error is found["b"].int8_tensor_error is None


def test_a_table_has_columns_on_request_only_where_they_were_measured() -> None:
    model = nn.Linear(64, 8)
    for text in (str, lambda m: m.to_markdown(), lambda m: m.to_html()):
        assert "int4 ch." not in text(measure(model))
        assert "int4 ch." in text(measure(model, extra_figures=("quantisation",)))


def test_a_figure_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no figure named 'operator_nrm'\. Did you mean operator_norm"):
        measure(nn.Linear(2, 2), extra_figures=("operator_nrm",))
    with pytest.raises(InvalidArgumentError, match=r"is a tuple of figures; found 'operator_norm'"):
        measure(nn.Linear(2, 2), extra_figures="operator_norm")


def test_long_filters_are_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.geometry.pairs.LENGTH", 1000)
    found = measure({"w.weight": normal(60, 40).float()})["w"]
    assert found.pairs == 25 * 24 // 2
    assert "angles from 25 of 60 filters, drawn at random" in found.notes[0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_among_dense_ones_of_its_shape_has_the_reason(layout: torch.layout) -> None:
    state = {f"layers.{i}.weight": normal(8, 8, seed=i) for i in range(3)}
    found = measure({**state, "layers.3.weight": torch.eye(8, dtype=torch.float64).to_sparse(layout=layout)})
    assert found["layers.3"].status == "skipped"
    assert "sparse" in found["layers.3"].reason
    assert all(found[path].norm_mean == row.norm_mean for path, row in measure(state).items())
