"""Planted changes of 22 kinds are named by the form of the row and by the findings; controls have none."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.planted_changes import BASES, KINDS, PAIRS, Case, cases, wrong

from catalog import seeded
from gonio.measuring import difference

NAMES = [*(one.name for one in KINDS), *PAIRS]


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_is_named_once(name: str) -> None:
    case = Case(name, list(BASES)[NAMES.index(name) % 2], seed=100)  # a seed that no rule was written with
    assert not wrong(case), f"{case}: {wrong(case)}"


@pytest.mark.slow
def test_every_planted_change_is_named() -> None:
    tried = list(cases())
    assert len(tried) >= 200
    assert [f"{case}: {said}" for case in tried if (said := wrong(case))] == []


def test_a_wrong_name_is_seen() -> None:
    """The control of the check itself: a change under the name of another kind."""
    for planted, other in (("scaled by 0.5", "gains"), ("untouched", "scaled by 0.5"), ("rotation", "LoRA of rank 1")):
        named = {one.name: one for one in KINDS}
        kinds = [one if one.name != other else type(one)(other, named[planted].change, one.form) for one in KINDS]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("benchmarks.planted_changes.KINDS", kinds)
            assert "form" in wrong(Case(other, "falling", 0)), other


def named(after: torch.Tensor, before: torch.Tensor) -> tuple[str, list[str]]:
    found = difference({"w.weight": before}, {"w.weight": after})
    return found["w"].form, [finding.code for finding in found.findings]


def test_a_change_of_norms_is_told_from_a_small_change_of_all_entries() -> None:
    weight = torch.randn(40, 50)
    noise = torch.randn(40, 50)
    assert named(weight + 1e-4 * noise, weight) == ("full", [])  # 0.006 degrees
    assert named(1.0001 * weight, weight) == ("scaled", [])
    assert named(-1 * weight, weight)[0] == "rotation"  # by 180 degrees
    assert named(weight * torch.linspace(0.9, 1.1, 40)[:, None], weight) == ("gains", [])


def test_filters_and_entries_that_became_zero_are_pruned_whatever_is_left() -> None:
    weight = torch.randn(40, 50)
    for rows in (1, 39, 40):
        after = weight.clone()
        after[:rows] = 0
        assert named(after, weight) == ("pruned", ["G506"])
    after = weight + 0.1 * torch.randn(40, 50)
    after[:4] = 0
    form, codes = named(after, weight)
    assert (form, codes) == ("full", ["G506"])
    once = weight.clone()
    once[3, 4] = 0  # one entry in 2000
    assert named(once, weight)[1] == []


def test_equal_filters_and_blocks_of_several_matrices_can_be_reordered() -> None:
    weight = torch.randn(6, 8)
    weight[1] = weight[0]
    assert named(weight[[1, 0, 2, 3, 4, 5]], weight) == ("equal", [])
    assert named(weight[[2, 1, 0, 3, 4, 5]], weight) == ("reordered", ["G505"])
    conv = torch.randn(12, 5, 3, 3)
    found = difference({"c.weight": conv}, {"c.weight": conv.flip(0)})
    assert found["c"].reordered == 12
    assert found["c"].entries_changed == conv.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_inputs_in_another_order_are_named_with_their_number(dtype: torch.dtype) -> None:
    """As of a conversion that flattens height, width and channels in another order, or flips kernels."""
    flat = torch.randn(10, 6 * 4 * 4).to(dtype)
    turned = flat.view(10, 6, 4, 4).permute(0, 2, 3, 1).flatten(1)
    kernels = torch.randn(12, 5, 3, 3).to(dtype)
    for after, before, moved in ((turned, flat, 90), (kernels.flip(1), kernels, 36), (kernels.flip(2, 3), kernels, 40)):
        found = difference({"w.weight": before}, {"w.weight": after})
        assert (found["w"].form, found["w"].reordered, found["w"].reordered_inputs) == ("reordered", 0, moved)
        (finding,) = (each for each in found.findings if each.level != "info")
        assert finding.code == "G505"
        assert finding.found.startswith(f"{moved} of its inputs are at other places")


def test_entries_that_changed_places_in_one_row_are_no_order_of_the_inputs() -> None:
    weight = torch.randn(40, 50)
    after = weight.clone()
    after[7, [3, 4]] = after[7, [4, 3]]
    assert difference({"w.weight": weight}, {"w.weight": after})["w"].reordered_inputs == 0
    found = difference({"w.weight": weight}, {"w.weight": weight + weight.flip(1)})
    assert found["w"].reordered_inputs == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_square_weight_that_is_transposed_is_named(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 40).to(dtype)
    form, codes = named(weight.mT.contiguous(), weight)
    assert form == "transposed"
    assert codes[-1] == "G507"  # after those of a change that is larger than its base
    symmetric = weight + weight.mT
    assert named(symmetric.mT.contiguous(), symmetric) == ("equal", [])
    almost = weight.mT.contiguous()
    almost[3, 7] = 1
    assert named(almost, weight)[0] != "transposed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_an_error_on_their_layer(value: float) -> None:
    weight = torch.randn(4, 5)
    broken = weight.clone()
    broken[1, 2] = value
    for pair, when in (((weight, broken), "after"), ((broken, weight), "before")):
        found = difference(*({"w.weight": one} for one in pair))
        (finding,) = found.findings
        assert (finding.code, finding.level, finding.path) == ("G001", "error", "w")
        assert finding.found == found["w"].reason == f"NaN or infinite values {when}"
        assert json.loads(found.to_json())["tensors"][0]["status"] == "not compared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_in_another_dtype_is_rounded_and_nothing_else(dtype: torch.dtype) -> None:
    state = {f"{i}.weight": seeded(40, 30, seed=i, dtype=torch.float32) for i in range(2)} | {"1.bias": torch.rand(40)}
    lower = {name: value.to(dtype) for name, value in state.items()}
    for before, after in ((state, lower), (lower, state)):
        found = difference(before, after)
        assert [t.form for t in found.moved] == ["rounded"] * 3
        assert found.verdict.startswith("3 of 3 tensors are rounded to another dtype, and nothing else changed.")
    lower["0.weight"][3, 4] += 1
    found = difference(state, lower)
    assert found["1"].form == "rounded"
    assert not found["0"].rounded
    assert "rounded" not in found.verdict
    assert not any(t.rounded for t in difference(state, {n: 1.01 * v for n, v in state.items()}).moved)


def test_intruders_are_among_the_largest_directions_in_the_sentence() -> None:
    random = torch.Generator().manual_seed(0)
    a, c, u, v = (torch.linalg.qr(torch.randn(64, 64, generator=random))[0] for _ in range(4))
    base = a @ torch.diag(torch.logspace(0, -2, 64)) @ c.T
    (found,) = difference({"w": base}, {"w": base + 1.2 * u[:, :4] @ v[:, :4].T}).findings
    assert found.code == "G501"
    assert " of the 10 largest directions are like none of the base; 0 after a random change" in found.found
