"""Holds, Muon and the tracker on several processes, replicated and sharded, equal one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreign import SHARDING_ON_A_CPU
from optim.processes import CASES, alone, clipped, everything
from ranks import spawned


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(everything, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("kind", ["DDP", pytest.param("FSDP2", marks=SHARDING_ON_A_CPU)])
@pytest.mark.parametrize("name", CASES)
def test_several_processes_equal_one(ranks: list[dict[str, Any]], name: str, kind: str) -> None:
    """The order of sums differs: float32 within 1e-4; Muon computes in bfloat16, which may round otherwise."""
    results = [each[f"{kind} {name}"] for each in ranks]
    assert not any(isinstance(result, str) for result in results), results[0]
    (weights, rows), *others = results
    expected, expected_rows = alone(name)
    tolerance = 5e-3 if name == "Muon" else 1e-4
    for other, none in others:
        assert all(map(torch.equal, weights, other)), "the processes have the same weights"
        assert none == [], "only the first process stores rows"
    for a, b in zip(weights, expected, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    assert [(row["step"], row["layer"]) for row in rows] == [(row["step"], row["layer"]) for row in expected_rows]
    for row, plain in zip(rows, expected_rows, strict=True):
        figures = row.keys() & {"rotation", "relative_update", "filter_rotation_max", "initial_angle"}
        assert row.keys() - {"effective_rate"} == plain.keys() - {"effective_rate"}  # a sharded model is not traced
        for figure in figures | (row.keys() & {"predicted_rotation"}):
            assert row[figure] == pytest.approx(plain[figure], rel=0.05 if name == "Muon" else 2e-3), figure


def test_a_clip_acts_on_the_largest_logit_of_all_processes(ranks: list[dict[str, Any]]) -> None:
    results = [each["clip"] for each in ranks]
    assert not any(isinstance(result, str) for result in results), results[0]
    expected = clipped(lambda model: model, slice(None), 1 / len(ranks))
    assert float(expected[-1].max()) > 0.3  # the clip acts
    for result in results:
        assert all(map(torch.equal, result, results[0])), "the processes have the same weights"
        for a, b in zip(result, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_clip_that_does_not_see_the_other_processes_is_refused(ranks: list[dict[str, Any]]) -> None:
    why = (
        "clip_qk_: cannot clip logits of the model: several processes train, and the logits of the others are not known"
    )
    assert all(each["clip of one process"].startswith(why) for each in ranks)


def test_a_difference_is_found() -> None:
    """Negative control: another seed gives other weights than the tolerances allow."""
    free, fixed = alone("matrix free"), alone("matrix fixed")
    assert not torch.allclose(free[0][0], fixed[0][0], rtol=5e-3, atol=5e-3)
