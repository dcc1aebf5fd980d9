"""The bank of files: each verb is right on what other tools write, or refuses it by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bank.files.members import CASES
from bank.files.verbs import outcomes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools
PAGE = Path(__file__).parents[3] / "docs" / "bank-files.json"
WRITTEN = {row["case"]: row for row in json.loads(PAGE.read_text())}
OLDEST = torch.__version__.startswith("2.6.")


def kind(said: str) -> str:
    return said.partition(":")[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if c.slow else n for n, c in CASES.items()])
def test_a_file_is_read_right_or_refused_by_name(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.float8 and OLDEST:
        pytest.skip("torch 2.6 cannot index float8 tensors")
    found = outcomes(case.make(tmp_path))
    written = WRITTEN[name]["outcomes"]
    assert {verb: kind(said) for verb, said in found.items()} == {verb: kind(said) for verb, said in written.items()}


def test_the_written_outcomes_are_those_of_the_bank() -> None:
    """`make bank` writes them."""
    assert list(WRITTEN) == list(CASES)
    for name, row in WRITTEN.items():
        assert row["origin"] == CASES[name].origin
        assert {kind(said) for said in row["outcomes"].values()} <= {"right", "refused", "not read", "left"}
        assert not any("/tmp" in said for said in row["outcomes"].values())
