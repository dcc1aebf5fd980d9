"""The folder of a study: what it keeps, and what it refuses."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from compare.plans import plan_of
from gonio.compare.judging.results import RunRecord
from gonio.compare.running.study import Study, locked, transaction
from gonio.errors import PlanChangedError, StudyError, StudyLockedError
from gonio.report.words import seen


def finished(name: str, seed: int, score: float = 90.0) -> RunRecord:
    return RunRecord(name, seed, "finished", score, 3, {"val_score": [1.0, None]}, {"layers": {}}, "p", None, 1.5)


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    study = Study.create(tmp_path / "a" / "b", plan_of(seeds=2))
    record = finished("r0", 1)
    study.add(study.plan.recipes[1], record, {"torch": "2"})
    again = Study.open(tmp_path / "a" / "b")
    assert again.runs() == (record,)
    assert again.runs()[0].seconds == 1.5
    assert [(entry.name, seed) for entry, seed in again.missing()] == [("baseline", 0), ("r0", 0), ("baseline", 1)]


def test_failed_runs_are_kept_and_done_again(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(seeds=1))
    entry = study.plan.recipes[1]
    study.add(entry, RunRecord("r0", 0, "failed", error="out of memory"), {})
    assert study.results().effects[0].failed == 1
    assert (entry, 0) in study.missing()
    study.add(entry, finished("r0", 0), {})
    assert (entry, 0) not in study.missing()
    assert study.results().effects[0].failed == 0


def test_diverged_runs_are_results(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(seeds=1))
    study.add(study.plan.recipes[1], RunRecord("r0", 0, "diverged", error="loss"), {})
    assert [entry.name for entry, _ in study.missing()] == ["baseline"]


def test_costs_are_measured_once_per_recipe(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(recipes=2))
    assert [entry.name for entry in study.without_costs()] == ["r0", "r1"]
    study.add_costs([("r0", "step_time", 0, 2.0)])
    assert [entry.name for entry in study.without_costs()] == ["r1"]
    ratio = study.results().effects[0].step_time
    assert ratio is not None
    assert (ratio.median, ratio.n) == (2.0, 1)


def test_the_same_plan_resumes_and_more_seeds_extend(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(seeds=2))
    study.add(study.plan.recipes[0], finished("baseline", 0), {})
    assert Study.create(tmp_path, plan_of(seeds=2)).plan == study.plan
    more = Study.create(tmp_path, plan_of(seeds=3))
    assert len(more.missing()) == 5
    assert "seeds 2 were added" in more.results().notes[-1]
    assert Study.open(tmp_path).plan == more.plan


def test_another_plan_is_refused_and_leaves_the_study_as_it_was(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(PlanChangedError, match=r"the study '.*' was asked for; task is digits in the study and x"):
        Study.create(tmp_path, plan_of(task="x"))
    assert (tmp_path / "plan.json").read_bytes() == before


def test_a_second_process_is_refused_and_told_who_holds_the_study(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StudyLockedError, match=r"process \d+ is running it. Wait until it ends"):
        Study.create(tmp_path, plan_of())
    Study.create(tmp_path, plan_of())


def test_reading_needs_no_lock(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    with locked(tmp_path):
        assert Study.open(tmp_path).runs() == ()


def test_absent_study(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"there is no plan.json in it. Give the folder of a study"):
        Study.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json cannot be read: Expecting property name"),
        ("{}", "plan.json cannot be read: 'recipes'"),
        ("[]", "plan.json cannot be read"),
        ('"\\ud800"', "plan.json cannot be read"),
    ],
)
def test_unreadable_plan(tmp_path: Path, text: str, message: str) -> None:
    Study.create(tmp_path, plan_of())
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(StudyError, match=message):
        Study.open(tmp_path)


def test_edited_plan(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    path = tmp_path / "plan.json"
    path.write_text(path.read_text().replace('"sesoi": 1.0', '"sesoi": 0.1'))
    with pytest.raises(StudyError, match=r"does not have the hash that it states\. It was edited"):
        Study.open(tmp_path)


def test_unreadable_database(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    (tmp_path / "study.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StudyError, match=r"study.db cannot be used: file is not a database"):
        Study.open(tmp_path)


def test_database_of_a_newer_version(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    with closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StudyError, match=r"format 99, and this gonio reads up to 2. Use a newer gonio"):
        Study.open(tmp_path)


def test_commits_are_durable(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    with transaction(tmp_path) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_what_cannot_be_committed_is_rolled_back(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of())
    with pytest.raises(StudyError, match=r"cannot be used: NOT NULL constraint failed: costs\.ratio"):
        study.add_costs([("r0", "step_time", 0, 2.0), ("r0", "step_time", 1, None)])  # type: ignore[list-item]
    assert len(study.without_costs()) == 1


def test_a_study_can_be_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study.create(tmp_path, plan_of(seeds=1))
    study.add(study.plan.recipes[0], finished("baseline", 0), {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(Study.open(tmp_path).runs()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_mixed_versions_are_noted(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(seeds=1))
    study.add(study.plan.recipes[0], finished("baseline", 0), {"torch": "1"})
    study.add(study.plan.recipes[1], finished("r0", 0), {"torch": "2"})
    assert study.results().notes == ("The runs were made with different versions of torch.",)


def test_a_look_counts_once_for_each_number_of_runs(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(seeds=2))
    assert (study.results().looks, study.looks()) == ((), ())  # there was nothing to see
    first, second = study.plan.recipes
    study.add(first, finished("baseline", 0), {})
    study.add(second, RunRecord("r0", 0, "failed", error="no memory"), {})
    assert [study.results().looks for _ in range(3)] == [(1,)] * 3  # what failed shows nothing
    study.add(second, finished("r0", 0), {})
    study.runs()
    assert study.looks() == (1,)  # who sees no results has not looked
    shown = Study.open(tmp_path).results()
    assert shown.looks == Study.open(tmp_path).looks() == (1, 2)
    assert "The results were looked at 2 times, when there were 1 and 2 runs" in shown.notes[-1]
    assert seen(shown) == "looked at 2 times"
