"""The figures of `gonio compare` as a program: their computation on known times, and a small study from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import history
from benchmarks.results import Ratio, path_of
from benchmarks.study import FIGURES, PERCENT, Times, entry, figures, main, seen, table

START, IDLE, OTHERS, END, ABOVE = (
    "from the command to the first run, without imports",
    "idle cores, from the first run to the last",
    "cores with other work than runs meanwhile",
    "results and page",
    "whole command above its runs on all cores",
)
TIMES = Times(first_run=3.0, last_run=13.0, costs=15.0, end=16.0, busy=20.0)
BUSY = {2.5: 100.0, 3.0: 101.0, 12.9: 121.0, 13.1: 121.5}
LINES = [(2.0, "4 runs\n"), (8.0, "2 of 4 runs, about 5 s left\n"), (13.0, "4 of 4 runs\n"), (13.0, "measuring\n")]


def test_two_cores_that_always_run_are_not_idle() -> None:
    found = figures(TIMES, [5.0] * 4, workers=2, imports=2.0)
    assert list(found) == list(FIGURES)
    assert (found[START], found[IDLE], found[END]) == (1.0, 0.0, 1.0)
    assert found[ABOVE] == pytest.approx(60.0)


def test_runs_on_one_of_two_cores_leave_the_other_idle_or_to_other_work() -> None:
    found = figures(TIMES, [2.5] * 4, workers=2, imports=2.0)
    assert (found[IDLE], found[OTHERS]) == (0.0, 50.0)
    found = figures(replace(TIMES, busy=10.0), [2.5] * 4, workers=2, imports=2.0)
    assert (found[IDLE], found[OTHERS]) == (50.0, 0.0)


def test_the_last_worker_measures_the_costs() -> None:
    runs = [(3.0, 8.0), (3.1, 8.0), (8.1, 13.0), (8.2, 12.9)]
    assert seen([*runs[::-1], (13.1, 15.0)], LINES, BUSY, runs=4, end=16.0) == TIMES
    assert seen(runs, LINES, BUSY, runs=4, end=16.0).costs == 13.0  # a script's study has none


def test_a_command_without_its_last_run_has_no_times() -> None:
    with pytest.raises(ValueError, match="did not write '4 of 4 runs'"):
        seen([(3.0, 8.0)], LINES[:2], BUSY, runs=4, end=9.0)


def test_percentages_enter_the_history_as_ratios() -> None:
    rounds = [figures(TIMES, [seconds] * 4, workers=2, imports=2.0) for seconds in (5.0, 4.9, 4.8)]
    found = {"machine": {"cores": 2}, "versions": {"gonio": "1", "torch": "2"}, "rounds": rounds}
    made = entry(found, commit="abc", day="2026-01-01")
    assert made.ratios[OTHERS]["gonio"].median == pytest.approx(1.02)
    assert made.ratios[END]["gonio"] == Ratio(1.0, 1.0, 1.0)
    assert made.conditions["versions"] == {"torch": "2"}
    slower = [{**one, END: 2.0} for one in rounds]
    later = entry({**found, "rounds": slower}, commit="def", day="2026-01-02")
    assert [one.row for one in history.grown([made, later])] == [f"{END} · gonio"]


@pytest.mark.slow
def test_a_small_study_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.study.path_of", lambda name, *, quick: path_of(name, quick=quick, folder=tmp_path))
    assert main(["--quick"]) == 0
    found = json.loads((tmp_path / "local" / "study.json").read_text(encoding="utf-8"))
    values = found["rounds"][0]
    assert min(value for name, value in values.items() if name not in (START, IDLE, OTHERS)) > 0
    assert values[IDLE] < 100
    shown = table(found)
    assert all(name in shown and goal in shown for name, (_, goal) in FIGURES.items())
    assert shown.count(" %") >= 2 * [unit for unit, _ in FIGURES.values()].count(PERCENT)
