"""A study's folder: the plan as JSON, one SQLite database, and a lock.

A run is finished exactly when its row is committed: a run without a row is run again, from its seed, and there is
nothing to repair after a kill. Each row has a checksum over its other columns; a row that does not match it is damaged,
counts as absent, and is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, Json, ValidationError

from gonio.errors import StudyError, StudyLockedError
from gonio.escaping import plain, write_text
from gonio.lab.judging.results import CostRow, RecipeTuning, Results, summarise
from gonio.lab.plan import RecipeEntry, StudyPlan, adapter, extended
from gonio.lab.record import RunRecord
from gonio.lab.running.tuning import Trial, best, defaults_of, ready
from gonio.messages import say
from gonio.system import flush_folder, lock_

DATABASE, VERSION = "study.db", 3
_MOST_ROWS = 1_000_000  # of a table
_PLAN = "plan.json"
_LOG = b"\x37\x7f\x06"  # the beginning of a log of SQLite
# Version 2 added `trials`, `choices` and `artifacts`; version 3 a column `checksum` to each table, `looks` later.
_RECORD = "status TEXT NOT NULL, record TEXT NOT NULL, seconds REAL, versions TEXT NOT NULL"
_COLUMNS = {
    "runs": f"hash TEXT NOT NULL, seed INTEGER NOT NULL, {_RECORD}, checksum TEXT, PRIMARY KEY (hash, seed)",
    "costs": "hash TEXT NOT NULL, kind TEXT NOT NULL, block INTEGER NOT NULL, ratio REAL NOT NULL, checksum TEXT, "
    "PRIMARY KEY (hash, kind, block)",
    "trials": f"hash TEXT NOT NULL, number INTEGER NOT NULL, vals TEXT NOT NULL, {_RECORD}, checksum TEXT, "
    "PRIMARY KEY (hash, number)",
    "choices": "hash TEXT NOT NULL PRIMARY KEY, vals TEXT NOT NULL, checksum TEXT",
    "artifacts": "name TEXT NOT NULL PRIMARY KEY, content TEXT NOT NULL, checksum TEXT",
    "looks": "runs INTEGER PRIMARY KEY, checksum TEXT",
}
_Values = Json[dict[str, FiniteFloat]]
# What the columns contain. Checksums and hashes need no key: anyone can write a study.
_CONTENTS: Mapping[str, Any] = {
    "runs": tuple[str, int, str, Json[RunRecord], FiniteFloat | None, Json[dict[str, str]]],
    "costs": tuple[str, str, int, FiniteFloat],
    "trials": tuple[str, int, _Values, str, Json[RunRecord], FiniteFloat | None, Json[dict[str, str]]],
    "choices": tuple[str, _Values],
    "artifacts": tuple[str, Json[dict[str, Any]]],
    "looks": tuple[int],
}


def made(path: str | Path) -> Path:
    """The folder of a study, which is made if it is absent; a StudyError if it cannot be."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = say("the folder cannot be made ({error})", error=str(error.strerror))
        raise StudyError(str(folder), why, "Name another folder (-o).") from error
    return folder


