"""A study's folder: the plan as JSON, and one SQLite database of which a run is either a row or nothing.

A run is finished exactly when its row is committed. There is no state "running" that a killed process
could leave behind, and nothing to repair: what has no row is run again, from its seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gonio.compare.database import DATABASE, prepare, select, transaction
from gonio.compare.lock import locked
from gonio.compare.plan import Plan, RecipeEntry, extended
from gonio.compare.results import Results, RunRecord
from gonio.compare.summary import CostRow, summarise
from gonio.compare.trials import Trials
from gonio.errors import StudyError

__all__ = ["Study"]

_PLAN = "plan.json"
_LOOKS = "CREATE TABLE IF NOT EXISTS looks (runs INTEGER PRIMARY KEY)"


class Study:
    """A comparison on disk.

    Any number of processes may read it, also while it runs. :func:`gonio.compare.run` alone writes runs to it; whoever
    reads its results leaves a mark that they were looked at.
    The folder must be on a local file system: SQLite's write-ahead log does not work over NFS.

    Attributes:
        path: the folder.
        plan: what was decided before the first run.

    Example:
        >>> import tempfile
        >>> plan = gonio.compare.make_plan(["orthogonal-init"], seeds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     study = gonio.compare.Study.create(folder, plan)
        ...     len(study.missing()), gonio.compare.Study.open(folder).plan == plan
        (4, True)
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan

    @classmethod
    def create(cls, path: str | Path, plan: Plan) -> Study:
        """A new study, or the one that is there already if its plan is the same or is extended by `plan`.

        Raises:
            PlanChangedError: the folder's plan differs in more than added seeds and recipes.
            StudyLockedError: another process is running the study.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            return cls.create_locked(folder, plan)

    @classmethod
    def create_locked(cls, folder: Path, plan: Plan) -> Study:
        """:meth:`create` for a caller that holds the folder's lock."""
        prepare(folder)
        ((finished,),) = select(folder, "SELECT COUNT(*) FROM runs")
        if (folder / _PLAN).exists():
            plan = extended(_read_plan(folder), plan, path=str(folder), finished=finished)
        _write_plan(folder, plan)
        return cls(folder, plan)

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
        with transaction(folder):
            return cls(folder, _read_plan(folder))

    def missing(self) -> list[tuple[RecipeEntry, int]]:
        """The runs to do: without a row, or failed. What was an accident succeeds the next time."""
        rows = set(self._select("SELECT hash, seed FROM runs WHERE status != 'failed'"))
        return [(entry, seed) for entry, seed in self.plan.grid if (entry.hash, seed) not in rows]

    def scratch(self, entry: RecipeEntry, seed: int) -> Path:
        """Where a run may keep its files until it is finished."""
        return self.path / "work" / f"{entry.hash[:16]}-{seed}"

    def add(self, entry: RecipeEntry, record: RunRecord, versions: Mapping[str, str]) -> None:
        """Commit one run; when this returns, no crash can lose it."""
        content = record.to_dict()
        seconds = content.pop("seconds")
        row = (entry.hash, record.seed, record.status, json.dumps(content), seconds, json.dumps(dict(versions)))
        with transaction(self.path) as database:
            database.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)

    def add_costs(self, rows: Sequence[CostRow]) -> None:
        """Commit measured cost ratios, all or none."""
        with transaction(self.path) as database:
            database.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?)", rows)

    def without_costs(self) -> list[RecipeEntry]:
        """The recipes, baseline excluded, whose cost has not been measured; it cannot be of a script."""
        if self.plan.scripted or self.plan.self_test:
            return []
        found = {hash_ for (hash_,) in self._select("SELECT DISTINCT hash FROM costs")}
        return [entry for entry in self.plan.recipes[1:] if entry.hash not in found]

    def runs(self) -> tuple[RunRecord, ...]:
        """Every run that has a row, in the plan's order of recipes and seeds."""
        rows = self._select("SELECT hash, seed, record, seconds FROM runs")
        found = {(hash_, seed): _record(text, seconds) for hash_, seed, text, seconds in rows}
        return tuple(
            found[entry.hash, seed]
            for entry in self.plan.recipes
            for seed in self.plan.seeds
            if (entry.hash, seed) in found
        )

    @property
    def trials(self) -> Trials:
        """The trials of tuning."""
        return Trials(self.path, self.plan)

    def transferred(self) -> dict[str, Any] | None:
        """The examples of the transfer attack as text: None if they were not made, {} if that failed."""
        if self.plan.threat is None:
            return None
        rows = select(self.path, "SELECT content FROM artifacts WHERE name = 'transferred'")
        return dict(json.loads(rows[0][0])) if rows else None

    def keep_transferred(self, content: Mapping[str, Any]) -> None:
        """Commit the examples of the transfer attack."""
        with transaction(self.path) as database:
            database.execute("INSERT INTO artifacts VALUES ('transferred', ?)", (json.dumps(dict(content)),))

    def results(self) -> Results:
        """What the runs so far show; see :class:`Results`. Counts as a look at them: see :meth:`looks`.

        Raises:
            MissingExtraError: scipy is not installed.
        """
        costs = self._select("SELECT hash, kind, block, ratio FROM costs")
        used = self._select("SELECT DISTINCT versions FROM runs")
        runs = self.runs()
        self._look(sum(run.status != "failed" for run in runs))
        found = summarise(self.plan, runs, costs, [json.loads(text) for (text,) in used], self.looks())
        return replace(found, tuning=self.trials.summary())

    def looks(self) -> tuple[int, ...]:
        """How many runs there were each time that somebody looked at results that were new."""
        with transaction(self.path) as database:
            known = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'looks'").fetchone()
            rows = database.execute("SELECT runs FROM looks ORDER BY runs").fetchall() if known else []
        return tuple(count for (count,) in rows)

    def _look(self, count: int) -> None:
        """Remember that results of so many runs were seen, where the study can be written to."""
        if count and count not in self.looks() and os.access(self.path, os.W_OK):
            with suppress(StudyError), transaction(self.path) as database:  # a full disk hides no results
                database.execute(_LOOKS)
                database.execute("INSERT OR IGNORE INTO looks VALUES (?)", (count,))

    def _select(self, query: str) -> list[Any]:
        return select(self.path, query)


def _record(text: str, seconds: float | None) -> RunRecord:
    return RunRecord(**json.loads(text), seconds=seconds)


def _read_plan(folder: Path) -> Plan:
    try:
        data: dict[str, Any] = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
        plan = Plan.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{_PLAN} cannot be read: {error}"
        raise StudyError(str(folder), why, "Restore it, or start a new study.") from error
    if plan.hash != data.get("hash"):
        why = f"{_PLAN} does not have the hash that it states"
        raise StudyError(str(folder), why, "It was edited; restore it, or start a new study.")
    return plan


def _write_plan(folder: Path, plan: Plan) -> None:
    """Replace the plan so that a crash leaves the old or the new one, never a part."""
    text = json.dumps(plan.to_dict(), indent=1, ensure_ascii=False) + "\n"
    path, draft = folder / _PLAN, folder / f"{_PLAN}.new"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
