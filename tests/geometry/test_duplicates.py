"""Sign hashing follows the angle law; near duplicates are all found, verified, and honestly reported."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from geometry.examples import THOROUGH
from gonio.errors import InvalidArgumentError
from gonio.geometry import angles, cosines, near_duplicates, normalize, sign_hash, sign_similarity
from gonio.geometry import duplicates as module

LARGE = 6000  # above the size that is searched exactly


def planted(n: int, d: int, *, shift: float = 0.0, seed: int = 0) -> Tensor:
    """Random vectors of which a twentieth have a partner at |cosine| in [0.9, 1], a third of them opposite."""
    g = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=g))
    count = n // 20
    source, other = x[count : 2 * count], normalize(torch.randn(count, d, generator=g))
    other = normalize(other - (other * source).sum(-1, keepdim=True) * source)
    cosine = 0.9 + 0.1 * torch.rand(count, 1, generator=g)
    sign = torch.where(torch.rand(count, 1, generator=g) < 1 / 3, -1.0, 1.0)
    x[:count] = sign * (cosine * source + (1 - cosine**2).sqrt() * other)
    x = x + shift * normalize(torch.randn(d, generator=g))
    return x[torch.randperm(n, generator=g)] * (0.5 + torch.rand(n, 1, generator=g))


def all_pairs(vectors: Tensor, cosine: float) -> set[tuple[int, int]]:
    unit = normalize(vectors.double())
    hits = ((unit @ unit.T).abs() >= cosine).triu(1).nonzero()
    return {(int(i), int(j)) for i, j in hits}


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
    signs = torch.where(sign_hash(matrix, 20_000), 1.0, -1.0)
    measured = signs @ signs.T / 20_000
    torch.testing.assert_close(sign_similarity(matrix), measured, rtol=0, atol=4.5 / sqrt(20_000))
    torch.testing.assert_close(sign_similarity(matrix), 1 - 2 * angles(matrix) / pi)


def test_hash_is_invariant_to_scale_and_complemented_by_negation() -> None:
    matrix = torch.randn(5, 8)
    assert torch.equal(sign_hash(3 * matrix), sign_hash(matrix))
    assert torch.equal(sign_hash(-matrix), ~sign_hash(matrix))
    assert sign_hash(torch.zeros(1, 8)).all()
    assert not torch.equal(sign_hash(matrix, seed=1), sign_hash(matrix))
    assert torch.equal(sign_hash(matrix.expand(2, 5, 8))[1], sign_hash(matrix))


@THOROUGH
@given(n=st.integers(0, 12), d=st.integers(1, 4), cosine=st.floats(0.3, 1.0), seed=st.integers(0, 10**6))
def test_small_sets_are_exact(n: int, d: int, cosine: float, seed: int) -> None:
    vectors = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    found = near_duplicates(vectors, cosine=cosine)
    sure, possible = all_pairs(vectors, cosine + 1e-5), all_pairs(vectors, cosine - 1e-5)
    assert sure <= as_set(found.pairs) <= possible
    assert (found.method, found.recall, found.capped) == ("exact", 1.0, 0)


def test_equal_rows_are_found_at_a_cosine_of_one() -> None:
    rows = torch.randn(200, 37)
    found = near_duplicates(torch.cat([rows, rows]), cosine=1.0)
    assert found.pairs.tolist() == [[i, i + 200] for i in range(200)]
    assert float(found.cosines.max()) <= 1


def test_blocks_cover_the_whole_triangle() -> None:
    n = 2 * module.BLOCK + 300
    assert n <= module.EXACT_SIZE
    vectors = planted(n, 16)
    found = near_duplicates(vectors)
    assert found.method == "exact"
    assert as_set(found.pairs) == all_pairs(vectors, 0.95)
    assert torch.equal(found.pairs, found.pairs[(found.pairs[:, 0] * n + found.pairs[:, 1]).argsort()])
    torch.testing.assert_close(found.cosines, cosines(vectors)[found.pairs[:, 0], found.pairs[:, 1]])


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_large_sets_are_hashed_to_the_asked_recall(shift: float) -> None:
    vectors = planted(LARGE, 64, shift=shift)
    found = near_duplicates(vectors, cosine=0.95)
    truth = all_pairs(vectors, 0.95)
    assert found.method == "hashed"
    assert as_set(found.pairs) <= truth  # verified: no false pair
    assert len(found.pairs) >= 0.99 * len(truth)
    if not shift:
        assert float((found.cosines < 0).float().mean()) > 0.2  # antipodes are found too


def test_expected_recall_is_the_share_found_at_the_threshold() -> None:
    """Pairs planted exactly at the threshold, with a low target so that misses can be counted."""
    g = torch.Generator().manual_seed(0)
    source, other = normalize(torch.randn(2, 3000, 48, generator=g))
    other = normalize(other - (other * source).sum(-1, keepdim=True) * source)
    partner = 0.951 * source + sqrt(1 - 0.951**2) * other
    vectors = torch.cat([source, partner])
    found = near_duplicates(vectors, cosine=0.95, recall=0.8)
    share = len(found.pairs) / 3000
    assert found.method == "hashed"
    assert 0.8 <= found.recall < 0.9
    assert abs(share - found.recall) < 4.5 * sqrt(0.8 * 0.2 / 3000) + 0.01


def test_a_tight_cone_or_a_low_threshold_falls_back_to_the_exact_search() -> None:
    assert near_duplicates(planted(LARGE, 32, shift=2.0), cosine=0.95).method == "exact"
    assert near_duplicates(planted(LARGE, 32), cosine=0.6).method == "exact"


def test_crowded_buckets_are_capped_and_reported() -> None:
    vectors = planted(LARGE, 32)
    vectors[:1000] = vectors[0]
    found = near_duplicates(vectors, cosine=0.99)
    assert found.capped >= 1000 - module.BUCKET_LIMIT
    assert "in crowded buckets compared with 256 neighbours" in str(found)
    assert len(found.pairs) >= 1000 * module.BUCKET_LIMIT * 0.8


def test_zero_vectors_are_in_no_pair_and_crowd_no_bucket() -> None:
    vectors = planted(LARGE, 32)
    vectors[:1000] = 0
    found = near_duplicates(vectors)
    assert found.method == "hashed"
    assert found.capped == 0
    assert as_set(found.pairs) == all_pairs(vectors, 0.95)
    assert len(near_duplicates(torch.zeros(5, 3)).pairs) == 0


def test_result_is_reproducible_and_readable() -> None:
    vectors = planted(LARGE, 32)
    first, second = near_duplicates(vectors, seed=3), near_duplicates(vectors, seed=3)
    assert torch.equal(first.pairs, second.pairs)
    assert str(first).endswith(f"expected recall {first.recall:.4f} at the threshold")
    assert near_duplicates(vectors.half(), cosine=0.99).pairs.shape[1] == 2


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"one matrix \(n, d\).*found shape \(2, 3, 4\)"):
        near_duplicates(torch.zeros(2, 3, 4))
    with pytest.raises(InvalidArgumentError, match=r"0 < cosine <= 1 .* found cosine=0, recall=0\.5"):
        near_duplicates(torch.zeros(2, 3), cosine=0, recall=0.5)
    with pytest.raises(InvalidArgumentError, match="finite entries; found NaN or infinity"):
        near_duplicates(torch.full((2, 3), float("nan")))
    with pytest.raises(InvalidArgumentError, match="bits >= 1; found bits=0"):
        sign_hash(torch.zeros(2, 3), 0)