class Study:
    """A comparison on disk.

    Any number of processes may read it, also while it runs. Only :func:`gonio.lab.run` writes runs to it;
    reading results records that they were looked at.
    The folder must be on a local file system: SQLite's write-ahead log does not work over NFS.

    Attributes:
        path: the folder.
        plan: fixed before the first run.
        discarded: names of the damaged rows that were removed when the study was opened for writing.

    Example:
        >>> import tempfile
        >>> plan = gonio.lab.make_plan(["orthogonal-init"], seeds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     study = gonio.lab.Study.create(folder, plan)
        ...     len(study.missing()), gonio.lab.Study.open(folder).plan == plan
        (4, True)
    """

    def __init__(self, path: Path, plan: StudyPlan, discarded: Sequence[str] = ()) -> None:
        self.path = path
        self.plan = plan
        self.discarded = tuple(discarded)

    def __repr__(self) -> str:
        return f"<Study {plain(self.path)}: {', '.join(plain(entry.name) for entry in self.plan.recipes)}>"

    @classmethod
    def create(cls, path: str | Path, plan: StudyPlan) -> Study:
        """A new study, or the existing one if its plan equals `plan` or is extended by it.

        Raises:
            PlanChangedError: the folder's plan differs in more than added seeds and recipes.
            StudyLockedError: another process is running the study.
        """
        folder = made(path)
        with locked(folder):
            return cls.create_locked(folder, plan)

    @classmethod
    def create_locked(cls, folder: Path, plan: StudyPlan) -> Study:
        """:meth:`create` for a caller that holds the folder's lock."""
        prepare(folder)
        problem = _repaired(folder)
        with transaction(folder) as database:
            (finished,) = database.execute("SELECT COUNT(*) FROM runs").fetchone()
        if (folder / _PLAN).exists():
            old = _read_plan(folder)
            _check_hash(folder, old)
            plan = extended(old, plan, path=str(folder), finished=finished)
        _add_hash(folder, plan)  # before the plan: a kill in between leaves a plan whose hash is known
        _write_plan(folder, plan)
        damaged = cls(folder, plan).damaged()
        _discard(folder)
        return cls(folder, plan, [*problem, *damaged])

    @classmethod
    def open(cls, path: str | Path) -> Study:
        """The study in a folder, for reading.

        Raises:
            StudyError: there is none, or it cannot be read.
        """
        folder = Path(path)
        for name in (_PLAN, DATABASE):
            if not (folder / name).is_file():
                raise StudyError(str(path), f"there is no {name} in it", "Give the folder of a study.")
        plan = _read_plan(folder)
        _check_hash(folder, plan)
        return cls(folder, plan)

    def missing(self) -> list[tuple[RecipeEntry, int]]:
        """The runs to do: those without a row, and failed ones, whose cause may have been an accident."""
        rows = {key for key, record in self._records()[0].items() if record.status != "failed"}
        return [(entry, seed) for entry, seed in self.plan.grid if (entry.hash, seed) not in rows]

    def damaged(self) -> list[str]:
        """The rows whose content does not match their checksum, their table or the plan, by name; they count as absent.

        Where SQLite finds its own structure damaged, rows may be absent unseen: then what it says comes first.
        """
        names = {entry.hash: entry.name for entry in self.plan.recipes}
        labels = {"runs": "seed", "trials": "trial", "costs": "cost", "choices": "tuned values", "artifacts": ""}

        def name(table: str, first: Any, *rest: Any) -> str:
            head = f"{table}: {names.get(first, plain(str(first)[:16]))}"
            return f"{head}, {labels[table]} {plain(str(rest[0])[:16])}" if rest else head

        found = [(table, row) for table in _COLUMNS for row in _rows(self.path, table)[1]]
        found += [("runs", key) for key in self._records()[1]]
        return [*_structure(self.path), *(name(table, *row) for table, row in found)]

    def scratch(self, entry: RecipeEntry, seed: int) -> Path:
        """The folder for a run's files until it is finished."""
        return self.path / "work" / f"{entry.hash[:16]}-{seed}"

    def add(self, entry: RecipeEntry, record: RunRecord, versions: Mapping[str, str]) -> None:
        """Commit one run; after the return no crash can lose it."""
        _commit(self.path, "runs", (entry.hash, record.seed, *_columns(record, versions)))

    def add_costs(self, rows: Sequence[CostRow]) -> None:
        """Commit measured cost ratios, all or none."""
        _commit(self.path, "costs", *[(hash_, kind, block, float(number)) for hash_, kind, block, number in rows])

    def without_costs(self) -> list[RecipeEntry]:
        """The recipes, baseline excluded, whose cost has not been measured; none for a script or a claim."""
        if self.plan.scripted or self.plan.self_test or self.plan.measure:
            return []
        found = {hash_ for hash_, *_ in _rows(self.path, "costs")[0]}
        return [entry for entry in self.plan.recipes[1:] if entry.hash not in found]

    def runs(self) -> tuple[RunRecord, ...]:
        """Every run that has a row, in the plan's order of recipes and seeds."""
        found = self._records()[0]
        order = ((entry.hash, seed) for entry in self.plan.recipes for seed in self.plan.seeds)
        return tuple(found[key] for key in order if key in found)

    def _records(self) -> tuple[dict[tuple[str, int], RunRecord], list[tuple[str, int]]]:
        """The runs by hash and seed, and the keys of those that name another recipe than the plan has by that hash."""
        names = {entry.hash: entry.name for entry in self.plan.recipes}
        rows = _rows(self.path, "runs")[0]
        found = {(hash_, seed): _record(text, seconds) for hash_, seed, _, text, seconds, _ in rows}
        others = [key for key, record in found.items() if names.get(key[0], record.recipe) != record.recipe]
        return {key: record for key, record in found.items() if key not in others}, others

    @property
    def trials(self) -> Trials:
        """The trials of tuning."""
        return Trials(self.path, self.plan)

    def transferred(self) -> dict[str, Any] | None:
        """The examples of the transfer attack as text: None if they were not made, {} if that failed."""
        if self.plan.threat is None:
            return None
        found = dict(_rows(self.path, "artifacts")[0])
        return dict(json.loads(found["transferred"])) if "transferred" in found else None

    def keep_transferred(self, content: Mapping[str, Any]) -> None:
        """Commit the examples of the transfer attack."""
        _commit(self.path, "artifacts", ("transferred", json.dumps(dict(content))))

    def results(self) -> Results:
        """The results of the runs so far. Counts as a look at them: see :meth:`looks`.

        Raises:
            MissingExtraError: scipy is not installed.
        """
        costs = _rows(self.path, "costs")[0]
        runs = self.runs()
        self._look(sum(run.status != "failed" for run in runs))
        found = summarise(self.plan, runs, costs, self.used(), self.looks())
        damaged = [f"Damaged in {DATABASE} and left out: {name}." for name in self.damaged()]
        return replace(found, tuning=self.trials.summary(), notes=(*found.notes, *damaged))

    def used(self) -> list[dict[str, str]]:
        """The distinct versions of the runs, in their order."""
        return [json.loads(text) for text in dict.fromkeys(row[-1] for row in _rows(self.path, "runs")[0])]

    def looks(self) -> tuple[int, ...]:
        """Number of finished runs at each look at new results."""
        return tuple(sorted(count for (count,) in _rows(self.path, "looks")[0]))

    def _look(self, count: int) -> None:
        """Record a look at the results of so many runs, if the study can be written to."""
        if count and count not in self.looks() and os.access(self.path, os.W_OK):
            with suppress(StudyError), transaction(self.path) as database:  # a full disk does not hide results
                database.execute("BEGIN IMMEDIATE")
                _add_table(database, "looks")
                _insert(database, "looks", (count,))


