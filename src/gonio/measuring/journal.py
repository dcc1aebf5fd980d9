"""A journal of rows: what a measurement that was stopped has done, so that the next one goes on from there."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from gonio.errors import InvalidArgumentError, UnreadableFileError
from gonio.measuring.reading.configurations import CONFIGURATIONS
from gonio.measuring.reading.source import CheckpointPart, files_read

SCHEMA = "gonio.journal/1"

Row = TypeVar("Row")


class Journal(Generic[Row]):
    """The rows that were made, by number, in a file with a line for each.

    The first line says what is measured: files with their sizes and times, options and versions. Each line has a
    checksum; one that a kill cut off at the end is dropped. Lines are data: nothing in them runs.

    Args:
        path: of the file; made if there is none.
        about: what is measured, as JSON-able data.
        kind: the dataclass of the rows, whose fields are numbers, texts, None and tuples of these.

    Raises:
        InvalidArgumentError: if the file is the journal of another measurement.
        UnreadableFileError: if it is no journal, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any], kind: type[Row]) -> None:
        self.path, self.rows = Path(path), dict[int, Row]()
        self._kind = kind
        head = {"schema": SCHEMA, **json.loads(json.dumps(about))}
        if self.path.exists() and not self.path.is_file():
            raise UnreadableFileError(str(self.path), "it is no regular file", "Name another one.")
        end = self._read(head) if self.path.is_file() and self.path.stat().st_size else 0
        self._file = self.path.open("r+b" if end else "wb")
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write(head)

    def add(self, number: int, row: Row) -> None:
        """Write a row, so that a kill does not lose it."""
        self._write({"number": number, "row": asdict(row)})  # type: ignore[call-overload]

    def __enter__(self) -> Journal[Row]:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of what a write that failed has left; each row was flushed before
            self._file.close()

    def _write(self, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, ensure_ascii=False).encode()
        try:
            self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
            self._file.flush()
        except OSError as error:  # of a write, which does not name its file
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _read(self, head: Mapping[str, Any]) -> int:
        """Read the rows; the number of bytes that hold whole lines."""
        end, kind = 0, TypeAdapter(self._kind)
        for number, content, size in self._lines():
            if not number:
                self._check_head(content, head)
            else:
                try:
                    self.rows[int(content["number"])] = kind.validate_python(content["row"])
                except (KeyError, TypeError, ValueError) as error:
                    raise self._unreadable(f"its line {number + 1} is no row") from error
            end += size
        return end

    def _lines(self) -> Iterator[tuple[int, Any, int]]:
        """Number, content and bytes of each whole line."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                whole = line.endswith(b"\n")
                mark, _, text = line.rstrip(b"\n").partition(b" ")
                if mark != b"%08x" % zlib.crc32(text):
                    if not whole and number:
                        return  # cut off by a kill
                    problem = f"its line {number + 1} is damaged" if number else "it is no journal of gonio"
                    raise self._unreadable(problem)
                try:
                    content = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise self._unreadable(f"its line {number + 1} is no JSON") from error
                yield number, content, len(line)

    def _unreadable(self, problem: str) -> UnreadableFileError:
        return UnreadableFileError(str(self.path), problem, "Name another file, or delete this one.")

    def _check_head(self, found: Any, head: Mapping[str, Any]) -> None:
        if found == head:
            return
        other = [key for key in head if not isinstance(found, dict) or found.get(key) != head[key]]
        raise InvalidArgumentError(
            "a journal goes on with the same measurement",
            f"{self.path.name}, of another one (other {', '.join(other) or 'keys'})",
            "Name another file, or delete this one.",
        )


def stamps(source: str | os.PathLike[str], *, besides: str | os.PathLike[str]) -> list[tuple[str, int, int]]:
    """Name, bytes and time of the last change of the files that a measurement of this path reads.

    Args:
        besides: a file that is left out: the journal, which may lie in the same folder.
    """
    path, left_out = Path(source), Path(besides).absolute()
    folder = path if path.is_dir() else path.parent
    try:
        files = [file for _, file in files_read(path)]
    except OSError:  # of this kind the values may lie in any file
        files = [*folder.rglob("*")] if path.is_dir() else [path, *(folder / name for name in CONFIGURATIONS)]
    made = [
        (file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(set(files))
        if file.is_file() and file.absolute() != left_out
    ]
    key = source.key if isinstance(source, CheckpointPart) else ""
    return [*made, (f"key {key}", 0, 0)] if key else made
