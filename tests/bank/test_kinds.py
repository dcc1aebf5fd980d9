"""Each kind of fault that a file showed is held by several cases of the bank of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bank.files.members import CASES

KINDS = yaml.safe_load((Path(__file__).parent / "kinds.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row["kind"])
def test_a_kind_has_three_cases(row: dict[str, object]) -> None:
    members = row["members"]
    assert isinstance(members, list)
    assert len(set(members)) == len(members) >= 3
    assert [name for name in members if name not in CASES] == []


def test_a_kind_stands_there_once() -> None:
    assert len({row["kind"] for row in KINDS}) == len(KINDS)