class Trials:
    """The trials of a study, and the values chosen once, after the last trial of a recipe, for all of its runs."""

    def __init__(self, folder: Path, plan: StudyPlan) -> None:
        self._folder, self._plan = folder, plan

    def of(self, entry: RecipeEntry) -> list[Trial]:
        """The trials of one recipe, by number."""
        if self._plan.tuning is None:
            return []
        rows = sorted(_rows(self._folder, "trials")[0], key=lambda row: row[1])
        return [
            Trial(number, json.loads(values), _record(text, seconds))
            for hash_, number, values, _, text, seconds, _ in rows
            if hash_ == entry.hash
        ]

    def add(self, entry: RecipeEntry, trial: Trial, versions: Mapping[str, str]) -> None:
        """Commit one trial."""
        row = (entry.hash, trial.number, json.dumps(dict(trial.values)), *_columns(trial.record, versions))
        _commit(self._folder, "trials", row)

    def ready(self, entry: RecipeEntry) -> list[int]:
        """The numbers of the trials that can be made now; none once the choice is made."""
        return [] if self.chosen(entry) is not None else ready(self._plan, self.of(entry))

    def choose_if_complete(self, entry: RecipeEntry) -> None:
        """After the last trial, commit the values of the best one; the defaults if no trial finished."""
        trials = self.of(entry)
        if self._plan.tuning is None or self.chosen(entry) is not None or len(trials) < self._plan.tuning.trials:
            return
        trial = best(self._plan, trials)
        values = defaults_of(self._plan, entry) if trial is None else dict(trial.values)
        _commit(self._folder, "choices", (entry.hash, json.dumps(values)))

    def chosen(self, entry: RecipeEntry) -> dict[str, float] | None:
        """The values of a recipe's runs; None before they are chosen, {} without tuning."""
        if self._plan.tuning is None:
            return {}
        found = dict(_rows(self._folder, "choices")[0])
        return dict(json.loads(found[entry.hash])) if entry.hash in found else None

    def left(self) -> int:
        """How many trials are still to be made."""
        if self._plan.tuning is None:
            return 0
        return sum(self._plan.tuning.trials - len(self.of(e)) for e in self._plan.recipes if self.chosen(e) is None)

    def summary(self) -> tuple[RecipeTuning, ...]:
        """The tuning of each recipe, the baseline included; empty without tuning."""
        return tuple(self._tuned(entry) for entry in self._plan.recipes) if self._plan.tuning else ()

    def _tuned(self, entry: RecipeEntry) -> RecipeTuning:
        trials = self.of(entry)
        statuses = [trial.record.status for trial in trials]
        winner, first = best(self._plan, trials), next((t for t in trials if t.number == 0), None)
        return RecipeTuning(
            recipe=entry.name,
            trials=len(trials),
            failed=statuses.count("failed"),
            diverged=statuses.count("diverged"),
            defaults=defaults_of(self._plan, entry),
            chosen=self.chosen(entry) or {},
            score=winner.record.score if winner else None,
            default_score=first.record.score if first else None,
            seconds=sum(trial.record.seconds or 0.0 for trial in trials),
        )


