"""Two banks of real runs of the built-in study's baseline, and what the page says of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from compare.plans import plan_of
from gonio.compare import RecipeEntry, Results, RunRecord, self_test
from gonio.compare.judging.self_test import disjoint_verdicts, false_verdicts, rate_interval
from gonio.compare.judging.statistics import paired_t
from gonio.compare.judging.summary import summarise
from style.source import ROOT

BANK = ROOT / "benchmarks" / "results" / "self_test.json"
SIZE = 10  # seeds of a study
SHAPES = [(9, 24), (5, 42)]


def banks() -> list[np.ndarray]:
    """Scores of the baseline and of its copies, one row each."""
    return [np.array(bank["scores"]) for bank in json.loads(BANK.read_text(encoding="utf-8"))["banks"]]


def results_of(table: np.ndarray) -> Results:
    """The bank as the results of a self-test's study."""
    entries = tuple(RecipeEntry(f"again-{i}" if i else "baseline", {}, f"{i}") for i in range(len(table)))
    plan = replace(plan_of(), recipes=entries, seeds=tuple(range(table.shape[1])), self_test=True)
    runs = [
        RunRecord(entry.name, seed, "finished", float(score))
        for entry, row in zip(entries, table, strict=True)
        for seed, score in enumerate(row)
    ]
    return summarise(plan, runs, [], [])


def page() -> str:
    """The page's text on one line."""
    return re.sub(r"\s+", " ", (ROOT / "docs" / "howto" / "statistics.md").read_text(encoding="utf-8"))


def chance(table: np.ndarray) -> np.ndarray:
    """Rates and coverages of the bank's own scores, dealt to its rows at random within each seed."""
    draw = np.random.Generator(np.random.PCG64(0))
    return np.array([false_verdicts(draw.permuted(table, axis=0), size=SIZE) for _ in range(100)])


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_states_what_each_bank_shows(number: int) -> None:
    table = banks()[number]
    assert table.shape == SHAPES[number]
    rate, coverage = false_verdicts(table, size=SIZE)
    mean, low, high = paired_t((table[0] - table[1:].mean(axis=0)).tolist())  # type: ignore[misc]
    offset = f"{mean:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")
    assert f"| {table.size} | {rate:.1%} | {coverage:.1%} | {offset} |" in page()


@pytest.mark.parametrize(("number", "passes"), [(0, False), (1, True)])
def test_one_bank_passes_and_one_does_not(number: int, passes: bool) -> None:
    """Also if the bank's own scores are dealt anew, instead of normal noise, to say what chance does."""
    table = banks()[number]
    rate, coverage = false_verdicts(table, size=SIZE)
    dealt = chance(table)
    assert passes == bool(rate <= np.quantile(dealt[:, 0], 0.95) and coverage >= np.quantile(dealt[:, 1], 0.05))
    found = self_test(results_of(table), size=SIZE)
    assert (found.passed, found.false_verdicts, found.coverage) == (passes, rate, coverage)
    assert len(found.claims) == (0 if passes else 1)
    assert f"up to {100 * found.allowed:.1f} % and down to" in page()
    assert f"down to {100 * found.coverage_allowed:.1f} %" in page()


def test_the_page_states_what_studies_without_a_common_run_show() -> None:
    counts = [disjoint_verdicts(table) for table in banks()]
    wrong, studies = (sum(column) for column in zip(*counts, strict=True))
    low, high = rate_interval(wrong, studies)
    assert low < 0.05 < high
    assert f"together give {studies}. Of these, {wrong} of the {studies} is wrong" in page()
    assert f"{wrong / studies:.1%} (95 % interval {low:.1%} to {high:.1%})" in page()


def test_the_baseline_of_further_seeds_is_no_better_than_the_copies() -> None:
    content = json.loads(BANK.read_text(encoding="utf-8"))
    further, first = content["further"], banks()[0]
    assert not set(further["seeds"]) & set(content["banks"][0]["seeds"])
    said = f"on {len(further['scores'])} further seeds that follow the first bank's has a mean of"
    means = f"{np.mean(further['scores']):.2f}, after {first[0].mean():.2f} in the bank, whose copies have"
    assert f"{said} {means} {first[1:].mean():.2f}." in page()


def test_the_banks_share_no_run_and_would_show_an_effect() -> None:
    first, second = (
        {(bank["arms"][0], seed) for seed in bank["seeds"]} for bank in json.loads(BANK.read_text())["banks"]
    )
    assert not first & second
    table = banks()[1]
    table[3] += 4 * table.std()
    rate, _ = false_verdicts(table, size=SIZE)
    assert rate > 0.5
