"""Costs as ratios: equal things cost the same, twice the work costs about twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gonio.compare.judging.cost import _time_ratios, measure_costs, peak_bytes
from gonio.compare.planning.planner import make_plan

TINY = str(Path(__file__).with_name("tiny.py"))


def product(tensor: Tensor, count: int) -> None:
    for _ in range(count):
        tensor @ tensor


@pytest.mark.slow  # it reads a clock: no gate of every change
def test_time_ratios_of_equal_and_of_double_work() -> None:
    square = torch.ones(64, 64)
    blocks = _time_ratios(lambda: product(square, 20), [lambda: product(square, 20), lambda: product(square, 40)])
    same, double = (sorted(ratios)[len(blocks) // 2] for ratios in zip(*blocks, strict=True))
    # medians over blocks on a machine that may be busy; they were within 3 % on an idle one
    assert same == pytest.approx(1, rel=0.2)
    assert double == pytest.approx(2, rel=0.2)


def test_peak_bytes_counts_what_is_held_at_the_same_time() -> None:
    def one_after_the_other() -> None:
        for _ in range(5):
            torch.zeros(1000)

    def together() -> None:
        kept = [torch.zeros(1000) for _ in range(5)]
        del kept

    assert peak_bytes(one_after_the_other) == 4000
    assert peak_bytes(together) == 20000


def test_peak_bytes_leaves_out_what_was_held_before() -> None:
    held = torch.zeros(100_000)
    assert peak_bytes(held.neg_) == 0


def test_every_recipe_gets_both_ratios(capfd: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(["orthogonal-init", "switchable-norm"], task=f"{TINY}:task", seeds=1)
    rows = measure_costs(plan, plan.recipes[1:])
    for entry in plan.recipes[1:]:
        mine = [row for row in rows if row[0] == entry.hash]
        assert [block for _, kind, block, _ in mine if kind == "memory"] == [0, 1, 2]
        assert len([row for row in mine if row[1] == "step_time"]) >= 5
        assert all(ratio > 0 for *_, ratio in mine)
    memory = {hash_: ratio for hash_, kind, _, ratio in rows if kind == "memory"}
    assert memory[plan.recipes[1].hash] == 1.0  # an initialiser leaves the step as it was
    assert memory[plan.recipes[2].hash] > 1.0
    assert capfd.readouterr().err == ""