def _columns(record: RunRecord, versions: Mapping[str, str]) -> tuple[str, str, float | None, str]:
    """The status, record, seconds and versions of a row."""
    content = record.to_dict()
    seconds = content.pop("seconds")  # a REAL column returns a float for an int, and the checksum is of the float
    shown = None if seconds is None else float(seconds)
    return record.status, json.dumps(content), shown, json.dumps(dict(versions))


def _record(text: str, seconds: float | None) -> RunRecord:
    return replace(adapter(RunRecord).validate_json(text), seconds=seconds)


# --- the database -----------------------------------------------------------------------------------------


@contextmanager
def transaction(folder: Path, *, create: bool = False, reading: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection for one transaction: committed at the end of the block, rolled back by an exception.

    Args:
        reading: nothing is written; then a full disk, on which SQLite cannot make its own files, is no obstacle.
    """
    if not folder.is_dir():
        raise StudyError(str(folder), "the folder was moved or deleted", "Move it back, and run the command again.")
    try:
        with closing(_connect(folder, create=create, reading=reading)) as database, database:
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found > VERSION:
                why = f"{DATABASE} has format {found}, and this gonio reads up to {VERSION}"
                raise StudyError(str(folder), why, "Use a newer gonio.")
            _refuse_code(folder, database)
            yield database
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite quotes damaged bytes
        raise StudyError(str(folder), f"{DATABASE} cannot be used: {error}", "Check the disk and the file.") from error


def _refuse_code(folder: Path, database: sqlite3.Connection) -> None:
    """Raise for views and triggers, which compute: a study has tables with values."""
    others = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index')"
    for kind, name in database.execute(others):
        why = f"{DATABASE} contains the {kind} {plain(str(name)[:40])}, and a study has tables alone"
        raise StudyError(str(folder), why, "Do not use this study.")


def _connect(folder: Path, *, create: bool, reading: bool) -> sqlite3.Connection:
    """An open database; where nothing can be written, not even SQLite's own files, it is read as it is or copied."""
    path = folder / DATABASE
    if not path.exists() or os.access(folder, os.W_OK):
        database = _opened(path, "mode=rwc" if create else "mode=rw")
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # NORMAL may lose the last commits in a power failure
            database.execute("PRAGMA user_version").fetchone()
        except BaseException as error:  # also a message of SQLite that is no text
            database.close()
            full = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)
            if not reading or getattr(error, "sqlite_errorcode", 0) & 0xFF not in full:
                raise
        else:
            return database
    log = folder / f"{DATABASE}-wal"
    return _copied(folder, path, log) if log.exists() and log.stat().st_size else _opened(path, "immutable=1")


