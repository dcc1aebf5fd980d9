"""The judgement of treatments in `benchmarks/doctor.py`."""

from __future__ import annotations

import pytest
from benchmarks.doctor import outcome, table, wilson


@pytest.mark.parametrize(
    ("scores", "kept", "expected"),
    [
        ((98, 10, 98), True, "restored"),
        ((98, 10, 96), True, "not restored"),
        ((98, 98, 98), True, "same score"),
        ((98, 10, 10), False, "refused"),
        ((98, 98, 96), True, "worse"),
        ((98, 98, 96), False, "worse"),
    ],
)
def test_outcomes(scores: tuple[float, float, float], kept: bool, expected: str) -> None:
    assert outcome(*scores, kept) == expected


def test_the_interval_is_wilsons() -> None:
    assert wilson(9, 10) == pytest.approx((0.59585, 0.98212), abs=1e-5)
    assert wilson(0, 100) == pytest.approx((0.0, 0.036995), abs=1e-5)


def test_the_table_counts_every_outcome() -> None:
    record = {"damage": "one", "architecture": "a", "outcome": "restored"}
    healthy = [{"kept": ["balance_"], "scores": [90.0, 88.0]}, {"kept": [], "scores": [90.0, 90.0]}]
    found = {
        "damages": [record, {**record, "outcome": "worse"}],
        "healthy": healthy,
        "damaged networks": 1,
        "torch": "",
    }
    text = table(found)
    assert "| one | 2 | 1 | – | – | – | 1 |" in text
    assert "| healthy networks made worse | 1 of 2 | 50.0% |" in text
