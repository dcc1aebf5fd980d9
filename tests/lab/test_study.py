"""The study on disk: rows, refusals, older formats."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gonio import errors
from gonio.errors import PlanChangedError, StudyError
from gonio.lab import Run, Study, make_script_plan, run, self_test_plan
from gonio.lab.judging.results import Ratio
from gonio.lab.record import RunRecord
from gonio.lab.running.study import locked, transaction
from gonio.lab.running.training import guarded
from gonio.lab.showing.tables import seen
from lab.own_training import noisy
from lab.plans import OWN, plan_of


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
    study.add(entry, RunRecord("r0", 0, "diverged", error="loss"), {})  # a result, and no accident
    assert (entry, 0) not in study.missing()


class InvalidArgumentError(Exception):
    """An error of a user's script with the name of one of gonio's."""


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (InvalidArgumentError("no such setting"), False),
        (errors.InvalidArgumentError("a setting", "no such setting", "Choose one."), True),
        (ValueError("no such setting"), False),
    ],
)
def test_only_what_gonio_refuses_counts_as_refused(error: Exception, refused: bool) -> None:
    def fails() -> RunRecord:
        raise error

    found = guarded(RunRecord("r0", 0, "failed"), fails)["record"]
    assert RunRecord(**found).refused == refused
    assert "no such setting" in found["error"]


def test_costs_are_measured_once_per_recipe(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(recipes=2))
    assert [entry.name for entry in study.without_costs()] == ["r0", "r1"]
    study.add_costs([("r0", "step_time", 0, 2.0)])
    assert [entry.name for entry in study.without_costs()] == ["r1"]
    ratio = study.results().effects[0].step_time
    assert (ratio.median, ratio.n) == (2.0, 1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "study", "Not a directory")):
        with pytest.raises(StudyError, match=rf"the folder cannot be made \({why}\). Name another folder \(-o\)."):
            Study.create(path, plan_of(seeds=1))
        with pytest.raises(StudyError, match=rf"the folder cannot be made \({why}\)"):
            run(plan_of(seeds=1), path)


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
    with pytest.raises(PlanChangedError, match=r"study '.*': cannot be used; task is digits in the study and x"):
        Study.create(tmp_path, plan_of(task="x"))
    assert (tmp_path / "plan.json").read_bytes() == before


def test_reading_needs_no_lock(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    with locked(tmp_path):
        assert Study.open(tmp_path).runs() == ()


def newer(study: Path) -> None:
    with closing(sqlite3.connect(study / "study.db")) as database:
        database.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda study: shutil.rmtree(study), "there is no plan.json in it. Give the folder of a study"),
        (lambda study: (study / "plan.json").write_text("{"), "plan.json cannot be read: Expecting property name"),
        (lambda study: (study / "plan.json").write_text("{}"), "plan.json cannot be read: task: Field required"),
        (lambda study: (study / "plan.json").write_text("[]"), "plan.json cannot be read"),
        (lambda study: (study / "plan.json").write_text('"\\ud800"'), "plan.json cannot be read"),
        (
            lambda study: (study / "plan.json").write_text(
                (study / "plan.json").read_text().replace('"sesoi": 1.0', '"sesoi": 0.1')
            ),
            r"does not have the hash that it states\. It was edited",
        ),
        (
            lambda study: (study / "study.db").write_bytes(b"no database at all" * 100),
            "study.db cannot be used: file is not a database",
        ),
        (newer, "format 99, and this gonio reads up to 3. Use a newer gonio"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    Study.create(tmp_path / "study", plan_of())
    damage(tmp_path / "study")
    with pytest.raises(StudyError, match=message):
        Study.open(tmp_path / "study")


def test_commits_are_durable(tmp_path: Path) -> None:
    Study.create(tmp_path, plan_of())
    with transaction(tmp_path) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_what_cannot_be_committed_is_rolled_back(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of())
    with pytest.raises(StudyError, match=r"cannot be used: NOT NULL constraint failed: costs\.ratio"):
        study.add_costs([("r0", "step_time", 0, 2.0), ("r0", "step_time", 1, float("nan"))])  # SQLite: NULL
    assert len(study.without_costs()) == 1


def test_a_study_can_be_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study.create(tmp_path, plan_of(seeds=1))
    study.add(study.plan.recipes[0], finished("baseline", 0), {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(Study.open(tmp_path).runs()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == files


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


def test_a_look_that_was_altered_is_named_and_counted_again(tmp_path: Path) -> None:
    """Also in a study whose looks were written before they had checksums."""
    study = Study.create(tmp_path, plan_of(seeds=2))
    with transaction(tmp_path) as database:
        database.execute("DROP TABLE looks")
        database.execute("CREATE TABLE looks (runs INTEGER PRIMARY KEY)")
        database.execute("INSERT INTO looks VALUES (1)")
    assert (Study.open(tmp_path).looks(), study.damaged()) == ((1,), [])
    study.add(study.plan.recipes[0], finished("baseline", 0), {})
    study.add(study.plan.recipes[1], finished("r0", 0), {})
    assert study.results().looks == (1, 2)
    with transaction(tmp_path) as database:
        assert database.execute("SELECT COUNT(checksum) FROM looks").fetchone() == (2,)
        database.execute("UPDATE looks SET runs = 3 WHERE runs = 1")
    assert (study.looks(), study.damaged()) == ((2,), ["looks: 3"])
    assert Study.create(tmp_path, plan_of(seeds=2)).discarded == ("looks: 3",)
    assert (study.looks(), study.damaged()) == ((2,), [])


# The two tables that format 1 had, as its first release made them.
TABLES = """
CREATE TABLE runs (
    hash TEXT NOT NULL, seed INTEGER NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL,
    seconds REAL, versions TEXT NOT NULL, PRIMARY KEY (hash, seed)
);
CREATE TABLE costs (
    hash TEXT NOT NULL, kind TEXT NOT NULL, block INTEGER NOT NULL, ratio REAL NOT NULL,
    PRIMARY KEY (hash, kind, block)
);
PRAGMA user_version = 1;
"""


# The fields that a plan and a record had then.
PLAN = (
    "task", "model", "recipes", "seeds", "training", "metric", "direction", "unit", "splits", "data", "sesoi", "worst",
    "code",
)  # fmt: skip


RECORD = ("recipe", "seed", "status", "score", "best_epoch", "curve", "geometry", "plan", "error")


def written_by_format_1(folder: Path, *, seeds: int, done: int) -> dict[str, Any]:
    """A study as format 1 wrote it, by nothing of gonio's; `done` of its seeds have runs, the last of them failed."""
    now = make_script_plan(["scale-shift"], script=f"{OWN}:noisy", seeds=seeds).to_dict()
    content = {key: now[key] for key in PLAN}
    for entry in content["recipes"]:
        del entry["setting"]  # format 1 had none
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    past = {**content, "notes": ["a note"], "versions": {"torch": "2.6"}, "command": "gonio compare", "history": []}
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({**past, "hash": digest}))
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        database.executescript(TABLES)
        for entry in now["recipes"]:
            for seed in range(done):
                row = row_of(entry["name"], seed, failed=seed == done - 1, folder=folder)
                database.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", (entry["hash"], seed, *row))
        database.execute("INSERT INTO costs VALUES (?, 'step_time', 0, 1.5)", (now["recipes"][1]["hash"],))
    return {**past, "hash": digest}


