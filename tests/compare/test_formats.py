"""A study of an older gonio: read as it is, continued in today's format, and nothing of it is lost."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from compare.own_training import noisy
from gonio.compare import Run, Study, make_script_plan, run, self_test_plan
from gonio.compare.judging.results import Ratio
from gonio.errors import PlanChangedError

OWN = str(Path(__file__).with_name("own_training.py"))

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
    assert version == 2
    assert {"runs", "costs", "trials", "choices", "artifacts"} <= names
    kept = {row[:2]: row for row in rows}
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
