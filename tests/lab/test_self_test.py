"""The self-test: error rates of verdicts, on simulated and on stored runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gonio.errors import InvalidArgumentError
from gonio.lab import Results, RunRecord, StudyPlan, make_plan, make_script_plan, run, self_test, self_test_plan
from gonio.lab.judging.results import summarise
from gonio.lab.judging.self_test import disjoint_verdicts, false_verdicts, rate_interval
from gonio.lab.judging.statistics import holm, paired_t, sign_flip
from gonio.lab.plan import RecipeEntry
from lab.plans import OWN, TINY, normal, plan_of, recorded
from style.source import ROOT


def results_of(table: np.ndarray, *, size: int = 8) -> Results:
    """A self-test's results with these scores, the baseline's first."""
    entries = tuple(RecipeEntry(f"again-{i}" if i else "baseline", {}, f"{i}") for i in range(len(table)))
    plan = replace(plan_of(), recipes=entries, seeds=tuple(range(4 * size)), self_test=True)
    runs = [
        RunRecord(entry.name, seed, "finished", float(score))
        for entry, scores in zip(plan.recipes, table, strict=True)
        for seed, score in enumerate(scores)
    ]
    return summarise(plan, runs, [], [])


def test_shares_are_those_of_the_single_functions() -> None:
    table = normal(4, 8) + np.array([[0.0], [3.0], [0.5], [0.0]])
    rows = [(ours - table[0]).tolist() for ours in table[1:]]
    adjusted = holm([sign_flip(row) for row in rows])
    excludes = [not low <= 0 <= high for _, low, high in map(paired_t, rows)]  # type: ignore[misc]
    wrong = any(p < 0.05 and out for p, out in zip(adjusted, excludes, strict=True))
    assert wrong
    assert false_verdicts(table, size=8) == (1.0, pytest.approx(1 - np.mean(excludes)))


def test_studies_that_share_no_run() -> None:
    """Pairs (0, 1) and (2, 3), seeds 0-5 and 6-11; what is left over has no part."""
    table = normal(5, 14)
    assert disjoint_verdicts(table) == (0, 4)
    table[3, 6:12] += 50
    assert disjoint_verdicts(table) == (1, 4)
    table[4] += 50  # the recipe that is left over
    table[:, 12:] += 50 * normal(5, 2)  # the seeds that are
    assert disjoint_verdicts(table) == (1, 4)
    assert disjoint_verdicts(normal(5, 5)) == (0, 0)


def test_disjoint_studies_are_wrong_as_often_as_the_test_says() -> None:
    """Of continuous scores and six seeds: 2 of 64 sign vectors, whatever the noise."""
    wrong, studies = disjoint_verdicts(normal(400, 60, seed=5))
    assert studies == 2000
    assert abs(wrong / studies - 2 / 64) < 3 * (2 / 64 * 62 / 64 / studies) ** 0.5


@pytest.mark.parametrize(("hits", "trials"), [(0, 12), (3, 40), (7, 7)])
def test_the_interval_of_a_rate_is_exact(hits: int, trials: int) -> None:
    """At either end the outcome, or one further out, has a probability of 2.5 %."""
    low, high = rate_interval(hits, trials)
    assert low == 0 if hits == 0 else stats.binom.sf(hits - 1, trials, low) == pytest.approx(0.025, rel=1e-6)
    assert high == 1 if hits == trials else stats.binom.cdf(hits, trials, high) == pytest.approx(0.025, rel=1e-6)
    assert rate_interval(0, 0) == (0, 1)


def test_copies_that_are_alike_pass() -> None:
    found = self_test(results_of(normal(5, 32)))
    assert found.passed
    assert (found.copies, found.seeds, found.size, found.claims) == (4, 32, 8, ())
    assert (found.disjoint_wrong, found.disjoint) == (0, 10)
    assert "0 of 10 are wrong, which fits a rate of 0.0% to 30.8%" in str(found)  # 1 − 0.025^(1/10)
    assert found.false_verdicts <= 0.05
    assert 0.05 < found.allowed < 0.15
    assert 0.85 < found.coverage_allowed < 0.95
    assert "promised: at most 5%" in str(found)
    assert str(found).endswith("passed")
    assert found.to_dict()["passed"]


def test_copies_that_differ_do_not_pass() -> None:
    shifted = normal(5, 32) + np.array([[0.0], [1.5], [0.0], [0.0], [0.0]])
    found = self_test(results_of(shifted))
    assert not found.passed
    assert found.false_verdicts > 0.5
    assert found.claims == ("again-1",)
    assert "NOT PASSED" in str(found)


def test_seeds_without_all_runs_are_left_out() -> None:
    results = results_of(normal(5, 32)[:, :20])
    assert self_test(results, size=8).seeds == 20
    with pytest.raises(InvalidArgumentError, match="a self-test of studies of 24 seeds; found 20 with all of"):
        self_test(results, size=24)


def test_a_study_of_recipes_is_no_self_test() -> None:
    with pytest.raises(InvalidArgumentError, match=r"a study of copies of the baseline; found one of recipes. Run gon"):
        self_test(summarise(plan_of(), [], [], []))


def test_too_few_seeds() -> None:
    with pytest.raises(InvalidArgumentError, match="needs studies of at least 3 seeds; found 2"):
        self_test_plan(plan_of(), size=2)


def test_the_seeds_go_on_from_the_plans_first() -> None:
    assert self_test_plan(plan_of(seeds=3), size=3).seeds == tuple(range(12))
    moved = replace(plan_of(), seeds=(50, 51))
    assert self_test_plan(moved, size=3).seeds == tuple(range(50, 62))
    with pytest.raises(InvalidArgumentError, match="those of tuning and of attacks; found 1000003"):
        self_test_plan(replace(plan_of(), seeds=(999_999,)), size=3)


def test_the_plan_draws_its_own_numbers_and_older_plans_keep_their_hash() -> None:
    plan = plan_of(recipes=0)
    test = self_test_plan(plan, size=3)
    assert test.hash != plan.hash
    assert StudyPlan.from_dict(test.to_dict()) == test
    drawn = {test.seed_of(entry, seed) for entry, seed in test.grid}
    assert len(drawn) == len(test.grid)
    assert [plan.seed_of(entry, seed) for entry, seed in plan.grid] == list(plan.seeds)
    assert "self_test" in plan.to_dict()
    without = {key: value for key, value in plan.to_dict().items() if key != "self_test"}
    assert StudyPlan.from_dict(without).hash == plan.hash


def test_a_copy_differs_from_the_baseline_by_its_seed_alone() -> None:
    """Same seed, same bits; and a copy's run is the baseline's at the seed that the copy draws from."""
    alike = make_plan([], task=f"{TINY}:task", seeds=1)
    test = self_test_plan(alike, size=3)
    unmoved = replace(test, self_test=False)
    base, copy = test.recipes[:2]

    def outcome(plan: StudyPlan, entry: RecipeEntry, seed: int) -> tuple[object, ...]:
        record = recorded(plan, entry, seed)
        return record.status, record.score, record.best_epoch, record.curve, record.geometry

    first = outcome(unmoved, base, 0)
    assert first[0] == "finished"
    assert outcome(unmoved, copy, 0) == first
    assert outcome(test, base, 0) == first
    moved = outcome(test, copy, 0)
    assert moved != first
    assert moved == outcome(unmoved, base, test.seed_of(copy, 0))


def test_a_self_test_from_end_to_end(tmp_path: Path) -> None:
    plan = self_test_plan(make_script_plan([], script=f"{OWN}:score_of_seed"), size=3)
    study = run(plan, tmp_path, jobs=2)
    scores = [record.score for record in study.runs()]
    assert len(set(scores)) == len(scores) == 60
    assert self_test(study.results()).size == 3
    assert study.without_costs() == []


BANK = ROOT / "benchmarks" / "results" / "self_test.json"
BANK_SIZE = 10  # seeds of a study
SHAPES = [(9, 24), (5, 42)]


def banks() -> list[np.ndarray]:
    """Scores of the baseline and of its copies, one row each."""
    return [np.array(bank["scores"]) for bank in json.loads(BANK.read_text(encoding="utf-8"))["banks"]]


def page() -> str:
    """The page's text on one line."""
    return re.sub(r"\s+", " ", (ROOT / "docs" / "howto" / "statistics.md").read_text(encoding="utf-8"))


