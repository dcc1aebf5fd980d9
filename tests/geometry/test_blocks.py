"""Weights of any size: blocks, Gram matrices, samples and iterations agree with LAPACK and with their stated errors."""

from __future__ import annotations

from functools import partial
from math import sqrt

import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.geometry import blocks, pairs, spectra
from gonio.geometry.blocks import (
    GramMatrix,
    NormSummary,
    StoredDifference,
    column_blocks,
    count_nonfinite,
    frobenius_norm,
    normal_product,
    products,
    row_blocks,
    row_norms,
    tiles,
)
from gonio.geometry.duplicates import NEAR, near_pairs
from gonio.geometry.lanczos import lanczos_error, largest_singular_value
from gonio.geometry.norms import computed_in
from gonio.geometry.pairs import pair_statistics
from gonio.geometry.spectra import energy_rank, shared_gram, spectrum_estimate

normal = partial(seeded, dtype=torch.float64)


def of_condition(rows: int, columns: int, condition: float) -> Tensor:
    """Singular values spread evenly in the logarithm."""
    u, _, vh = torch.linalg.svd(normal(rows, columns), full_matrices=False)
    small = min(rows, columns)
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), small, dtype=torch.float64)
    return (u * values) @ vh


def test_blocks_are_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 160)
    matrix = normal(30, 50).bfloat16()
    again = torch.zeros(30, 50)
    for top, left, tile in tiles(matrix):
        again[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    assert torch.equal(again, matrix.float())
    assert torch.equal(torch.cat([rows.clone() for _, rows in row_blocks(matrix)]), matrix.float())
    for stored in (matrix, matrix.t().contiguous().t()):
        found = [(left, columns.clone()) for left, columns in column_blocks(stored)]
        assert torch.equal(torch.cat([columns for _, columns in found], 1), matrix.float())
        assert all(torch.equal(columns[:, 0], matrix[:, left].float()) for left, columns in found)


def test_norms_and_counts_at_the_ends_of_the_range() -> None:
    assert row_norms(torch.full((1, 4), 3e38)).tolist() == pytest.approx([6e38], rel=1e-6)
    assert row_norms(torch.full((2, 4), 1e200, dtype=torch.float64)).tolist() == pytest.approx([2e200] * 2)
    assert row_norms(torch.tensor([[float("inf"), 1.0]], dtype=torch.float64)).tolist() == [float("inf")]
    assert count_nonfinite(torch.tensor([[1.0, 2.0], [float("nan"), float("-inf")]])) == (2, (1, 0))
    assert count_nonfinite(torch.tensor(float("inf"))) == (1, ())
    assert count_nonfinite(torch.full((3,), 3e38)) == (0, None)


def test_the_summary_of_norms() -> None:
    matrix = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    found = NormSummary.of(row_norms(matrix), 2)
    assert (found.zeros, found.nonzero_min, found.quantiles) == (1, 1.0, (0.0, 0.0, 1.0, 5.0, 5.0))
    assert found.frobenius == pytest.approx(sqrt(26))
    assert (found.rms, found.mean) == pytest.approx((sqrt(26 / 6), 2.0))
    assert NormSummary.of(torch.zeros(2), 3).nonzero_min is None


@pytest.mark.parametrize("shape", [(2, 5), (130, 130), (131, 300), (2100, 2200)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-11, 1e18])
def test_angles_from_the_gram_matrix_are_those_of_the_filters(shape: tuple[int, int], scale: float) -> None:
    """Sizes that are no multiple of the blocks, and entries whose squares overflow or underflow in float32."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix[1] = 0.9 * matrix[0] + 0.1 * matrix[1]
    gram = GramMatrix.of(matrix[None] * scale)
    assert gram.has_cosines
    found, expected = (pair_statistics(matrix[None] * scale, name="x", gram=g) for g in (gram, None))
    assert (found.count, found.closest, found.near) == (expected.count, expected.closest, expected.near)
    for name in ("angle_mean", "angle_std", "mean_square_cosine", "coherence"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4)
    moved = (torch.tensor(found.histogram).cumsum(0) - torch.tensor(expected.histogram).cumsum(0)).abs()
    assert int(moved.max()) <= 1 + found.count // 100_000, "rounding at the edge of a degree"


def test_no_cosines_from_the_gram_matrix_of_columns_or_with_a_zero_filter() -> None:
    matrix = torch.randn(20, 30)
    assert not GramMatrix.of(matrix.T[None]).has_cosines
    matrix[3] = 0
    gram = GramMatrix.of(matrix[None])
    assert not gram.has_cosines
    assert pair_statistics(matrix[None], name="x", gram=gram).count == 19 * 18 // 2


def test_many_filters_take_blocks_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(1, 150, 20)
    whole = pair_statistics(matrix, name="x")
    for name, entries in (("BLOCK", 1000), ("PRODUCT", 1000), ("PART", 50)):
        monkeypatch.setattr(pairs, name, entries)
    parts = pair_statistics(matrix, name="x")
    assert (parts.count, parts.near, parts.histogram) == (whole.count, whole.near, whole.histogram)
    assert parts.angle_std == pytest.approx(whole.angle_std, rel=1e-6)
    assert parts.coherence == pytest.approx(whole.coherence, rel=1e-6)


@pytest.mark.parametrize("shared", [0.0, 0.05, 0.3])
def test_the_error_of_a_sample_is_its_spread_over_samples(shared: float, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(900, 40).float()
    matrix += shared * torch.linspace(0, 8, 900)[:, None]  # filters that are alike by different degrees
    whole = pair_statistics(matrix[None], name="x")
    assert (whole.sampled, whole.error) == (None, 0.0)
    monkeypatch.setattr(pairs, "SAMPLE", 90)
    drawn = [pair_statistics(matrix[None], name=str(seed)) for seed in range(200)]
    off = torch.tensor([d.mean_square_cosine - whole.mean_square_cosine for d in drawn])
    stated = torch.tensor([d.error for d in drawn])
    assert 0.8 < float(stated.mean() / off.std()) < 1.25
    assert float((off.abs() < 2 * stated).float().mean()) > 0.88


def test_very_long_filters_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(8, 5000).float()
    matrix[3] = 0
    matrix[5] = -2 * matrix[1]
    expected = pair_statistics(matrix[None], name="x")
    monkeypatch.setattr(pairs, "LONG", 100)
    monkeypatch.setattr(pairs, "BLOCK", 16 * 300)
    found = pair_statistics(matrix[None], name="x")
    for result in (found, expected):
        assert (result.count, result.near, result.opposite, result.closest) == (21, 1, 1, (1, 5))
    assert found.mean_square_cosine == pytest.approx(expected.mean_square_cosine, rel=1e-5)
    assert found.angle_std == pytest.approx(expected.angle_std, rel=1e-3)  # float32's arc cosine: 0.02° at 180°


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_near_pair_among_long_filters_is_found_by_its_projection(scale: float) -> None:
    matrix = normal(700, 1200).float() * scale
    at = 0.951  # just above the threshold
    a, b = matrix[600].double(), matrix[13].double()
    b -= (a @ b) / (a @ a) * a
    matrix[13] = (-at * a + sqrt(1 - at**2) * b * (a.norm() / b.norm())).float()
    matrix[40, 3] = float("nan")
    pairs_, cosines = near_pairs(matrix, name="x")
    assert pairs_.tolist() == [[13, 600]]
    assert float(cosines[0]) == pytest.approx(-at, rel=1e-4)
    assert at > NEAR


@pytest.mark.parametrize("shape", [(40, 3000), (3000, 40), (300, 200)])
def test_the_gram_of_blocks_agrees_with_lapack(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "DECOMPOSED", 0)
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    matrix = of_condition(*shape, 1e3).float()
    found = spectrum_estimate(matrix[None], name="x")
    expected = torch.linalg.svdvals(matrix.double())
    torch.testing.assert_close(found.values.sort(descending=True).values, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(150, 200), (200, 150)])
@pytest.mark.parametrize("condition", [1e2, 1e8])
def test_a_shared_gram_matrix_gives_the_singular_values(shape: tuple[int, int], condition: float) -> None:
    matrix = of_condition(*shape, condition)[None]
    gram = shared_gram(matrix)
    assert shared_gram(matrix.expand(2, *shape)) is None
    found = spectrum_estimate(matrix, name="x", gram=gram)
    expected = torch.linalg.svdvals(matrix[0])
    torch.testing.assert_close(found.values.sort(descending=True).values, expected, rtol=1e-5, atol=1e-9)
    assert found.effective_rank == pytest.approx(float(spectra.effective_rank(matrix[0])), rel=1e-9)
    frobenius = float(torch.linalg.vector_norm(matrix))
    assert found.stable_rank(frobenius) == pytest.approx(float(spectra.stable_rank(matrix[0])), rel=1e-9)


@pytest.mark.parametrize("shape", [(500, 400), (400, 500)])
def test_the_iterated_value_is_below_the_true_one_by_no_more_than_is_stated(shape: tuple[int, int]) -> None:
    """On the hardest spectrum, a flat edge; the typical error is far smaller than the stated one."""
    missed = []
    for seed in range(60):
        matrix = normal(*shape, seed=seed).float()
        true = float(torch.linalg.matrix_norm(matrix, 2))
        found = largest_singular_value(matrix, name=str(seed), steps=12)
        assert found <= true * (1 + 1e-5)
        missed.append(true / found - 1)
    assert lanczos_error(4, 10**6) == float("inf")
    assert lanczos_error(200, 4096) < 3e-4
    stated = lanczos_error(12, shape[1])
    assert max(missed) <= stated
    assert sum(missed) / len(missed) < stated / 5


def test_the_iteration_finds_a_value_that_stands_out_and_the_rank_of_few() -> None:
    matrix = normal(400, 300) + 5 * torch.outer(normal(400, seed=1), normal(300, seed=2))
    true = float(torch.linalg.matrix_norm(matrix, 2))
    assert largest_singular_value(matrix.bfloat16().float(), name="x") == pytest.approx(true, rel=1e-2)
    single = torch.outer(normal(300, seed=1), normal(400, seed=2)).float()
    expected = float(torch.linalg.vector_norm(single))
    assert largest_singular_value(single, name="x") == pytest.approx(expected, rel=1e-5)
    huge = largest_singular_value(torch.full((300, 400), 3e38), name="x")
    assert huge == pytest.approx(3e38 * sqrt(120_000), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_reading_in_blocks_leaves_a_matrix_as_it_is(dtype: torch.dtype) -> None:
    """Blocks of a matrix whose dtype needs no conversion are parts of it."""
    matrix, size = (1e12 * normal(50, 40)).clamp(-6e4, 6e4).to(dtype), 1e15
    before = matrix.clone()
    products(matrix, seeded(50, 3, dtype=computed_in(dtype)), scale=size)
    products(matrix.mT, seeded(40, 3, dtype=computed_in(dtype)), scale=size)
    one, two = seeded(2, 40, dtype=computed_in(dtype))
    together = normal_product(matrix, torch.stack([one, two]), scale=size)
    for row, v in zip(together, (one, two), strict=True):  # sums of 50 terms in another order
        torch.testing.assert_close(row, normal_product(matrix, v, scale=size), rtol=1e-4, atol=1e-4)
    for deep in (True, False):
        spectrum_estimate(matrix[None], name="x", deep=deep)
    frobenius_norm(matrix)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("known", [True, False])
def test_the_rank_that_holds_a_share_of_the_norm(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        for name in ("DECOMPOSED", "EXACT_WORK", "SMALL"):
            monkeypatch.setattr(spectra, name, 0)
    matrix = (normal(300, 7) @ normal(7, 290, seed=1)).float()[None]
    found = spectrum_estimate(matrix, name="x")
    assert (found.values is not None) == known
    assert found.largest == pytest.approx(float(torch.linalg.matrix_norm(matrix[0], 2)), rel=1e-5)
    squares = torch.linalg.svdvals(matrix[0].double()).square()
    for share in (0.5, 0.99, 0.999999):
        expected = int((squares.cumsum(0) < share * squares.sum()).sum()) + 1
        assert energy_rank(matrix, found, share, name="x") == expected
    full = normal(300, 290).float()[None]
    rank = energy_rank(full, spectrum_estimate(full, name="x"), 0.999999, name="x")
    assert (rank is not None) == known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(60, 2500), (2500, 60)], ids=str)
def test_a_change_is_read_as_the_difference(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gonio.geometry.blocks.BLOCK", 10_000)
    before, after = (seeded(*shape, seed=seed).to(dtype) for seed in (0, 1))
    exact, change = after.double() - before.double(), StoredDifference(before, after)
    wide = change.dtype
    assert torch.equal(change[...], exact.to(wide))
    assert torch.equal(torch.cat([rows.clone() for _, rows in row_blocks(change)]), exact.to(wide))
    assert frobenius_norm(change) == pytest.approx(float(exact.norm()), rel=1e-6)
    largest = float(torch.linalg.svdvals(exact)[0])
    assert largest_singular_value(change, name="x", steps=60) == pytest.approx(largest, rel=1e-4)
    for stored, dense in ((change, exact), (change.mT, exact.mT)):
        x = seeded(dense.shape[0], 3, dtype=wide)
        images, back = products(stored, x, scale=2.0)
        torch.testing.assert_close(images.double(), dense.mT @ x.double() / 2, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(back.double(), dense @ (dense.mT @ x.double()) / 4, rtol=1e-4, atol=1e-1)
    stack = StoredDifference(torch.stack([before, after]), torch.stack([after, before]))
    for one, sign in zip(stack, (1, -1), strict=True):
        assert torch.equal(one[...], sign * exact.to(wide))
    assert spectrum_estimate(stack, name="x").largest == pytest.approx(largest, rel=1e-4)
    for name in ("EXACT_WORK", "DECOMPOSED", "SMALL"):
        monkeypatch.setattr(spectra, name, 0)
    monkeypatch.setattr(spectra, "LARGEST_RANK", 20)
    low = StoredDifference(before, (before.double() + 0.02 * (exact @ exact.mT)[:, :4] @ exact[:4]).to(dtype))
    found = spectrum_estimate(StoredDifference(low.before[None], low.after[None]), name="x")
    assert found.values is None
    assert found.largest == pytest.approx(float(torch.linalg.svdvals(low[...].double())[0]), rel=1e-4)
    assert energy_rank(StoredDifference(low.before[None], low.after[None]), found, 0.99, name="x") in (1, 2, 3, 4)
