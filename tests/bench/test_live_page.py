"""What a tracker with a live page costs: whole intervals, the copies in turns, and the table of the result."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from benchmarks import live_page
from benchmarks.whole_steps import networks


def test_a_turn_has_whole_intervals() -> None:
    made: list[int] = []
    assert min(live_page.turn(made.append, 1e-9)) > 0
    assert made == [live_page.EVERY]


def test_the_copies_train_in_turns_and_a_page_is_written() -> None:
    threads = torch.get_num_threads()
    small = replace(networks(quick=True)[0], threads=threads)
    row = live_page.measured(small, rounds=1, seconds=1e-9)
    assert (row["rounds"], row["tracked"]) == (1, True)
    assert row["rows"] >= 5  # one measured step
    assert row["page_bytes"] > 10_000
    assert row["wall"]["median"] > 0
    assert row["cpu"]["median"] > 0
    plain = live_page.measured(small, rounds=1, seconds=1e-9, tracked=False)
    assert (plain["rows"], plain["page_bytes"]) == (0, 0)


def test_the_table_is_of_the_committed_result() -> None:
    if not live_page.RESULT.exists():
        pytest.skip("benchmarks/results/live_page.json was not measured yet: python -m benchmarks.live_page")
    made = json.loads(live_page.RESULT.read_text(encoding="utf-8"))
    text = live_page.table(made)
    cases = [row["case"] for row in made["rows"] if row["tracked"]]
    assert [line.split(" | ")[0] for line in text.splitlines()[2 : 2 + len(cases)]] == [f"| {case}" for case in cases]
    assert ("From a short run." in text) == made["quick"]