def chance(table: np.ndarray) -> np.ndarray:
    """Rates and coverages of the bank's own scores, dealt to its rows at random within each seed."""
    draw = np.random.Generator(np.random.PCG64(0))
    return np.array([false_verdicts(draw.permuted(table, axis=0), size=BANK_SIZE) for _ in range(100)])


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_states_what_each_bank_shows(number: int) -> None:
    table = banks()[number]
    assert table.shape == SHAPES[number]
    rate, coverage = false_verdicts(table, size=BANK_SIZE)
    mean, low, high = paired_t((table[0] - table[1:].mean(axis=0)).tolist())  # type: ignore[misc]
    offset = f"{mean:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")
    assert f"| {table.size} | {rate:.1%} | {coverage:.1%} | {offset} |" in page()


@pytest.mark.parametrize(("number", "passes"), [(0, False), (1, True)])
def test_one_bank_passes_and_one_does_not(number: int, passes: bool) -> None:
    """Also if the bank's own scores are dealt anew, instead of normal noise, to say what chance does."""
    table = banks()[number]
    rate, coverage = false_verdicts(table, size=BANK_SIZE)
    dealt = chance(table)
    assert passes == bool(rate <= np.quantile(dealt[:, 0], 0.95) and coverage >= np.quantile(dealt[:, 1], 0.05))
    found = self_test(results_of(table, size=-(-table.shape[1] // 4)), size=BANK_SIZE)
    assert (found.passed, found.false_verdicts, found.coverage) == (passes, rate, coverage)
    assert found.claims == ()  # what differs by chance differs by less than the smallest effect of interest
    assert f"up to {100 * found.allowed:.1f} % and down to" in page()
    assert f"down to {100 * found.coverage_allowed:.1f} %" in page()