def row_of(recipe: str, seed: int, *, failed: bool, folder: Path) -> tuple[str, str, float, str]:
    """Status, record, seconds and versions of one run."""
    score = None if failed else noisy(Run({"name": recipe}, seed=seed, folder=folder))
    status, error = ("failed", "OSError: no space") if failed else ("finished", None)
    curve: dict[str, list[float]] = {} if failed else {"val_score": [1.0, 2.0]}
    values = (recipe, seed, status, score, None, curve, {}, "", error)
    return status, json.dumps(dict(zip(RECORD, values, strict=True))), 2.5, json.dumps({"torch": "2.6"})


def database_of(folder: Path) -> tuple[int, set[str], list[Any]]:
    """Format, tables and rows of the runs."""
    with closing(sqlite3.connect(folder / "study.db")) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return version, names, database.execute("SELECT * FROM runs ORDER BY hash, seed").fetchall()


def test_a_study_of_format_1_can_be_read_and_stays_what_it_is(tmp_path: Path) -> None:
    past = written_by_format_1(tmp_path / "study", seeds=4, done=3)
    study = Study.open(tmp_path / "study")
    assert (study.plan.hash, study.plan.tuning, study.plan.threat) == (past["hash"], None, None)
    results = study.results()
    assert [(record.status, record.seconds) for record in results.runs[:3]] == [("finished", 2.5)] * 2 + [
        ("failed", 2.5)
    ]
    assert results.effects[0].n == 2
    assert results.effects[0].step_time == Ratio(1.5, 1.5, 1.5, 1)
    assert (results.tuning, results.robustness, results.missing) == ((), (), 2)
    version, names, _ = database_of(tmp_path / "study")
    assert (version, names - {"looks"}) == (1, {"runs", "costs"})


