"""The one SQLite file of a study: its tables, and transactions that are durable once they are committed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gonio.errors import StudyError

__all__ = ["DATABASE", "VERSION", "prepare", "select", "transaction"]

DATABASE, VERSION = "study.db", 2
# Version 2 added `trials`, `choices` and `artifacts`.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    hash TEXT NOT NULL, seed INTEGER NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL,
    seconds REAL, versions TEXT NOT NULL, PRIMARY KEY (hash, seed)
);
CREATE TABLE IF NOT EXISTS costs (
    hash TEXT NOT NULL, kind TEXT NOT NULL, block INTEGER NOT NULL, ratio REAL NOT NULL,
    PRIMARY KEY (hash, kind, block)
);
CREATE TABLE IF NOT EXISTS trials (
    hash TEXT NOT NULL, number INTEGER NOT NULL, vals TEXT NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL,
    seconds REAL, versions TEXT NOT NULL, PRIMARY KEY (hash, number)
);
CREATE TABLE IF NOT EXISTS choices (hash TEXT NOT NULL PRIMARY KEY, vals TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS artifacts (name TEXT NOT NULL PRIMARY KEY, content TEXT NOT NULL);
"""


@contextmanager
def transaction(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection for one transaction: committed at the end of the block, or rolled back by an exception.

    Raises:
        StudyError: the database cannot be used, or is of a newer gonio.
    """
    path = folder / DATABASE
    # a study that was mailed or archived may lie where nothing can be written, not even SQLite's own files
    fixed = path.exists() and not os.access(folder, os.W_OK)
    try:
        where = f"{path.absolute().as_uri()}?immutable=1" if fixed else path.absolute().as_uri()
        with closing(sqlite3.connect(where, uri=True)) as database, database:
            _check(folder, database, fixed=fixed)
            yield database
    except sqlite3.DatabaseError as error:
        raise StudyError(str(folder), f"{DATABASE} cannot be used: {error}", "Check the disk and the file.") from error


def _check(folder: Path, database: sqlite3.Connection, *, fixed: bool) -> None:
    """Set what makes a commit durable, and refuse a format of the future."""
    if not fixed:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # NORMAL may lose the last commits at a power cut
    found = database.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        why = f"{DATABASE} has format {found}, and this gonio reads up to {VERSION}"
        raise StudyError(str(folder), why, "Use a newer gonio.")


def prepare(folder: Path) -> None:
    """Make the tables that are missing, of a new study or one of an older gonio."""
    with transaction(folder) as database:
        if database.execute("PRAGMA user_version").fetchone()[0] < VERSION:
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version = {VERSION}")


def select(folder: Path, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
    """The rows of a query."""
    with transaction(folder) as database:
        return database.execute(query, values).fetchall()
