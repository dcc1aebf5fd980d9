"""Plain data with line numbers, and the collection of what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gonio.errors import RecipeError

__all__ = ["MOST_DEPTH", "Document", "Location", "Problems", "check_scalar", "plain"]

# Refusing deeper data before anything is built from it keeps time and memory bounded.
MOST_DEPTH = 16

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """Plain data and where each part of it was written.

    Attributes:
        data: dicts, lists, text, numbers, booleans and None.
        origin: the file's name, for messages.
        lines: the 1-based line of each location, e.g. `("swap", 0, "use")`; empty for data that was
            not read from text.
    """

    data: Any
    origin: str
    lines: dict[Location, int] = field(default_factory=dict, repr=False)

    def line(self, location: Location) -> int | None:
        """The line of a location, or of the nearest part around it that has one."""
        for end in range(len(location), -1, -1):
            if location[:end] in self.lines:
                return self.lines[location[:end]]
        return None

    def at(self, location: Location) -> str:
        """`file:line` and the location, as an error names it."""
        line = self.line(location)
        place = self.origin if line is None else f"{self.origin}:{line}"
        return f"{place}: {_spelled(location)}" if location else place


class Problems:
    """Collects everything that is wrong with one document, so that it is reported at once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: list[tuple[int, str]] = []

    def add(self, location: Location, message: str) -> None:
        """Record one problem."""
        self._found.append((self._document.line(location) or 0, f"{self._document.at(location)}: {message}"))

    def raise_if_any(self, error: type[RecipeError] = RecipeError) -> None:
        """Raise one error that lists every problem in the order of their lines.

        Raises:
            RecipeError: if anything was recorded.
        """
        if self._found:
            raise error(self._document.origin, [text for _, text in sorted(self._found, key=lambda row: row[0])])


def plain(data: Any, *, origin: str) -> Document:
    """The same checks for data that is no text, e.g. a dict from a user's program.

    Raises:
        RecipeError: for values that a recipe file could not hold.
    """
    problems = Problems(Document(data, origin))
    _check_plain(data, (), problems)
    problems.raise_if_any()
    return Document(data, origin)


def _check_plain(value: Any, at: Location, problems: Problems) -> None:
    if len(at) > MOST_DEPTH:
        problems.add(at, f"is nested more than {MOST_DEPTH} deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            here = (*at, str(key))
            if not isinstance(key, str):
                problems.add(here, f"a key must be text; found {type(key).__name__}")
            check_scalar(str(key), here, problems)
            _check_plain(item, here, problems)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, (*at, index), problems)
    elif value is None or isinstance(value, bool | int | float | str):
        check_scalar(value, at, problems)
    else:
        problems.add(at, f"must be text, a number, true, false, null, a list or a mapping; found {_kind(value)}")


def check_scalar(value: Any, at: Location, problems: Problems) -> None:
    """Finite numbers, printable text."""
    if isinstance(value, float) and not math.isfinite(value):
        problems.add(at, "must be a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        problems.add(at, "must be a number of at most 18 digits")
    if isinstance(value, str) and not all(c.isprintable() or c in "\n\t" for c in value):
        problems.add(at, "must be printable text; found a control or invisible character")


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def _spelled(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text
