"""A study from somebody else: its checksums and hashes are right, because they need no key, and its values are not.

It gives results, names the damaged rows, or is refused by one sentence, in bounded time.

`GONIO_STUDIES` is the number of changed studies in the long test (2,000).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gonio.cli.app import app
from gonio.errors import GonioError, StudyError
from gonio.lab import Study, StudyPlan, make_plan, make_script_plan, run, showing
from gonio.lab.running.study import _checksum
from lab.plans import OWN, TINY

STUDIES = int(os.environ.get("GONIO_STUDIES", "2000"))
WRONG = (None, True, -1, 10**30, 1.5, float("nan"), "", "x" * 5000, "<b>", [], [1], [[]], {}, {"a": 1}, {"use": 1})


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("studies")
    plans = {
        "built-in": make_plan(["orthogonal-init"], task=f"{TINY}:task", seeds=2),
        "script": make_script_plan(["scale-shift"], script=f"{OWN}:score_of_seed", seeds=2),
    }
    return {name: run(plan, folder / name, jobs=1).path for name, plan in plans.items()}


@pytest.fixture
def copied(studies: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(studies["script"], tmp_path / "study"))


def rewrite(folder: Path, table: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change each row of a table, with right checksums."""
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        columns = [column[1] for column in database.execute(f"PRAGMA table_info({table})")]
        for number, *row, _ in database.execute(f"SELECT rowid, * FROM {table}").fetchall():
            new = change(row)
            stored = [*new, _checksum(new)]
            names = ", ".join(f"{name} = ?" for name in columns)
            database.execute(f"UPDATE OR REPLACE {table} SET {names} WHERE rowid = ?", (*stored, number))


def replan(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the plan; where it still can be read, with a right hash, also in the database."""
    path = folder / "plan.json"
    data = json.loads(path.read_text())
    change(data)
    try:
        data["hash"] = StudyPlan.from_dict(data).hash
    except Exception:
        path.write_text(json.dumps(data))
        return
    path.write_text(json.dumps(data))
    rewrite(folder, "artifacts", lambda r: [r[0], json.dumps({"hashes": [data["hash"]]})] if r[0] == "plan" else r)


def put(value: Any, new: Any, draw: random.Random) -> Any:
    """A value of JSON with another one at a random place."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        return {**value, key: put(value[key], new, draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], put(value[at], new, draw), *value[at + 1 :]]
    return new


def changed(folder: Path, draw: random.Random) -> None:
    new = draw.choice(WRONG)
    if draw.random() < 0.4:

        def plan(data: dict[str, Any]) -> None:
            key = draw.choice([*data, "unknown"])
            data[key] = put(data.get(key), new, draw)

        replan(folder, plan)
        return

    def row(values: list[Any]) -> list[Any]:
        at = draw.randrange(len(values))
        try:
            content = json.loads(values[at])
        except (TypeError, ValueError):
            content = None
        if isinstance(content, dict):
            content = {**content, "unknown": new} if draw.random() < 0.1 else put(content, new, draw)
            return [*values[:at], json.dumps(content), *values[at + 1 :]]
        scalar = new if isinstance(new, (int, float, str, type(None))) and new != 10**30 else "[1]"
        return [*values[:at], scalar, *values[at + 1 :]]

    with suppress(sqlite3.IntegrityError):  # the schema itself refuses it
        rewrite(folder, draw.choice(("runs", "runs", "costs", "artifacts")), row)


def read_whole(folder: Path) -> str:
    """All that a report is made of."""
    refusal = ""
    try:
        study = Study.open(folder)
        found = study.results()
        for make in (showing.text, showing.html, showing.to_json, showing.to_csv, showing.to_markdown):
            make(found)
    except GonioError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 1000
    return "refused" if refusal else "named" if study.damaged() else "read"


def attempt(studies: dict[str, Path], folder: Path, seed: int) -> str:
    draw = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(studies[draw.choice(sorted(studies))], folder)
    changed(folder, draw)
    try:
        return read_whole(folder)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def test_values_of_another_type(studies: dict[str, Path], tmp_path: Path) -> None:
    outcomes = {attempt(studies, tmp_path / "study", seed) for seed in range(60)}
    assert outcomes == {"refused", "named", "read"}


@pytest.mark.slow
def test_many_values_of_another_type(studies: dict[str, Path], tmp_path: Path) -> None:
    outcomes = [attempt(studies, tmp_path / "study", seed) for seed in range(1000, 1000 + STUDIES)]
    assert outcomes.count("refused") > STUDIES / 10
    assert outcomes.count("named") > STUDIES / 10


@pytest.mark.parametrize(
    "new",
    [{"score": [1]}, {"score": "x"}, {"extra": 1}, {"curve": [1]}, {"curve": {"val_score": 3}}, {"status": "won"},
     {"geometry": {"layers": {"a": 1}}}, {"robustness": {"pgd": []}}, {"seed": 99}, {"recipe": "other"},
     {"score": float("inf")}, {"score": float("nan")}, {"metrics": {"loss": float("nan")}},
     {"costs": {"memory": float("inf")}}],
)  # fmt: skip
def test_a_record_with_a_wrong_value_is_a_damaged_row(copied: Path, new: dict[str, Any]) -> None:
    rewrite(copied, "runs", lambda r: [*r[:3], json.dumps({**json.loads(r[3]), **new}), *r[4:]])
    study = Study.open(copied)
    assert not study.runs()
    assert len(study.damaged()) == 4
    for command in ("report", "status"):
        said = CliRunner().invoke(app, [command, str(copied)])
        assert said.exit_code == 0
        assert "damaged" in said.output.lower()


def test_a_row_that_cannot_be_read_is_removed_where_the_study_says_so(copied: Path) -> None:
    rewrite(copied, "runs", lambda r: [*r[:3], "{}", *r[4:]])
    made = Study.create(copied, Study.open(copied).plan)
    assert len(made.discarded) == 4
    assert not made.damaged()


def test_deep_json_in_a_row_and_in_the_plan(copied: Path) -> None:
    deep = "[" * 200_000
    rewrite(copied, "runs", lambda r: [*r[:3], deep, *r[4:]])
    assert len(Study.open(copied).damaged()) == 4
    (copied / "plan.json").write_text(deep)
    with pytest.raises(StudyError, match=r"study '.*': cannot be used; plan.json is nested too deeply"):
        Study.open(copied)


def test_a_view_in_the_place_of_a_table(copied: Path) -> None:
    with closing(sqlite3.connect(copied / "study.db")) as database, database:
        database.execute("ALTER TABLE runs RENAME TO r0")
        endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT 'h' hash, x seed FROM c"
        database.execute(f"CREATE VIEW runs AS {endless}")
    with pytest.raises(StudyError, match=r"study.db contains the view runs, and a study has tables alone"):
        Study.open(copied)


def test_a_trigger_does_not_run(copied: Path) -> None:
    with closing(sqlite3.connect(copied / "study.db")) as database, database:
        database.execute("CREATE TRIGGER t AFTER INSERT ON looks BEGIN DELETE FROM runs; END")
    with pytest.raises(StudyError, match=r"study.db contains the trigger t, and a study has tables alone"):
        Study.open(copied)


def test_an_unknown_key_of_the_plan_is_named(copied: Path) -> None:
    replan(copied, lambda data: data.update(extra=1))
    with pytest.raises(StudyError, match=r"plan.json cannot be read: extra: Unexpected keyword argument"):
        Study.open(copied)
