"""A norm among those of its siblings, against the definition with the others listed one by one."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
import torch

from catalog import seeded
from gonio.measuring import check, measure
from gonio.measuring.findings.siblings import LEAST_SPREAD, AmongSiblings, places
from gonio.measuring.reading.order import SIBLINGS


def defined(norm: float, others: list[float]) -> tuple[float | None, float | None]:
    if 0 in others:
        return None, None
    if not norm:
        return 0.0, None
    logs = [math.log(other) for other in others]
    spread = max(1.4826 * median(abs(log - median(logs)) for log in logs), LEAST_SPREAD)
    away = math.log(norm) - median(logs)
    return math.exp(away), abs(away) / spread


def placed(norms: list[float]) -> list[AmongSiblings]:
    found = places((f"layers.{i}.weight", (3, 3), norm) for i, norm in enumerate(norms))
    return [found[f"layers.{i}.weight"] for i in range(len(norms))]


@pytest.mark.parametrize("kind", ["distinct", "equal ones", "with zeros", "one zero"])
@pytest.mark.parametrize("count", [4, 5, 6, 7, 40, 41])
def test_each_norm_is_compared_with_the_others(kind: str, count: int) -> None:
    draw = random.Random(count)
    norms = [
        draw.lognormvariate(0, 1) if kind == "distinct" else draw.choice([1.0, 1.0, 2.0, 9.0]) for _ in range(count)
    ]
    for i in range({"with zeros": 2, "one zero": 1}.get(kind, 0)):
        norms[i] = 0.0
    for i, found in enumerate(placed(norms)):
        ratio, distance = defined(norms[i], norms[:i] + norms[i + 1 :])
        assert found.siblings == count - 1
        for value, expected in ((found.ratio, ratio), (found.distance, distance)):
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12))


def test_few_siblings_and_vectors_have_no_place() -> None:
    assert places((f"layers.{i}.weight", (3, 3), 1.0) for i in range(SIBLINGS)) == {}
    assert places((f"layers.{i}.bias", (3,), 1.0) for i in range(9)) == {}


@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_matrix_that_is_0_beside_others_is_a_warning(count: int) -> None:
    state = {f"layers.{i}.attn_v.weight": seeded(24, 40, seed=i) for i in range(count)}
    state["layers.1.attn_v.weight"].zero_()
    said = f"every value is 0, unlike in its {count - 1} siblings of other layers"
    for found in (measure(state), check(state)):
        assert [(f.code, f.level, f.path, f.found) for f in found.findings] == [
            ("G709", "warn", "layers.1.attn_v", said)
        ]


def test_what_is_0_in_all_layers_or_alone_is_a_remark() -> None:
    every = {f"layers.{i}.out.weight": torch.zeros(24, 40) for i in range(4)}
    two = {"layers.0.out.weight": seeded(24, 40), "layers.1.out.weight": torch.zeros(24, 40)}
    others = {"a.weight": seeded(24, 40), "b.weight": seeded(24, 40, seed=1), "c.weight": torch.zeros(24, 40)}
    for state in (every, two, others):
        for found in (measure(state), check(state)):
            assert {(f.code, f.level) for f in found.findings} == {("G101", "info")}


def test_many_siblings_are_placed_in_one_pass() -> None:
    """With the others listed for each of them this would be 4 × 10⁸ steps."""
    norms = [1.0 + (i % 7) for i in range(20_000)]
    norms[5] = 1e4
    assert [i for i, place in enumerate(placed(norms)) if place.found] == [5]