def test_a_study_of_format_1_is_continued_in_todays(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    past = written_by_format_1(folder, seeds=4, done=3)
    before = {row[:2]: row for row in database_of(folder)[2]}
    study = run(Study.open(folder).plan, folder, jobs=1)
    version, names, rows = database_of(folder)
    assert version == 3
    assert {"runs", "costs", "trials", "choices", "artifacts"} <= names
    kept = {row[:2]: row[:-1] for row in rows}  # without the checksum
    done = [key for key, row in before.items() if row[2] == "finished"]
    assert len(done) == 4
    assert {key: kept[key] for key in done} == {key: before[key] for key in done}  # bit for bit
    assert [record.status for record in study.runs()] == ["finished"] * 8
    assert study.runs()[3].score == noisy(Run({"name": "baseline"}, seed=3, folder=tmp_path))
    now = json.loads((folder / "plan.json").read_text())
    assert now["hash"] == past["hash"]
    assert (now["versions"], now["self_test"], now["tuning"], now["threat"]) == ({"torch": "2.6"}, False, None, None)


def test_a_study_of_format_1_keeps_what_it_was_planned_for(tmp_path: Path) -> None:
    written_by_format_1(tmp_path / "study", seeds=4, done=3)
    plan = Study.open(tmp_path / "study").plan
    with pytest.raises(PlanChangedError, match="self_test"):
        run(self_test_plan(plan, size=3), tmp_path / "study")
    assert len(Study.open(tmp_path / "study").runs()) == 6


def test_a_database_of_another_plan_is_refused(tmp_path: Path) -> None:
    for name, seeds in (("a", 2), ("b", 3)):
        Study.create(tmp_path / name, plan_of(seeds=seeds))
    shutil.copy(tmp_path / "b" / "study.db", tmp_path / "a" / "study.db")
    (tmp_path / "a" / "study.db-wal").unlink(missing_ok=True)
    for use in (Study.open, lambda path: Study.create(path, plan_of(seeds=2))):
        with pytest.raises(StudyError, match=r"study\.db was written for another plan than plan\.json"):
            use(tmp_path / "a")
    assert Study.create(tmp_path / "b", plan_of(seeds=4)).plan == Study.open(tmp_path / "b").plan


def test_a_finished_study_on_a_full_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There SQLite cannot make its own files; a folder in the place of one of them has the same effect."""
    study = Study.create(tmp_path, plan_of(seeds=1))
    study.add(study.plan.recipes[1], finished("r0", 0), {})
    for name in ("study.db-shm", "study.db-wal"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "study.db-shm").mkdir()
    assert Study.open(tmp_path).runs() == (finished("r0", 0),)
    with pytest.raises(StudyError, match=r"study\.db cannot be used"):
        study.add(study.plan.baseline, finished("baseline", 0), {})
    (tmp_path / "study.db-wal").write_bytes(b"a commit")
    monkeypatch.setattr(os, "access", lambda *_: False)  # a folder that cannot be written
    with pytest.raises(StudyError, match=r"the last runs are in study\.db-wal"):
        Study.open(tmp_path)


def test_runs_in_the_log_of_a_folder_that_cannot_be_written_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study.create(tmp_path / "live", plan_of(seeds=2))
    study.add(study.plan.recipes[1], finished("r0", 0), {})
    with closing(sqlite3.connect(tmp_path / "live" / "study.db")) as reader:  # it keeps the log from being emptied
        reader.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM runs").fetchall()
        study.add(study.plan.recipes[1], finished("r0", 1), {})
        shutil.copytree(tmp_path / "live", tmp_path / "archive")
    (tmp_path / "archive" / "study.db-shm").unlink(missing_ok=True)
    assert (tmp_path / "archive" / "study.db-wal").stat().st_size
    before = sorted((file.name, file.read_bytes()) for file in (tmp_path / "archive").iterdir() if file.is_file())
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert Study.open(tmp_path / "archive").runs() == (finished("r0", 0), finished("r0", 1))
    after = sorted((file.name, file.read_bytes()) for file in (tmp_path / "archive").iterdir() if file.is_file())
    assert after == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "damaged")])
def test_a_connection_is_closed_by_every_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Also by one that is none of SQLite's; Python 3.13 reports a connection that is left open."""
    Study.create(tmp_path, plan_of(seeds=1))
    opened: list[sqlite3.Connection] = []

    class Failing(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            raise error

    def connect(*arguments: Any, **named: Any) -> sqlite3.Connection:
        opened.append(Failing(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises((KeyboardInterrupt, StudyError), match=r"cannot be used|^$"):
        Study.open(tmp_path).runs()
    assert opened
    for each in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            each.cursor()


# --- damage -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A small study with rows in most tables."""
    study = Study.create(tmp_path_factory.mktemp("damage") / "study", plan_of(seeds=3))
    for entry, seed in study.plan.grid:
        curve = {"val_score": [float(seed + i) for i in range(30)]}
        record = RunRecord(entry.name, seed, "finished", 10.0 + seed, curve=curve, seconds=1.5)
        study.add(entry, record, {"torch": "2.13"})
    study.add_costs([("r0", "step_time", i, 1.0 + i / 10) for i in range(5)])
    return study


def test_whole_numbers_keep_their_checksum(tmp_path: Path) -> None:
    study = Study.create(tmp_path, plan_of(seeds=1))
    study.add_costs([("baseline", "parameters", 0, 40), ("r0", "parameters", 0, 50)])
    study.add(study.plan.recipes[0], RunRecord("baseline", 0, "finished", 90, seconds=2), {})
    amount = study.results().effects[0].parameters
    assert (study.damaged(), amount and amount.ratio, len(study.runs())) == ([], 1.25, 1)


def copy_of(study: Study, folder: Path) -> Study:
    shutil.copytree(study.path, folder)
    return Study(folder, study.plan)


def test_a_flipped_bit_changes_no_result_and_raises_nothing_raw(whole: Study, tmp_path: Path) -> None:
    draw = random.Random(0)
    intact = (whole.path / "study.db").read_bytes()
    wanted = {(run.recipe, run.seed): run for run in whole.runs()}
    costs = {effect.recipe: effect.step_time for effect in whole.results().effects}
    copy = copy_of(whole, tmp_path / "copy")
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        content = bytearray(intact)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        for left in copy.path.glob("study.db*"):
            left.unlink()
        (copy.path / "study.db").write_bytes(content)
        try:
            found = {(run.recipe, run.seed): run for run in copy.runs()}
            results = copy.results()
        except StudyError:
            outcomes["refused"] += 1
            continue
        assert all(wanted[key] == run for key, run in found.items())
        assert found.keys() == wanted.keys() or copy.damaged()
        assert all(e.step_time == costs[e.recipe] or copy.damaged() for e in results.effects)
        outcomes["named" if copy.damaged() else "as it was"] += 1
    assert min(outcomes["named"], outcomes["as it was"], outcomes["refused"]) > 0, outcomes


def of_costs(content: bytes) -> int:
    """Where the only page of the table of costs begins."""
    size, at = int.from_bytes(content[16:18], "big"), content.index(b"step_time")
    return at - at % size


def test_rows_that_are_no_longer_seen_are_named(whole: Study, tmp_path: Path) -> None:
    """A page that says that it holds fewer rows: all that are left are intact."""
    copy = copy_of(whole, tmp_path / "copy")
    file = copy.path / "study.db"
    content = bytearray(file.read_bytes())
    at = of_costs(content)
    assert int.from_bytes(content[at + 3 : at + 5], "big") == 5
    content[at + 4] = 2
    file.write_bytes(content)
    assert "in database main" in copy.damaged()[0]
    assert copy.results().notes[-1].startswith("Damaged in study.db and left out: ")
    again = Study.create(copy.path, copy.plan)
    assert "in database main" in again.discarded[0]
    assert (again.damaged(), again.runs()) == ([], whole.runs())


def test_a_table_that_is_gone_is_named_and_no_study_is_continued_without_it(whole: Study, tmp_path: Path) -> None:
    copy = copy_of(whole, tmp_path / "copy")
    with closing(sqlite3.connect(copy.path / "study.db")) as database, database:
        database.execute("DROP TABLE costs")
    assert copy.damaged() == ["there is no table costs"]
    with pytest.raises(StudyError, match=r"study\.db is damaged: there is no table costs\. `gonio report` shows"):
        Study.create(copy.path, copy.plan)


def test_damage_that_sqlite_quotes_is_refused(whole: Study, tmp_path: Path) -> None:
    """SQLite names a damaged table in its message, with bytes that are no text."""
    copy = copy_of(whole, tmp_path / "copy")
    file = copy.path / "study.db"
    content = file.read_bytes()
    at = content.index(b"tablerunsruns")
    file.write_bytes(content[:at] + b"tabler\x82ns" + content[at + 9 :].replace(b"CREATE", b"CREATX", 1))
    with pytest.raises(StudyError, match=r"study\.db cannot be used"):
        copy.runs()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("record = json_set(record, '$.score', 99)", "runs: r0, seed 1"),
        ("status = 'strange'", "runs: r0, seed 1"),
        ("record = substr(record, 1, 40)", "runs: r0, seed 1"),
        ("checksum = NULL", "runs: r0, seed 1"),
        ("seed = 77", "runs: r0, seed 77"),
    ],
)
def test_a_damaged_row_is_named_and_its_run_done_again(whole: Study, tmp_path: Path, change: str, name: str) -> None:
    study = copy_of(whole, tmp_path / "copy")
    with closing(sqlite3.connect(study.path / "study.db")) as database, database:
        database.execute(f"UPDATE runs SET {change} WHERE hash = 'r0' AND seed = 1")
    assert [(entry.name, seed) for entry, seed in study.missing()] == [("r0", 1)]
    assert study.results().notes[-1] == f"Damaged in study.db and left out: {name}."
    opened = Study.create(study.path, study.plan)
    assert (opened.discarded, opened.damaged()) == ((name,), [])
    opened.add(opened.plan.recipes[1], RunRecord("r0", 1, "finished", 1.0), {})
    assert opened.missing() == []


def test_a_damaged_row_of_an_older_format_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    written_by_format_1(folder, seeds=2, done=2)
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        database.execute("UPDATE runs SET record = 'no JSON' WHERE rowid = 1")
    before = Study.open(folder)
    assert (len(before.damaged()), len(before.runs())) == (1, 3)
    again = Study.create(folder, before.plan)
    assert (again.discarded, again.damaged(), len(again.runs())) == (("runs: baseline, seed 0",), [], 3)
    assert [seed for _, seed in again.missing()] == [0, 1, 1]
