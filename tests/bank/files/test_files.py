"""The bank of files: each verb is right on what other tools write, or refuses it by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bank.files.members import CASES
from bank.files.verbs import outcomes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if c.slow else n for n, c in CASES.items()])
def test_a_file_is_read_right_or_refused_by_name(name: str, tmp_path: Path) -> None:
    outcomes(CASES[name].make(tmp_path))
