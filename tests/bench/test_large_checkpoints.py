"""The law of the costs of large checkpoints: it is the line through measurements, and divides what can be divided."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from benchmarks.large_checkpoints import MEASURED, RESULT, WANTED, WIDE, WORKS, Decoder, Law, laws, table


def measured(decoder: Decoder, jobs: int = 1, cpu: float | None = None) -> dict[str, Any]:
    spent = 2.0 + decoder.parameters * 1e-8 if cpu is None else cpu
    peak = 300_000_000 + 3 * 2 * decoder.largest
    return {**asdict(decoder), "jobs": jobs, "cpu": spent, "seconds": spent, "before": 0, "peak": peak}


def test_a_line_is_found_again() -> None:
    law = Law.of([*map(measured, MEASURED), measured(MEASURED[2], 2, 2 * (2.0 + MEASURED[2].parameters * 1e-8))])
    assert law.start == pytest.approx(2.0)
    assert law.slope == pytest.approx(1e-8)
    assert law.error < 1e-9
    assert law.efficiency == pytest.approx(0.5)
    assert (law.base, law.memory) == (pytest.approx(3e8), pytest.approx(3.0))


def test_cores_divide_the_work_but_no_tensor_and_no_disk() -> None:
    law, model = Law(2.0, 1e-8, 0.0, 0.5, 0.0, 1.0), WANTED["70 B"]
    assert law.seconds(model, 1, 1, 1e20, 1) == pytest.approx(2.0 + model.parameters * 2e-8)
    assert law.seconds(model, 8, 4, 1e20, 1) == pytest.approx(2.0 + model.parameters * 2e-8 / 32)
    assert law.seconds(model, 10**6, 1, 1e20, 1) == pytest.approx(2.0 + model.largest * 1e-8)
    assert law.seconds(model, 10**6, 2, 1e9, 1) == pytest.approx(2.0 + model.parameters / 1e9)


def test_models_have_the_sizes_of_their_names() -> None:
    assert [round(model.parameters / 1e9) for model in WANTED.values()] == [71, 406, 998]


def test_the_committed_result_fits_the_page() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert laws(found).keys() == set(WORKS)
    assert table(found).count("\n| 405 B") == len(WORKS)


def test_narrow_models_are_measured_beside_the_law() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    narrow = [row for row in found["rows"] if row["width"] < WIDE]
    assert {row["work"] for row in narrow} == set(WORKS)
    assert laws(found) == laws({**found, "rows": [row for row in found["rows"] if row not in narrow]})
