"""The index of directions: exact cosines, recall that grows with the bits, and errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from catalog import seeded
from gonio.errors import InvalidArgumentError
from gonio.geometry import SignIndex

draw = partial(seeded, dtype=torch.float64)


def exact(vectors: torch.Tensor, x: torch.Tensor, k: int) -> torch.return_types.topk:
    unit, query = (v / v.norm(dim=1, keepdim=True) for v in (vectors, x))
    return (query @ unit.T).topk(k, dim=1)


def recall(bits: int, candidates: int) -> float:
    vectors = draw(3000, 96)
    x = vectors[:200] + 1.5 * draw(200, 96, seed=1)
    found = SignIndex(vectors, bits=bits, candidates=candidates).query(x, 5).indices
    wanted = exact(vectors, x, 5).indices
    return sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)) / wanted.numel()


def test_with_all_vectors_as_candidates_the_search_is_exact() -> None:
    vectors, x = draw(300, 24), draw(7, 24, seed=2)
    found, wanted = SignIndex(vectors, bits=16, candidates=60).query(x, 5), exact(vectors, x, 5)
    torch.testing.assert_close(found.cosines, wanted.values, atol=1e-12, rtol=0)
    assert torch.equal(found.indices, wanted.indices)


def test_more_bits_and_more_candidates_find_more() -> None:
    few, bits, both = recall(32, 5), recall(256, 5), recall(256, 40)
    assert few < bits < both
    assert both > 0.9  # most of the five are chance neighbours at about 70 degrees, which few bits tell apart


def test_blocks_of_stored_vectors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, x = draw(500, 24), draw(9, 24, seed=3)
    whole = SignIndex(vectors, bits=128).query(x, 3)
    monkeypatch.setattr("gonio.geometry.sign_index._ROWS", 64)
    parts = SignIndex(vectors, bits=128).query(x, 3)
    assert torch.equal(whole.indices[:, 0], parts.indices[:, 0])
    torch.testing.assert_close(whole.cosines[:, 0], parts.cosines[:, 0])


def test_lengths_do_not_matter_and_signs_do() -> None:
    vectors = draw(100, 16)
    index = SignIndex(vectors * 100, bits=64)
    assert index.query(vectors[5] / 7).indices.tolist() == [[5]]
    assert index.query(-vectors[5]).indices.tolist() != [[5]]
    assert len(index) == 100
    assert repr(index) == "SignIndex(100 vectors of 16 numbers, bits=64)"


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.zeros(3, 4), "finite vectors other than zero"),
        (torch.full((3, 4), torch.nan), "finite vectors other than zero"),
        (torch.ones(4), r"needs vectors \(n, d\), at least one; found shape \(4,\)"),
        (torch.ones(0, 4), "at least one"),
    ],
)
def test_vectors_without_a_direction_are_refused(vectors: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SignIndex(vectors)


def test_other_mistakes() -> None:
    index = SignIndex(draw(5, 4))
    with pytest.raises(InvalidArgumentError, match="bits >= 1 and candidates >= 1; found bits=0"):
        SignIndex(draw(5, 4), bits=0)
    with pytest.raises(InvalidArgumentError, match="1 <= k <= 5; found k=6"):
        index.query(draw(4), 6)
    with pytest.raises(InvalidArgumentError, match=r"vectors of 4 numbers; found shape \(3,\)"):
        index.query(draw(3))
