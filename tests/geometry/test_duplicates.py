"""Sign hashing follows the angle law; near duplicates are all found, verified, and honestly reported."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from catalog import seeded
from geometry.examples import REPEATABLE
from gonio.errors import InvalidArgumentError
from gonio.geometry import angles, cosines, duplicates, near_duplicates, normalize, sign_hash, sign_similarity
from gonio.geometry.duplicates import ROUNDING, cheapest_search, earliest_parallel

LARGE = 6000


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets small enough to know the truth are hashed all the same."""
    monkeypatch.setattr(duplicates, "EXACT_SIZE", 1000)
    monkeypatch.setattr(duplicates, "ENTRY_COST", 1e9)


def partners(source: Tensor, cosine: Tensor | float, g: torch.Generator) -> Tensor:
    """Unit vectors at the given cosines to unit vectors."""
    other = torch.randn(source.shape, generator=g)
    other = normalize(other - (other * source).sum(-1, keepdim=True) * source)
    cosine = torch.as_tensor(cosine).reshape(-1, 1)
    return cosine * source + (1 - cosine**2).sqrt() * other


def planted(n: int, d: int, *, shift: float = 0.0) -> Tensor:
    """Random vectors of which a twentieth have a partner at |cosine| in [0.9, 1], a third of them opposite."""
    g = torch.Generator().manual_seed(0)
    x = normalize(torch.randn(n, d, generator=g))
    count = n // 20
    sign = torch.where(torch.rand(count, 1, generator=g) < 1 / 3, -1.0, 1.0)
    x[:count] = sign * partners(x[count : 2 * count], 0.9 + 0.1 * torch.rand(count, generator=g), g)
    x = x + shift * normalize(torch.randn(d, generator=g))
    return x[torch.randperm(n, generator=g)] * (0.5 + torch.rand(n, 1, generator=g))


def all_pairs(vectors: Tensor, cosine: float) -> set[tuple[int, int]]:
    unit = normalize(vectors.double())
    return as_set(((unit @ unit.T).abs() >= cosine).triu(1).nonzero())


def as_set(pairs: Tensor) -> set[tuple[int, int]]:
    return {(int(i), int(j)) for i, j in pairs}


@pytest.mark.parametrize("theta", [0.0, 0.1, 1.0, pi / 2, 2.5, pi])
def test_bits_differ_as_often_as_the_angle_says(theta: float) -> None:
    bits = 20_000
    pair = torch.tensor([[1.0, 0.0, 0.0], [torch.tensor(theta).cos(), torch.tensor(theta).sin(), 0.0]])
    hashed = sign_hash(pair, bits)
    share = float((hashed[0] != hashed[1]).double().mean())
    p = theta / pi
    assert abs(share - p) <= 4.5 * sqrt(p * (1 - p) / bits) + 1e-4


def test_sign_similarity_is_the_expected_product_of_signs() -> None:
    matrix = torch.randn(4, 5)
    assert torch.equal(sign_hash(-3 * matrix), ~sign_hash(matrix))
    assert sign_hash(torch.zeros(1, 5)).all()
    assert not torch.equal(sign_hash(matrix, seed=1), sign_hash(matrix))
    signs = torch.where(sign_hash(matrix, 20_000), 1.0, -1.0)
    measured = signs @ signs.T / 20_000
    torch.testing.assert_close(sign_similarity(matrix), measured, rtol=0, atol=4.5 / sqrt(20_000))
    torch.testing.assert_close(sign_similarity(matrix), 1 - 2 * angles(matrix) / pi)


@REPEATABLE
@given(n=st.integers(0, 12), d=st.integers(1, 4), cosine=st.floats(0.3, 1.0), seed=st.integers(0, 10**6))
def test_small_sets_are_exact(n: int, d: int, cosine: float, seed: int) -> None:
    vectors = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    found = near_duplicates(vectors, cosine=cosine)
    sure, possible = all_pairs(vectors, cosine + 1e-5), all_pairs(vectors, cosine - 1e-5)
    assert sure <= as_set(found.pairs) <= possible
    assert (found.method, found.recall, found.capped) == ("exact", 1.0, 0)


