"""Large weights: figures from blocks, samples and iterations, with the error that is stated; and bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gonio.measuring import measure
from gonio.geometry.blocks import (count_nonfinite, row_norms, row_blocks, tiles)
from gonio.geometry.duplicates import NEAR, near_pairs
from gonio.geometry.pairs import pair_statistics
from gonio.geometry.lanczos import lanczos_error, largest_singular_value
from gonio.geometry.spectra import spectrum_estimate


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = [(1, 1), (1, 900), (900, 1), (7, 7), (64, 27), (27, 64), (200, 300), (3, 5000), (5000, 3)]
CONDITIONS = [1.0, 1e2, 1e4, 1e8, 1e14]


def of_condition(rows: int, columns: int, condition: float) -> Tensor:
    """Singular values spread evenly in the logarithm."""
    u, _, vh = torch.linalg.svd(normal(rows, columns), full_matrices=False)
    small = min(rows, columns)
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), small, dtype=torch.float64)
    return (u * values) @ vh


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_agree_with_lapack(shape: tuple[int, int], condition: float) -> None:
    matrix = of_condition(*shape, condition)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        stored = matrix.to(dtype)
        expected = torch.linalg.svdvals(stored.double())
        found = measure({"w.weight": stored})["w"]
        assert found.sigma_error == 0
        assert found.sigma_max == pytest.approx(float(expected[0]), rel=1e-5)
        least = float(expected[-1])
        assert found.sigma_min == pytest.approx(least, rel=1e-5, abs=1e-9 * float(expected[0]))
        share = expected / expected.sum()
        entropy = float(torch.special.entr(share).sum().exp())
        assert found.effective_rank == pytest.approx(entropy, rel=1e-5)
        assert found.stable_rank == pytest.approx(float(expected.square().sum() / expected[0] ** 2), rel=1e-5)


@pytest.mark.parametrize("shape", [(40, 3000), (3000, 40), (300, 200)])
def test_the_gram_of_blocks_agrees_with_lapack(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("spectra.DECOMPOSED", 0), ("blocks.BLOCK", 1000)):
        monkeypatch.setattr(f"gonio.measuring.{name}", value)
    matrix = of_condition(*shape, 1e3).float()
    found = spectrum_estimate(matrix[None], name="x")
    assert found.values is not None
    expected = torch.linalg.svdvals(matrix.double())
    torch.testing.assert_close(found.values.sort(descending=True).values, expected, rtol=1e-5, atol=0)


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
    stated = lanczos_error(12, shape[1])
    assert max(missed) <= stated
    assert sum(missed) / len(missed) < stated / 5


def test_the_iteration_finds_a_value_that_stands_out_and_the_rank_of_what_has_few() -> None:
    matrix = normal(400, 300) + 5 * torch.outer(normal(400, seed=1), normal(300, seed=2))
    true = float(torch.linalg.matrix_norm(matrix, 2))
    assert largest_singular_value(matrix.bfloat16().float(), name="x") == pytest.approx(true, rel=1e-2)
    single = torch.outer(normal(300, seed=1), normal(400, seed=2)).float()
    expected = float(torch.linalg.vector_norm(single))
    assert largest_singular_value(single, name="x") == pytest.approx(expected, rel=1e-5)
    assert largest_singular_value(torch.full((300, 400), 3e38), name="x") == pytest.approx(
        3e38 * sqrt(120_000), rel=1e-5
    )


def test_the_start_decides_by_chance_alone_that_the_error_is_larger() -> None:
    assert lanczos_error(4, 10**6) == float("inf")
    assert lanczos_error(200, 4096) < 3e-4


@pytest.mark.parametrize("shared", [0.0, 0.05, 0.3])
def test_the_error_of_a_sample_is_its_spread_over_samples(shared: float, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(900, 40).float()
    matrix += shared * torch.linspace(0, 8, 900)[:, None]  # filters that are alike by different degrees
    whole = pair_statistics(matrix[None], name="x")
    assert whole is not None
    assert (whole.sampled, whole.error) == (None, 0.0)
    monkeypatch.setattr("gonio.geometry.pairs.SAMPLE", 90)
    drawn = [pair_statistics(matrix[None], name=str(seed)) for seed in range(200)]
    off = torch.tensor([d.mean_square_cosine - whole.mean_square_cosine for d in drawn if d is not None])
    stated = torch.tensor([d.error for d in drawn if d is not None])
    assert 0.8 < float(stated.mean() / off.std()) < 1.25
    assert float((off.abs() < 2 * stated).float().mean()) > 0.88


def test_long_filters_are_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gonio.geometry.pairs.LENGTH", 1000)
    found = measure({"w.weight": normal(60, 40).float()})["w"]
    assert found.pairs == 25 * 24 // 2
    assert "angles from 25 of 60 filters, drawn at random" in found.notes[0]


def test_very_long_filters_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(8, 5000).float()
    matrix[3] = 0
    matrix[5] = -2 * matrix[1]
    expected = pair_statistics(matrix[None], name="x")
    monkeypatch.setattr("gonio.geometry.pairs.LONG", 100)
    monkeypatch.setattr("gonio.geometry.pairs.BLOCK", 16 * 300)
    found = pair_statistics(matrix[None], name="x")
    assert expected is not None
    assert found is not None
    assert (
        (found.count, found.near, found.closest) == (21, 1, (1, 5)) == (expected.count, expected.near, expected.closest)
    )
    assert found.mean_square_cosine == pytest.approx(expected.mean_square_cosine, rel=1e-5)
    assert found.angle_std == pytest.approx(
        expected.angle_std, rel=1e-3
    )  # float32's arc cosine is off by 0.02° at 180°


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_near_pair_among_long_filters_is_found_by_its_projection(scale: float) -> None:
    matrix = normal(700, 1200).float() * scale
    at = 0.951  # just above the threshold
    a, b = matrix[600].double(), matrix[13].double()
    b -= (a @ b) / (a @ a) * a
    matrix[13] = (-at * a + sqrt(1 - at**2) * b * (a.norm() / b.norm())).float()
    matrix[40, 3] = float("nan")
    found = near_pairs(matrix, name="x")
    assert found is not None
    assert found.pairs.tolist() == [[13, 600]]
    assert float(found.cosines[0]) == pytest.approx(-at, rel=1e-4)
    assert at > NEAR


def test_blocks_are_the_matrix() -> None:
    matrix = normal(30, 50).bfloat16()
    again = torch.zeros(30, 50)
    for top, left, tile in tiles(matrix):
        again[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    assert torch.equal(again, matrix.float())
    assert torch.equal(torch.cat([rows.clone() for _, rows in row_blocks(matrix)]), matrix.float())


def test_norms_and_counts_at_the_ends_of_the_range() -> None:
    assert row_norms(torch.full((1, 4), 3e38)).tolist() == pytest.approx([6e38], rel=1e-6)
    assert row_norms(torch.full((2, 4), 1e200, dtype=torch.float64)).tolist() == pytest.approx([2e200] * 2)
    assert row_norms(torch.tensor([[float("inf"), 1.0]], dtype=torch.float64)).tolist() == [float("inf")]
    assert count_nonfinite(torch.tensor([[1.0, 2.0], [float("nan"), float("-inf")]])) == (2, (1, 0))
    assert count_nonfinite(torch.tensor(float("inf"))) == (1, ())


# --- memory ---------------------------------------------------------------------------------------

PEAK = """
import json, sys
from gonio import measure

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

found = measure(sys.argv[1])
print(json.dumps({"peak": peak(), "layers": len(found.layers)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("shape", [(16_384, 4096), (4096, 16_384), (80_000_000,), (2, 40_000_000)])
def test_memory_stays_below_twice_the_largest_tensor_and_300_mb(
    shape: tuple[int, ...], suffix: str, tmp_path: Path
) -> None:
    """The whole process, Python and torch included."""
    state = {f"{i}.weight": torch.randn(shape).bfloat16() for i in range(4)}
    largest = state["0.weight"].nbytes
    path = tmp_path / f"m.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    del state
    done = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["layers"] == (4 if len(shape) > 1 else 0)
    room = 256 << 20 if suffix == "pt" else 0  # what torch's map of the file may hold before it is made anew
    assert found["peak"] <= 2 * largest + 300e6 + room
