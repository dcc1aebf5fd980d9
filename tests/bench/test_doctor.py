"""The judgement of treatments in `benchmarks/doctor.py`."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.doctor import agreement, names, outcome, rates, table, wilson

from gonio.measuring import Finding


@pytest.mark.parametrize(
    ("scores", "kept", "stated", "expected"),
    [
        ((98, 10, 98), ["calibrate_"], False, "restored"),
        ((98, 10, 98), ["even_out_", "retrain_"], False, "retrained"),
        ((98, 10, 96), ["retrain_"], False, "not restored"),
        ((98, 10, 96), ["retrain_"], True, "in part"),
        ((98, 10, 10), ["balance_", "recycle_"], False, "function kept"),
        ((98, 10, 10), ["balance_", "calibrate_"], False, "not restored"),
        ((98, 98, 98), ["balance_"], False, "same score"),
        ((98, 10, 10), [], True, "refused"),
        ((98, 98, 96), ["balance_"], False, "worse"),
        ((98, 98, 96), [], True, "worse"),
    ],
)
def test_outcomes(scores: tuple[float, float, float], kept: list[str], stated: bool, expected: str) -> None:
    assert outcome(*scores, kept, stated=stated) == expected


def test_the_interval_is_wilsons() -> None:
    assert wilson(9, 10) == pytest.approx((0.59585, 0.98212), abs=1e-5)
    assert wilson(0, 100) == pytest.approx((0.0, 0.036995), abs=1e-5)


def test_a_finding_names_its_layer() -> None:
    of_layer = Finding("G102", "warn", "blocks.1.0", "", "", "")
    of_model = Finding("G409", "warn", "", "the output is far larger: 4 (× 100), 7 (× 31)", "", "")
    assert names(of_layer, "blocks.1.0")
    assert not names(of_layer, "blocks.2")
    assert [names(of_model, path) for path in ("4", "7", "1")] == [True, True, False]


def found() -> dict[str, Any]:
    record = {"damage": "one", "architecture": "a", "outcome": "restored", "layer named": False, "codes": ["G102"]}
    record |= {"scores": [98, 10, 98], "place": "first", "kept": ["even_out_", "calibrate_"]}
    refused = {**record, "outcome": "refused", "layer named": True, "kept": []}
    healthy = [{"kept": ["balance_"], "scores": [90.0, 88.0]}, {"kept": [], "scores": [90.0, 90.0]}, None]
    return {
        "damaged": {"3000": [record, {**record, "outcome": "worse", "place": "last"}], "3001": [refused]},
        "healthy": {str(number): case for number, case in enumerate(healthy)},
        "torch": "",
    }


def test_the_table_counts_every_outcome() -> None:
    text = table(found())
    assert "| one | 3 | 1 | – | – | – | – | – | 1 | 1 |" in text
    assert "| restored, retrained, same score, or refused | 2 of 3 | 66.7% |" in text
    assert "| of those that cost more than a point: restored or retrained | 1 of 3 |" in text
    assert "treatment that claims more than the same function | 1 of 2" in text
    assert "| healthy networks made worse | 1 of 2 | 50.0% |" in text
    assert "2 damaged networks (2 a)." in text


def test_treatments_of_two_networks_agree_where_the_same_verbs_were_kept() -> None:
    first, last = found()["damaged"]["3000"]
    other = {**first, "kept": ["calibrate_", "even_out_"]}
    assert agreement([[first, last], [other]])[1:] == (1, 1)
    assert agreement([[first, last], [{**first, "kept": []}], [other]])[1:] == (1, 3)
    assert agreement([[first], [{**other, "architecture": "b"}]])[1:] == (0, 0)


def test_rates_of_a_rule() -> None:
    assert rates(found()) == {"G102": {"cases": 3, "near": 1, "refused": 1}}
