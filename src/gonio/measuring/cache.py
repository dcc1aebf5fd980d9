"""A cache of measured files: the rows of the same content, options and versions are read instead of computed.

The key is a hash of every byte of the files that a measurement reads. Sizes and times of files are not part of it:
an edit in place can keep them, and file systems differ in what they record. Reading a file takes a small part of the
time of measuring it. What the cache holds is data: an entry that is too large, damaged or of another form is measured
anew and replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from gonio.errors import GonioError
from gonio.escaping import write_text
from gonio.measuring.engines import versions
from gonio.measuring.reading.entry import TensorEntry
from gonio.measuring.reading.source import CheckpointPart, Source, files_read
from gonio.messages import Message, say

SCHEMA = "gonio.cache/1"
LARGEST = 1 << 26  # bytes of an entry
MOST = 1 << 28  # bytes of all entries; the ones that were not used for longest are deleted
_PIECE = 1 << 24  # bytes that a thread hashes at once
_PACKAGES = ("numpy", "safetensors", "gguf", "h5py")  # that read values, besides torch

Row = TypeVar("Row")


class Cache(Generic[Row]):
    """The rows of a measurement, by number: all of them from the cache, or none; new ones are written at the end.

    Args:
        folder: made if there is none.
        sources: files, all of which are hashed.
        options: all that changes a figure.
        kind: the dataclass of the rows.

    Attributes:
        rows: those that the cache has; `made`: when they were measured.
    """

    def __init__(
        self, folder: str | os.PathLike[str], sources: Sequence[Source], kind: type[Row], options: Mapping[str, Any]
    ) -> None:
        self.folder, self.rows, self.made = Path(folder), dict[int, Row](), ""
        self._sources, self._expected = sources, tuple[str, ...]()
        self._adapter = TypeAdapter(list[kind])  # type: ignore[valid-type]
        keys = [source.key if isinstance(source, CheckpointPart) else "" for source in sources]
        self._about = json.dumps([SCHEMA, kind.__name__, keys, dict(options), _program()], default=list)
        self._key = self._hashed()

    def opened(self, entries: Sequence[TensorEntry]) -> Cache[Row]:
        """The cache, with its rows if they are of these tensors."""
        self._expected = tuple(entry.name for entry in entries)
        with suppress(OSError, ValueError, RecursionError):
            self._read()
        return self

    def add(self, number: int, row: Row) -> None:
        """Take a row that was measured."""
        self.rows[number] = row

    @property
    def notes(self) -> tuple[Message, ...]:
        """That the figures are not new, and of when they are; nothing if they are new."""
        return (say("The figures are from the cache, measured on {date}.", date=self.made),) if self.made else ()

    def __enter__(self) -> Cache[Row]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write the rows if every tensor was read and the files are still the same."""
        rows: list[Any] = [*self.rows.values()]
        whole = kind is None and not self.made and len(rows) == len(self._expected)
        read = not any("failed" in row.marks for row in rows)  # the next time may do better
        if whole and read and self._key and self._hashed() == self._key:
            with suppress(OSError):
                self._write()

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._key}.json"

    def _read(self) -> None:
        """Take the rows of an entry.

        Raises: OSError, ValueError if there is none, or if it is damaged, too large or of other tensors.
        """
        if not self._key or not stat.S_ISREG(self._path.stat().st_mode) or self._path.stat().st_size > LARGEST:
            return
        head, _, text = self._path.read_bytes().partition(b"\n")
        mark, _, made = head.decode().partition(" ")
        rows: list[Any] = self._adapter.validate_json(text, strict=True)
        if mark == _mark(text) and tuple(row.name for row in rows) == self._expected:
            self.made = f"{datetime.fromisoformat(made).astimezone():%Y-%m-%d %H:%M}"
            self.rows = dict(enumerate(rows))
            with suppress(OSError):
                os.utime(self._path)

    def _write(self) -> None:
        rows: list[Any] = [self.rows[number] for number in range(len(self._expected))]
        text = json.dumps([asdict(row) for row in rows])
        made = datetime.now().astimezone().isoformat(timespec="seconds")
        if len(text) >= LARGEST - 200:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(f"{_mark(text.encode())} {made}\n{text}", self._path)
        _bound(self.folder)

    def _hashed(self) -> str:
        """A hash of the options and of all bytes of all files; empty if a source cannot be kept."""
        whole = hashlib.sha256(self._about.encode())
        try:
            for source in self._sources:
                for name, file in files_read(source):
                    whole.update(f"\0{name}\0".encode("utf-8", "surrogateescape") + _digest(file))
        except (OSError, GonioError):
            return ""  # what is wrong with the source, reading it says
        return whole.hexdigest()


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder that `gonio measure` uses: GONIO_CACHE (`off`: None), else gonio in XDG_CACHE_HOME or `~/.cache`."""
    named = environment.get("GONIO_CACHE", "")
    if named == "off":
        return None
    home = environment.get("XDG_CACHE_HOME", "")
    return Path(named) if named else Path(home if os.path.isabs(home) else Path.home() / ".cache") / "gonio"


def _digest(path: Path) -> bytes:
    """The hash of the hashes of a file's pieces, which threads compute.

    Raises: OSError if it is no regular file.
    """
    with path.open("rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")

        def piece(start: int) -> bytes:
            with path.open("rb", buffering=0) as own:
                own.seek(start)
                return hashlib.sha256(own.read(_PIECE)).digest()

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = b"".join(pool.map(piece, range(0, found.st_size, _PIECE)))
    return hashlib.sha256(found.st_size.to_bytes(8, "big") + parts).digest()


def _mark(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


@cache
def _program() -> tuple[Any, ...]:
    """Versions, and a hash of gonio's own code, which can change without its version."""
    code, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    found = {**versions()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found, code.hexdigest()


def _bound(folder: Path) -> None:
    """Delete the entries that were not used for longest, until all are within the bound; no other file."""
    entries = [path for path in folder.glob("*.json") if len(path.stem) == 64 and not path.is_symlink()]
    found = sorted(((path.stat(), path) for path in entries), key=lambda pair: pair[0].st_mtime_ns, reverse=True)
    total = 0
    for about, path in found:
        total += about.st_size
        if total > MOST:
            path.unlink(missing_ok=True)
