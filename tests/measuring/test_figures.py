"""Every figure against a reference written from its formula, and against what chance does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gonio.measuring import measure
from gonio.geometry.blocks import BLOCK
from gonio.geometry.chance import random_angle_std, random_coherence, expected_pairs_above
from gonio.geometry.blocks import GramMatrix
from gonio.geometry.pairs import pair_statistics
from references.measuring import angle_std_by_chance, closest, coherence_by_chance, figures, groups_of
from tolerances import close

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
    assert (found.groups, found.filters, found.dim) == (groups, found.filters, found.dim)
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


@pytest.mark.parametrize("shape", [(2, 5), (130, 130), (131, 300), (2100, 2200)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-11, 1e18])
def test_angles_from_the_gram_matrix_are_those_of_the_filters(shape: tuple[int, int], scale: float) -> None:
    """Sizes that are no multiple of the blocks, and entries whose squares have no place in float32."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix[1] = 0.9 * matrix[0] + 0.1 * matrix[1]
    gram = GramMatrix.of(matrix * scale)
    assert gram.has_cosines
    found, expected = (pair_statistics(matrix[None] * scale, name="x", gram=g) for g in (gram, None))
    assert found is not None
    assert expected is not None
    assert (found.count, found.closest, found.near) == (expected.count, expected.closest, expected.near)
    for name in ("angle_mean", "angle_std", "mean_square_cosine", "coherence"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4)
    moved = (torch.tensor(found.histogram).cumsum(0) - torch.tensor(expected.histogram).cumsum(0)).abs()
    assert int(moved.max()) <= 1 + found.count // 100_000, "rounding at the edge of a degree"


def test_no_cosines_from_the_gram_matrix_of_columns_or_with_a_zero_filter() -> None:
    matrix = torch.randn(20, 30)
    assert not GramMatrix.of(matrix.T).has_cosines
    matrix[3] = 0
    assert not GramMatrix.of(matrix).has_cosines
    found = pair_statistics(matrix[None], name="x", gram=GramMatrix.of(matrix))
    assert found is not None
    assert found.count == 19 * 18 // 2


def test_many_filters_take_blocks_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(1, 150, 20)
    whole = pair_statistics(matrix, name="x")
    for name, entries in (("BLOCK", 1000), ("PRODUCT", 1000), ("PART", 50)):
        monkeypatch.setattr(f"gonio.geometry.pairs.{name}", entries)
    parts = pair_statistics(matrix, name="x")
    assert BLOCK > 150 * 150
    assert whole is not None
    assert parts is not None
    assert (parts.count, parts.near, parts.histogram) == (whole.count, whole.near, whole.histogram)
    assert parts.angle_std == pytest.approx(whole.angle_std, rel=1e-6)
    assert parts.coherence == pytest.approx(whole.coherence, rel=1e-6)


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


def test_a_duplicate_outside_of_the_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.geometry.pairs.SAMPLE", 50)
    weight = torch.randn(6000, 40, generator=torch.Generator().manual_seed(0))
    weight[5987] = -3 * weight[11]
    found = measure({"w.weight": weight})
    assert (found["w"].near_duplicates, found["w"].closest) == (1, (11, 5987))
    assert found["w"].coherence == pytest.approx(1.0)
    assert found.findings[0].found == (
        "1 of 17997000 pairs of filters have an absolute cosine of 0.95 or more; the largest is 1.000, of filters 11 and 5987"
    )
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


def test_the_largest_singular_value_of_a_large_matrix_comes_from_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(60, 40)
    exact = measure(layer)["weight"]
    for name in ("EXACT_WORK", "SMALL"):
        monkeypatch.setattr(f"gonio.geometry.spectra.{name}", 0)
    fast = measure(layer)["weight"]
    assert fast.effective_rank is None
    assert fast.sigma_max == pytest.approx(exact.sigma_max, rel=1e-3)
    assert fast.stable_rank == pytest.approx(exact.stable_rank, rel=1e-3)


@pytest.mark.parametrize("dim", [2, 3, 9, 100, 576])
def test_the_spread_of_random_angles(dim: int) -> None:
    assert random_angle_std(dim) == pytest.approx(angle_std_by_chance(dim), rel=1e-6)


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (10, 5), (2016, 27), (2016, 576), (10**7, 4096)])
def test_the_largest_cosine_of_random_directions(count: int, dim: int) -> None:
    assert random_coherence(count, dim) == pytest.approx(coherence_by_chance(count, dim), rel=2e-2)


def test_the_number_expected_above_a_cosine() -> None:
    assert expected_pairs_above(0.5, 1000, 3) == pytest.approx(500, rel=1e-6)  # in three dimensions |cos| is uniform
    assert expected_pairs_above(0.95, 5, 1) == 5


def test_random_weights_look_random_and_others_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    z = [
        measure(nn.Linear(32, 24).requires_grad_(False).apply(lambda m: m.weight.normal_(generator=generator)))[
            "weight"
        ].alignment_z
        for _ in range(60)
    ]
    values = torch.tensor(z)
    assert abs(float(values.mean())) < 0.5
    assert 0.7 < float(values.std()) < 1.4
    orthogonal = nn.init.orthogonal_(torch.empty(24, 32), generator=generator)
    assert measure({"a.weight": orthogonal})["a"].alignment_z < -5
    shared = torch.randn(24, 32, generator=generator) + 2
    assert measure({"a.weight": shared})["a"].alignment_z > 100


def test_the_histogram_counts_every_pair() -> None:
    found = measure(nn.Linear(10, 30))["weight"]
    assert sum(found.angle_histogram) == found.pairs == 435
    identical = measure({"w.weight": torch.ones(5, 4)})["w"]
    assert identical.angle_histogram[0] == 10
    assert measure({"w.weight": torch.tensor([[1.0, 0], [-1, 0]])})["w"].angle_histogram[179] == 1
