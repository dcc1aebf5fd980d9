"""The tracker under FSDP2 and tensor parallelism: the figures of one process, by sums over shards, and no gathering."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreign import SHARDING_ON_A_CPU
from measuring.shard_processes import OPTIMIZERS, WAYS, alone, everything
from ranks import WORLD, spawned

pytestmark = [pytest.mark.processes, SHARDING_ON_A_CPU]
WHOLE = {  # figures that need more than sums over filters
    *("angle_mean", "angle_std", "alignment", "alignment_z", "coherence", "sigma_max", "stable_rank"),
}
CUT = "grouped"  # its filters are those of several matrices, on the second dimension


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, *others = spawned(everything, tmp_path_factory.mktemp("ranks"))
    assert all(rows == [] for other in others for name, (rows, *_) in other.items() if name != "rotations")
    return first


def by_place(rows: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["step"], row["layer"]): row for row in rows}


def divided(way: str, layer: str) -> bool:
    return "FSDP2" in way or layer in ("first", "second")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_figures_are_those_of_one_process(found: dict[str, Any], way: str, name: str) -> None:
    mine, expected = by_place(found[f"{way} {name}"][0]), by_place(alone(name)[0])
    assert mine.keys() == expected.keys()
    for place, row in expected.items():
        left = WHOLE if divided(way, place[1]) else set()
        left = left | ({key for key in row if key.startswith(("norm", "frob", "zero"))} if place[1] == CUT else set())
        held = mine[place]
        if place[1] == CUT and "FSDP2" in way:
            assert "norm_max" not in held
            held = {key: value for key, value in held.items() if not key.startswith("filter_rotation")}
            row = {key: value for key, value in row.items() if not key.startswith("filter_rotation")}
        elif place[1] == CUT:
            left = set()
        assert held.keys() == row.keys() - left, place
        for key, value in held.items():
            if isinstance(value, float):
                assert value == pytest.approx(row[key], rel=2e-4, abs=1e-5), (place, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_gathered_and_one_reduction_adds_all_weights(found: dict[str, Any], way: str, name: str) -> None:
    counts = found[f"{way} {name}"][2]
    kinds = {kind for kind, number in counts.items() if number}
    assert not any("gather" in kind or "scatter" in kind or "to_all" in kind for kind in kinds), counts
    # at two steps and in a measurement: the sums of steps, gradients and states, and those of filters
    assert sum(counts.values()) == 5 * (3 if way == "FSDP2 and TP" else 1)
    assert any("all_gather" in kind for kind, number in found["gathered"][2].items() if number)  # which would be seen


def test_findings_of_filters_and_states_are_those_of_one_process(found: dict[str, Any]) -> None:
    _, expected, _ = alone("AdamW")
    assert "G104 second" in expected
    assert found["FSDP2 AdamW"][1] == [one for one in expected if not one.startswith(("G2", "G3"))]


def test_on_request_weights_are_gathered_one_at_a_time(found: dict[str, Any]) -> None:
    mine, expected = by_place(found["gathered"][0]), by_place(alone("AdamW")[0])
    for place, row in expected.items():
        assert mine[place].keys() == row.keys() - ({k for k in row if "filter_rot" in k} if place[1] == CUT else set())
        for key in WHOLE & row.keys():
            assert mine[place][key] == pytest.approx(row[key], rel=2e-3, abs=1e-4)


def test_rotations_of_shards_are_those_of_the_whole(found: dict[str, Any]) -> None:
    for whole, cut in found["rotations"].values():
        for one, other in zip(whole, cut, strict=True):
            torch.testing.assert_close(other, one)
    assert WORLD > 1