def test_blocks_cover_the_whole_triangle() -> None:
    n = 2 * duplicates.GRAM_BLOCK + 300
    assert n <= duplicates.EXACT_SIZE
    vectors = planted(n, 16)
    found = near_duplicates(vectors)
    assert found.method == "exact"
    assert as_set(found.pairs) == all_pairs(vectors, 0.95)
    assert torch.equal(found.pairs, found.pairs[(found.pairs[:, 0] * n + found.pairs[:, 1]).argsort()])
    torch.testing.assert_close(found.cosines, cosines(vectors)[found.pairs[:, 0], found.pairs[:, 1]])
    twice = near_duplicates(torch.cat([vectors[:200], vectors[:200]]), cosine=1.0)  # up to rounding
    assert {(i, i + 200) for i in range(200)} <= as_set(twice.pairs)
    assert float(twice.cosines.max()) <= 1


@pytest.mark.usefixtures("hashing")
@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_large_sets_are_hashed_to_the_asked_recall(shift: float) -> None:
    vectors = planted(LARGE, 64, shift=shift)
    found = near_duplicates(vectors)
    truth = all_pairs(vectors, 0.95)
    assert found.method == "hashed"
    assert as_set(found.pairs) <= truth  # verified: no false pair
    assert len(found.pairs) >= 0.99 * len(truth)
    assert torch.equal(found.pairs, near_duplicates(vectors, cosine=0.95).pairs)
    assert str(found).endswith(f"expected recall {found.recall:.4f} at the threshold")
    if not shift:
        assert float((found.cosines < 0).float().mean()) > 0.2  # antipodes are found too


@pytest.mark.usefixtures("hashing")
def test_expected_recall_is_the_share_found_at_the_threshold() -> None:
    """Pairs planted exactly at the threshold, with a low target so that misses can be counted."""
    g = torch.Generator().manual_seed(0)
    source = normalize(torch.randn(3000, 48, generator=g))
    found = near_duplicates(torch.cat([source, partners(source, 0.951, g)]), cosine=0.95, recall=0.8)
    assert found.method == "hashed"
    assert 0.8 <= found.recall < 0.9
    assert abs(len(found.pairs) / 3000 - found.recall) < 4.5 * sqrt(0.8 * 0.2 / 3000) + 0.01


def test_a_tight_cone_or_a_low_threshold_falls_back_to_the_exact_search() -> None:
    assert cheapest_search(normalize(planted(9000, 64)), 0.95, 0.999, 0) is not None
    assert cheapest_search(normalize(planted(9000, 64, shift=2.0)), 0.95, 0.999, 0) is None
    assert cheapest_search(normalize(planted(9000, 64)), 0.6, 0.999, 0) is None
    assert near_duplicates(planted(9000, 64, shift=2.0)).method == "exact"


@pytest.mark.usefixtures("hashing")
def test_crowded_buckets_are_capped_and_reported() -> None:
    vectors = planted(LARGE, 32)
    vectors[:1000] = vectors[0]
    found = near_duplicates(vectors, cosine=0.99)
    assert found.capped >= 1000 - duplicates.BUCKET_LIMIT
    assert "in crowded buckets compared with 256 neighbours" in str(found)
    assert len(found.pairs) >= 1000 * duplicates.BUCKET_LIMIT * 0.8


@pytest.mark.usefixtures("hashing")
def test_zero_vectors_are_in_no_pair_and_crowd_no_bucket() -> None:
    vectors = planted(LARGE, 32)
    vectors[:1000] = 0
    found = near_duplicates(vectors)
    assert (found.method, found.capped) == ("hashed", 0)
    assert as_set(found.pairs) == all_pairs(vectors, 0.95)


