"""Recipe files as plain data with line numbers, and one error for everything that is wrong in a file.

The format is the part of YAML that all readers agree on: one document of mappings with text keys, lists and plain
scalars by the rules of YAML 1.2 (`1e-4` is a number and `no` is text). Tags, anchors and aliases are refused, so no
file can name code or expand to more than it holds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gonio.errors import RecipeError

_MOST_BYTES = 256 * 1024
_MOST_DEPTH = 16  # of nested lists and mappings; a recipe needs 6

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """Plain data and the line of each of its parts.

    Attributes:
        data: dicts, lists, text, numbers, booleans and None.
        origin: the file's name, for messages.
        lines: the 1-based line of each location, e.g. `("swap", 0, "use")`; empty for data that is not from a file.
    """

    data: Any
    origin: str
    lines: dict[Location, int] = field(default_factory=dict, repr=False)

    def line(self, location: Location) -> int | None:
        """The line of a location, or of the smallest part around it that has one."""
        around = (location[:end] for end in range(len(location), -1, -1))
        return next((self.lines[part] for part in around if part in self.lines), None)

    def at(self, location: Location) -> str:
        """`file:line: location`, as errors write it."""
        line = self.line(location)
        place = self.origin if line is None else f"{self.origin}:{line}"
        text = ""
        for part in location:
            text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
        return f"{place}: {shortened(text, quote=False)}" if location else place


class Problems:
    """Collects the problems of one document, so that one error reports all of them."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._found: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, location: Location, message: str) -> None:
        """Record one problem."""
        self._found.append((self.document.line(location) or 0, f"{self.document.at(location)}: {message}"))

    def raise_if_any(self) -> None:
        """Raise one RecipeError with the problems, if there are any, in the order of their lines."""
        texts = [text for _, text in sorted(self._found, key=lambda row: row[0])]
        if texts:
            raise RecipeError(self.document.origin, texts)


def shortened(value: Any, *, quote: bool = True) -> str:
    """A value for a message: its repr or its text, of at most 80 characters."""
    text = repr(value) if quote else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def read(path: Path) -> str:
    """Read the text of a recipe file."""
    if not path.is_file():
        why = "it is not a regular file" if path.exists() else "there is no such file"
        raise RecipeError(str(path), [f"{path}: cannot be read: {why}"])
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MOST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [f"{path}: cannot be read: {error}"]) from error
    _check_size(len(raw), str(path))
    return text


def parse(text: str, *, origin: str) -> Document:
    """Read YAML text; errors call it `origin`."""
    _check_size(len(text), origin)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(origin, [_syntax_error(error, text, origin)]) from error
    lines: dict[Location, int] = {}
    problems = Problems(Document(None, origin, lines))
    data = None if root is None else _construct(root, (), lines, problems)
    return _checked(Document(data, origin, lines), problems)


def from_data(data: Any, *, origin: str) -> Document:
    """Data from a program, with the same checks as a file."""
    return _checked(document := Document(data, origin), Problems(document))


def dump(data: Any) -> str:
    """Write plain data as YAML text; :func:`parse` reads back equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    """Composes plain nodes only; refuses the rest before it costs time or memory."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self.depth += 1
        why = None
        if isinstance(event, yaml.AliasEvent):
            why = f"the alias *{event.anchor} is not allowed; write the value out"
        elif event.anchor:
            why = f"the anchor &{event.anchor} is not allowed; write the value out where it is used"
        elif event.tag:
            why = f"the tag {event.tag!r} is not allowed; a recipe holds plain text, numbers and lists"
        elif self.depth > _MOST_DEPTH + 1:
            why = f"nested more than {_MOST_DEPTH} deep"
        if why:
            raise _RefusedError(problem=why, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _RefusedError(yaml.MarkedYAMLError):
    """Valid YAML that is not part of the format."""


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


# The core schema of YAML 1.2 (§10.3.2). PyYAML's own resolvers follow 1.1, where `1e-4` is text, `no` is false,
# `1:30` is 90 and `2018-04-22` is a date. Infinity and NaN are matched so that they can be refused by name.
_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", rf"{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def _check_size(size: int, origin: str) -> None:
    if size > _MOST_BYTES:
        raise RecipeError(origin, [f"{origin}: is larger than {_MOST_BYTES // 1024} KiB, the most a recipe may be"])


def _syntax_error(error: yaml.YAMLError, text: str, origin: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{origin}:{line}: is not valid YAML: the character {chr(error.character)!r} is not allowed"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{origin}: is not valid YAML: {error}"
    what = str(getattr(error, "problem", None) or "syntax error")
    if what == "but found another document":
        what = "a recipe is one YAML document; found a second one"
    elif not isinstance(error, _RefusedError):
        what = f"is not valid YAML: {what}"
    return f"{origin}:{mark.line + 1}: {what}"


def _construct(node: yaml.Node, at: Location, lines: dict[Location, int], problems: Problems) -> Any:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*at, index), lines, problems) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(key_node)
        here, line = (*at, str(key)), key_node.start_mark.line + 1
        if here in lines:
            problems.add(here, f"the key occurs twice, here and in line {line}; keep one")
            continue
        lines[here] = line
        result[key] = _construct(value_node, here, lines, problems)
    return result


def _scalar(node: yaml.Node) -> Any:
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":  # int() of a very long literal is quadratic, and raises above 4300 digits
            return int(node.value) if len(node.value) <= 20 else math.inf
        case "float":
            return float(node.value.replace(".inf", "inf").replace(".nan", "nan").lower())
        case "seq" | "map":  # as a key
            return ()
    return node.value


def _checked(document: Document, problems: Problems) -> Document:
    _check(document.data, (), problems)
    problems.raise_if_any()
    return document


def _check(value: Any, at: Location, problems: Problems) -> None:
    """Text keys, finite numbers, printable text, bounded depth."""
    if len(at) > _MOST_DEPTH:
        problems.add(at, f"nested more than {_MOST_DEPTH} deep")
        return
    match value:
        case dict():
            for key, item in value.items():
                if isinstance(key, str):
                    _check(key, (*at, key), problems)
                else:
                    problems.add((*at, str(key)), f"a key must be text; found {type(key).__name__}")
                _check(item, (*at, str(key)), problems)
        case list() | tuple():
            for index, item in enumerate(value):
                _check(item, (*at, index), problems)
        case float() if not math.isfinite(value):
            problems.add(at, "must be a finite number")
        case int() if abs(value) >= 2**63:
            problems.add(at, "must be a number of at most 18 digits")
        case str() if not all(c.isprintable() or c in "\n\t" for c in value):
            problems.add(at, "must be printable text; found a control or invisible character")
        case None | bool() | int() | float() | str():
            pass
        case _:
            found = f"an object of type {type(value).__name__}"
            problems.add(at, f"must be text, a number, true, false, null, a list or a mapping; found {found}")
