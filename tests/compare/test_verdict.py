"""The five verdicts: which one when, and what the reason says."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from compare.plans import plan_of
from gonio.compare import Results, RunRecord
from gonio.compare.judging.summary import summarise

BASE = [90.0, 91.0, 92.0, 93.0, 94.0, 95.0, 96.0, 97.0]


def runs_of(name: str, scores: list[float | str | None]) -> list[RunRecord]:
    """One run per seed; a text instead of a score is the status, None is no row."""
    records = []
    for seed, score in enumerate(scores):
        if isinstance(score, str):
            records.append(RunRecord(name, seed, score, error="why"))
        elif score is not None:
            records.append(RunRecord(name, seed, "finished", score))
    return records


def compare(differences: list[float | str | None], **options: object) -> Results:
    seeds = len(differences)
    plan = plan_of(seeds=seeds, **options)
    ours = [b + d if isinstance(d, float) else d for b, d in zip(BASE, differences, strict=False)]
    return summarise(plan, runs_of("baseline", BASE[:seeds]) + runs_of("r0", ours), [], [])


@pytest.mark.parametrize(
    ("differences", "verdict", "reason"),
    [
        ([1.5, 2.5, 2.0, 1.0, 3.0, 2.0, 1.5, 2.5], "helps", r"Better in 8 of 8 seeds, by \+2.00 on average"),
        ([-1.5, -2.5, -2.0, -1.0, -3.0, -2.0, -1.5, -2.5], "hurts", "Worse in 8 of 8 seeds, by -2.00"),
        ([0.2, 0.3, 0.2, 0.1, 0.3, 0.2, 0.1, 0.2], "helps", "real, but smaller than 1 point, the smallest"),
        ([0.5, -0.5, 0.4, -0.4, 0.3, -0.3, 0.2, -0.2], "no useful effect", "lies within ±1 point, the smal"),
        ([0.0] * 8, "no useful effect", r"95 % interval \+0.00 to \+0.00 lies within"),
        ([1.5, 0.3, 1.2, -0.2, 1.3, 0.2, 0.6, -0.1], "no evidence", "of 1 point would probably have been seen"),
        ([5.0, -4.0, 3.0, -2.0, 4.0, -5.0, 1.0, 2.0], "underpowered", "Only effects from 4.* points on would"),
        ([9.0, 9.5, 8.0, 8.5, 9.0], "underpowered", "With 5 pairs and 1 recipe, the least possible p .* 0.062"),
        ([2.0], "underpowered", "There is one pair of runs"),
        ([None, None], "underpowered", "There is no pair of runs"),
        ([0.25, 0.25], "underpowered", "There are two pairs of runs"),
    ],
)
def test_verdicts(differences: list[float | str | None], verdict: str, reason: str) -> None:
    effect = compare(differences).effects[0]
    assert effect.verdict == verdict
    assert re.search(reason, effect.reason), effect.reason


def test_a_loss_that_falls_helps() -> None:
    effect = compare([-0.5] * 4 + [-0.4] * 4, direction="min", worst=None, unit="").effects[0]
    assert (effect.verdict, effect.improvement) == ("helps", 1.0)
    assert effect.mean == pytest.approx(-0.45)


def test_more_recipes_make_every_one_of_them_harder() -> None:
    plan = plan_of(recipes=8)
    runs = runs_of("baseline", [*BASE]) + [r for i in range(8) for r in runs_of(f"r{i}", [b + 5 for b in BASE])]
    results = summarise(plan, runs, [], [])
    assert {effect.verdict for effect in results.effects} == {"underpowered"}
    assert "With 8 pairs and 8 recipes" in results.effects[0].reason
    assert results.effects[0].reason.endswith("9 seeds can.")


def test_diverged_counts_as_worst_and_is_stated() -> None:
    results = compare([0.1, "diverged", 0.1, 0.2, 0.1, 0.2, 0.1, 0.1])
    effect = results.effects[0]
    assert (effect.n, effect.diverged, effect.failed) == (8, 1, 0)
    assert effect.differences[1] == -BASE[1]
    assert any("Diverged: 1 run, with the score of the worst case: 0 %." in note for note in results.notes)
    assert results.failed == 0


def test_diverged_without_a_worst_value_counts_as_the_worst_finished_score() -> None:
    results = compare([0.1, "diverged", 0.1, 0.2, 0.1, 0.2, 0.1, 0.1], worst=None, direction="min")
    assert results.effects[0].differences[1] == pytest.approx(max(BASE) + 0.1 - BASE[1])
    assert any("the worst case: the worst finished run" in note for note in results.notes)


def test_diverged_is_never_better_than_a_run_that_finished() -> None:
    # bits per byte: 8 is what knowing nothing costs, but a finished run may be worse still
    shifts = [0.1, "diverged", 0.1, 0.2, 0.1, 0.2, 0.1, 0.1]
    results = compare(shifts, worst=8.0, direction="min")
    assert results.effects[0].differences[1] == pytest.approx(max(BASE) + 0.1 - BASE[1])
    assert results.effects[0].verdict != "helps"


def test_failed_runs_leave_their_pair_out_and_are_stated() -> None:
    results = compare([0.1, "failed", 0.1, None, 0.1, 0.2, 0.1, 0.1])
    effect = results.effects[0]
    assert (effect.n, effect.failed, effect.seeds) == (6, 1, (0, 2, 4, 5, 6, 7))
    assert (results.missing, results.failed) == (1, 1)
    assert results.notes[0] == "1 run of 16 to do; the verdicts are provisional."
    assert results.notes[1] == "Failed: 1 run, without a score; their pairs are left out."


def test_second_looks_and_mixed_versions_are_stated() -> None:
    plan = plan_of(history=({"seeds": [6, 7], "recipes": [], "finished": 12},))
    results = summarise(plan, [], [], [{"torch": "2.12"}, {"torch": "2.13"}])
    assert any("After 12 runs had been done, seeds 6, 7 were added" in note for note in results.notes)
    assert any("different versions of torch" in note for note in results.notes)


def test_costs_become_a_median_with_quartiles() -> None:
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4]
    costs = [("r0", "step_time", i, ratio) for i, ratio in enumerate(ratios)] + [("r0", "memory", 0, 1.5)]
    effect = summarise(plan_of(), [], costs, []).effects[0]
    assert effect.step_time is not None
    assert (effect.step_time.low, effect.step_time.median, effect.step_time.high) == (1.1, 1.2, 1.3)
    assert effect.memory is not None
    assert (effect.memory.median, effect.memory.n) == (1.5, 1)


def test_a_study_without_runs_has_results() -> None:
    results = summarise(plan_of(), [], [], [])
    assert (results.baseline_mean, results.baseline_sd, results.missing) == (None, None, 16)
    assert results.effects[0].p is None


def test_results_can_be_written_as_json() -> None:
    results = compare([0.1, "diverged", 0.3])
    data = json.loads(json.dumps(results.to_dict()))
    assert data["plan"]["hash"] == results.plan.hash
    assert data["effects"][0]["differences"] == list(results.effects[0].differences)
    assert data["runs"][0]["score"] == BASE[0]


def test_baseline_mean_and_spread() -> None:
    results = compare([0.1] * 8)
    assert results.baseline_mean == np.mean(BASE)
    assert results.baseline_sd == pytest.approx(np.std(BASE, ddof=1))