def _copied(folder: Path, path: Path, log: Path) -> sqlite3.Connection:
    """A copy in memory of a database whose last runs are in its log: SQLite writes to a folder to read a log."""
    why = f"the last runs are in {log.name}, which cannot be read where nothing can be written"
    do = "Copy the folder to a disk with space, and read the copy."
    found = sqlite3.connect(":memory:")
    found.text_factory = _text
    try:
        if log.read_bytes()[:3] != _LOG:
            raise StudyError(str(folder), why, do)
        before = [file.stat().st_mtime_ns for file in (path, log)]
        with tempfile.TemporaryDirectory() as spare:
            for file in (path, log):
                shutil.copyfile(file, Path(spare) / file.name)
            if [file.stat().st_mtime_ns for file in (path, log)] != before:  # written to meanwhile
                raise StudyError(str(folder), why, do)
            with closing(_opened(Path(spare) / path.name, "mode=rw")) as copy:
                copy.backup(found)
    except BaseException as error:
        found.close()
        if isinstance(error, (OSError, sqlite3.Error)):
            raise StudyError(str(folder), f"{why} ({error})", do) from error
        raise
    return found


def _opened(path: Path, how: str) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    database.text_factory = _text
    return database


def _text(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")  # damage in one row, not all


def prepare(folder: Path) -> None:
    """Create the tables and columns that are missing, in a new study or one of an older gonio."""
    with transaction(folder, create=True) as database:
        whole = database.execute("PRAGMA user_version").fetchone()[0] == VERSION
        if whole and _has_checksums(database, "looks"):
            return
        database.execute("BEGIN IMMEDIATE")  # after a read, another process's commit would make the write fail
        for table in _COLUMNS:
            _add_table(database, table)
        database.execute(f"PRAGMA user_version = {VERSION}")


def _add_table(database: sqlite3.Connection, table: str) -> None:
    """Create a table, or add the checksums that an older gonio did not write."""
    if _has_checksums(database, table):
        return
    database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({_COLUMNS[table]})")
    if not _has_checksums(database, table):
        database.execute(f"ALTER TABLE {table} ADD COLUMN checksum TEXT")
    for number, *row, _ in database.execute(f"SELECT rowid, * FROM {table}").fetchall():
        checksum = _checksum(row) if _readable(table, row) else None
        database.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", (checksum, number))


def _structure(folder: Path) -> list[str]:
    """What is wrong with the pages, indices and tables of the database, the first of it; empty if they are whole."""
    with transaction(folder, reading=True) as database:
        (said,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        found = database.execute("PRAGMA user_version").fetchone()[0]
        known = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    expected = ["runs", "costs"] if found < 2 else [table for table in _COLUMNS if table != "looks"]
    absent = [f"there is no table {table}" for table in expected if table not in known]
    return [plain(said)] if said != "ok" else absent[:1]


def _repaired(folder: Path) -> list[str]:
    """What was wrong with pages and indices, which are made anew from the rows of the tables.

    Raises:
        StudyError: if more is wrong.
    """
    problem = _structure(folder)
    if problem:
        with transaction(folder) as database:
            database.execute("REINDEX")
            database.execute("VACUUM")
        if left := _structure(folder):
            do = "`gonio report` shows what can be read. Put back a copy of the file, or start a new study."
            raise StudyError(str(folder), f"{DATABASE} is damaged: {left[0]}", do)
    return problem


def _rows(folder: Path, table: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The rows of a table without their checksum: the intact and the damaged ones."""
    with transaction(folder, reading=True) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
            return [], []  # format 1
        checked = _has_checksums(database, table)
        rows = database.execute(f"SELECT * FROM {table} LIMIT {_MOST_ROWS + 1}").fetchall()
    if len(rows) > _MOST_ROWS:
        raise StudyError(str(folder), f"table {table} has more than {_MOST_ROWS:,} rows", "No study has so many.")
    intact: list[tuple[Any, ...]] = []
    damaged: list[tuple[Any, ...]] = []
    for row in rows:
        content = row[:-1] if checked else row
        valid = (not checked or row[-1] == _checksum(content)) and _readable(table, content)
        (intact if valid else damaged).append(content)
    return intact, damaged


def _readable(table: str, row: Sequence[Any]) -> bool:
    """Whether the values of a row have their types, and its record is of the seed and status that the row states."""
    try:
        found = adapter(_CONTENTS[table]).validate_python(row)
    except ValidationError:
        return False
    if table == "runs":
        return bool((found[3].status, found[3].seed) == (row[2], row[1]))
    return table != "trials" or bool(found[4].status == row[3])


def _discard(folder: Path) -> None:
    """Delete the rows that cannot be read."""
    with transaction(folder) as database:
        for table in _COLUMNS:
            for number, *row, checksum in database.execute(f"SELECT rowid, * FROM {table}").fetchall():
                if checksum != _checksum(row) or not _readable(table, row):
                    database.execute(f"DELETE FROM {table} WHERE rowid = ?", (number,))


def _commit(folder: Path, table: str, *rows: Sequence[Any]) -> None:
    """Write rows, all or none; after the return no crash can lose them."""
    with transaction(folder) as database:
        for row in rows:
            _insert(database, table, row)


def _insert(database: sqlite3.Connection, table: str, row: Sequence[Any]) -> None:
    marks = ", ".join("?" * (len(row) + 1))
    database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (*row, _checksum(row)))


def _has_checksums(database: sqlite3.Connection, table: str) -> bool:
    return any(column[1] == "checksum" for column in database.execute(f"PRAGMA table_info({table})"))


def _checksum(row: Sequence[Any]) -> str:
    """Over the values as SQLite returns them."""
    return hashlib.sha256(json.dumps(list(row), default=repr).encode()).hexdigest()


# --- the lock and the plan --------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a study's folder, which must exist; the operating system releases it when the process dies."""
    with (folder / "lock").open("a+") as file:
        try:
            lock_(file)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip()
            raise StudyLockedError(str(folder), f"process {holder}" if holder.isdigit() else "") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _read_plan(folder: Path) -> StudyPlan:
    try:
        data: dict[str, Any] = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
        plan = StudyPlan.from_dict(data)
    except RecursionError:
        raise StudyError(str(folder), f"{_PLAN} is nested too deeply", "Do not use this study.") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        why = f"{_PLAN} cannot be read: {plain(place)}: {plain(first['msg'])}"
        raise StudyError(str(folder), why, "Restore it, or start a new study.") from error
    except (ValueError, OSError) as error:
        why = f"{_PLAN} cannot be read: {error}"
        raise StudyError(str(folder), why, "Restore it, or start a new study.") from error
    if plan.hash != data.get("hash"):
        why = f"{_PLAN} does not have the hash that it states"
        raise StudyError(str(folder), why, "It was edited; restore it, or start a new study.")
    return plan


def _hashes(folder: Path) -> list[str]:
    """The hashes of the plans that the database was written for; empty in a study of an older gonio."""
    found = dict(_rows(folder, "artifacts")[0])
    stated = json.loads(found["plan"]).get("hashes", []) if "plan" in found else []
    return [str(each) for each in stated] if isinstance(stated, list) else []


def _check_hash(folder: Path, plan: StudyPlan) -> None:
    """Refuse a database that was written for another plan than the one beside it."""
    hashes = _hashes(folder)
    if hashes and plan.hash not in hashes:
        why = f"{DATABASE} was written for another plan than {_PLAN}"
        raise StudyError(str(folder), why, "Put back the database of this study, or start a new study.")


def _add_hash(folder: Path, plan: StudyPlan) -> None:
    hashes = _hashes(folder)
    if plan.hash not in hashes:
        _commit(folder, "artifacts", ("plan", json.dumps({"hashes": [*hashes, plan.hash]})))


def _write_plan(folder: Path, plan: StudyPlan) -> None:
    """Replace the plan atomically: a crash leaves the old or the new one."""
    text = json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n"
    path = folder / _PLAN
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(text, path)
        flush_folder(folder)
