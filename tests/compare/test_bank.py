"""A bank of real runs of the built-in study's baseline."""

from __future__ import annotations

import json

import numpy as np

from gonio.compare.self_testing import false_verdicts
from style.source import ROOT

BANK = ROOT / "benchmarks" / "results" / "self_test.json"


def bank() -> np.ndarray:
    """Scores of the baseline of the built-in study and of eight copies of it, one row each."""
    return np.array(json.loads(BANK.read_text(encoding="utf-8"))["scores"])


def test_the_page_states_what_the_bank_shows() -> None:
    table = bank()
    assert table.shape == (9, 24)
    rate, coverage = false_verdicts(table, size=10)
    page = (ROOT / "docs" / "howto" / "statistics.md").read_text(encoding="utf-8")
    assert f"{rate:.1%} of\nstudies of 10 seeds" in page
    assert f"{coverage:.1%} of the intervals held 0" in page


def test_the_bank_would_show_an_effect() -> None:
    table = bank()
    table[3] += 4 * table.std()
    rate, _ = false_verdicts(table, size=10)
    assert rate > 0.5
