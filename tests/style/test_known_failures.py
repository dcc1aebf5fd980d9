"""The tests that are named against failures elsewhere, and for what the formulas promise, exist."""

from __future__ import annotations

import pytest

from style import failures_of_normalisation, failures_of_penalties
from style.known_failures import missing

TABLES = (failures_of_normalisation, failures_of_penalties)
NAMED = {
    **{f"{row}: {what}": tests for table in TABLES for row, (what, tests) in table.FAILURES.items()},
    **{what: tests for table in TABLES for what, tests in table.PROPERTIES.items()},
}
COUNTS = {"A": 22, "C": 11, "E": 10, "F": 7}


def test_every_row_is_there() -> None:
    rows = [row for table in TABLES for row in table.FAILURES]
    assert rows == [f"{section}{n}" for section, count in COUNTS.items() for n in range(1, count + 1)]
    assert len(NAMED) == len(rows) + sum(len(table.PROPERTIES) for table in TABLES)


@pytest.mark.parametrize("what", NAMED)
def test_every_row_has_its_tests(what: str) -> None:
    assert NAMED[what]
    assert not missing(NAMED[what])


def test_a_test_that_is_gone_is_noticed() -> None:
    gone = ["parametrizations/test_lifecycle.py::test_nothing", "nowhere/test_x.py::test_y"]
    assert missing(gone) == gone
