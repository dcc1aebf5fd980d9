"""Filters paired between two sets: planted permutations, chance levels, refusals."""

from __future__ import annotations

import sys
from itertools import permutations

import pytest
import torch
from torch import Tensor

from catalog import seeded
from gonio.errors import InvalidArgumentError, MissingExtraError
from gonio.geometry import cosines, match


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(40, 64), (12, 3, 5, 5)], ids=str)
def test_a_planted_order_is_found(shape: tuple[int, ...], noise: float) -> None:
    a = seeded(*shape)
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(1))
    b = (a + noise * seeded(*shape, seed=2))[order] * torch.rand(len(a), *[1] * (a.ndim - 1)).add(0.5)
    found = match(a, b)
    assert torch.equal(order[found.second], found.first)
    assert bool(found.recognised.all())
    assert float(found.cosines.mean()) == pytest.approx((1 + noise**2) ** -0.5, abs=0.03)


def test_the_pairing_is_the_best_of_all_permutations() -> None:
    a, b = seeded(6, 4), seeded(6, 4, seed=1)
    table = cosines(torch.cat([a, b]))[:6, 6:]
    best = max(sum(float(table[i, p[i]]) for i in range(6)) for p in permutations(range(6)))
    assert float(match(a, b).cosines.sum()) == pytest.approx(best, rel=1e-5)


def test_random_directions_reach_chance_and_no_more() -> None:
    means, recognised = [], 0
    for seed in range(20):
        found = match(seeded(30, 50, seed=2 * seed), seeded(30, 50, seed=2 * seed + 1))
        means.append(float(found.cosines.mean()))
        recognised += int(found.recognised.any())
    assert sum(means) / 20 == pytest.approx(found.chance, rel=0.05)
    assert recognised <= 2  # at most one in a hundred on average


def test_opposite_rows_are_paired_on_request_only() -> None:
    a = seeded(20, 30)
    assert not match(a, -a).recognised.any()
    either = match(a, -a, signs="either")
    assert torch.equal(either.first, either.second)
    assert either.cosines.tolist() == pytest.approx([-1.0] * 20, abs=1e-5)


def test_sets_of_different_sizes_and_zero_rows() -> None:
    a = seeded(5, 16)
    found = match(a, torch.cat([seeded(7, 16, seed=1), a]))
    assert found.second.tolist() == [7, 8, 9, 10, 11]
    assert match(torch.zeros(2, 3), torch.eye(3)).cosines.tolist() == [0, 0]
    assert str(found).startswith("5 pairs, mean cosine 1.00 (by chance 0.")


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"shapes \(2, 3\) and \(2, 4\)"),
        (torch.ones(2), torch.ones(2), "one filter per row"),
        (torch.full((2, 2), float("inf")), torch.ones(2, 2), "finite entries"),
    ],
)
def test_refusals(a: Tensor, b: Tensor, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        match(a, b)


def test_unknown_signs_and_no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="signs 'same' or 'either'; found 'both'"):
        match(torch.eye(2), torch.eye(2), signs="both")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match="scipy"):
        match(torch.eye(2), torch.eye(2))