def test_nothing_but_zero_vectors() -> None:
    vectors = torch.zeros(3000, 4)
    for zeros in (vectors, vectors[:5], vectors[:, :0]):
        assert len(near_duplicates(zeros).pairs) == 0
    vectors[7] = 1
    assert len(near_duplicates(vectors).pairs) == 0
    vectors[2000] = -2
    assert near_duplicates(vectors).pairs.tolist() == [[7, 2000]]


def test_a_set_of_copies_ends_early_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "EXACT_SIZE", 1000)
    found = near_duplicates(torch.ones(4000, 3))
    assert (found.method, found.capped) == ("exact", 4000)
    assert len(found.pairs) > 4000 * duplicates.BUCKET_LIMIT
    assert str(found).endswith("exact search, ended before the last 4000 vectors")
    monkeypatch.setattr(duplicates, "ENTRY_COST", 1e9)
    found = near_duplicates(torch.ones(4000, 3))
    assert (found.method, found.capped) == ("hashed", 4000 - duplicates.BUCKET_LIMIT - 1)
    last = duplicates.BUCKET_LIMIT + 1
    assert len(found.pairs) == (4000 - last) * duplicates.BUCKET_LIMIT + last * (last - 1) // 2


@pytest.mark.parametrize(("scale", "dtype"), [(1e30, torch.float32), (1e-11, torch.float32), (1e200, torch.float64)])
def test_scale_plays_no_part(scale: float, dtype: torch.dtype) -> None:
    vectors = planted(1000, 16).to(dtype)
    assert torch.equal(near_duplicates(scale * vectors).pairs, near_duplicates(vectors).pairs)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_planted_duplicates_and_antipodes_among_200_000_vectors(shift: float) -> None:
    """The promise: 99.9 % of them, of which a fifth lie exactly at the threshold; also around a common direction."""
    n, d, count = 200_000, 256, 10_000
    g = torch.Generator().manual_seed(2)
    cosine = (0.95 + 0.0625 * torch.rand(count, generator=g)).clamp_max(1)
    cosine[: count // 5] = 0.9501
    cosine[::2] *= -1
    x = normalize(torch.randn(n, d, generator=g)) + shift * normalize(torch.randn(d, generator=g))
    x = normalize(x)
    x[:count] = partners(x[count : 2 * count], cosine, g)
    found = near_duplicates(x)
    assert found.method == "hashed"
    expected = torch.arange(count) * n + torch.arange(count, 2 * count)
    hit = torch.isin(expected, found.pairs[:, 0] * n + found.pairs[:, 1])
    assert float(hit.double().mean()) >= 0.999


@pytest.mark.parametrize(
    ("vectors", "options", "message"),
    [
        (torch.zeros(2, 3, 4), {}, r"takes a matrix \(n, d\), .*found shape \(2, 3, 4\)"),
        (torch.zeros(2, 3), {"cosine": 0, "recall": 0.5}, r"0 < cosine <= 1 .* found cosine=0, recall=0\.5"),
        (torch.full((2, 3), float("nan")), {}, "finite entries; found 6 of 6 NaN or infinite"),
    ],
)
def test_refusals(vectors: Tensor, options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        near_duplicates(vectors, **options)
    with pytest.raises(InvalidArgumentError, match="bits >= 1; found bits=0"):
        sign_hash(torch.zeros(2, 3), 0)


@pytest.mark.parametrize(("n", "d"), [(0, 3), (5, 1), (3000, 2), (2000, 3), (9000, 2), (9000, 40), (30000, 4)])
def test_the_earliest_parallel_row_is_that_of_all_pairs(n: int, d: int) -> None:
    vectors = seeded(n, d)
    if n > 5:
        vectors[n // 2], vectors[n - 1], vectors[7], vectors[9] = -3 * vectors[3], 2 * vectors[3], 0.0, 0.0
    first, second = near_duplicates(vectors, cosine=1 - ROUNDING).pairs.unbind(1)
    expected = torch.arange(n).scatter_reduce(0, second, first, "amin")
    assert torch.equal(earliest_parallel(vectors, cosine=1 - ROUNDING), expected)
