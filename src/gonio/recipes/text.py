"""YAML text to plain data with line numbers; no tags, no aliases, no surprises.

The format is the part of YAML that means the same to everybody: mappings with text keys, lists, and
plain scalars read by the rules of YAML 1.2 (so `1e-4` is a number and `no` is a word).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from gonio.errors import RecipeError
from gonio.recipes.document import MOST_DEPTH, Document, Location, Problems, check_scalar

__all__ = ["dump", "parse", "read"]

# A recipe is written by hand; what is larger is a mistake or an attack.
_MOST_BYTES = 256 * 1024


def read(path: Path) -> str:
    """The text of a recipe file.

    Raises:
        RecipeError: if it is missing, not a regular file, too large or not UTF-8.
    """
    if not path.is_file():
        why = "it is not a regular file" if path.exists() else "there is no such file"
        raise RecipeError(str(path), [f"{path}: cannot be read: {why}"])
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MOST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [f"{path}: cannot be read: {error}"]) from error
    if len(raw) > _MOST_BYTES:
        raise RecipeError(str(path), [f"{path}: is larger than {_MOST_BYTES // 1024} KiB, the most a recipe may be"])
    return text


def parse(text: str, *, origin: str) -> Document:
    """Read YAML text.

    Args:
        text: one YAML document.
        origin: the name that errors give the file.

    Raises:
        RecipeError: for broken YAML, and for what the format leaves out: tags, anchors and aliases,
            several documents, duplicate keys, keys that are not text, numbers that are not finite,
            control characters.

    Example:
        >>> from gonio.recipes.text import parse
        >>> document = parse("a: {b: 1e-4}", origin="demo.yaml")
        >>> document.data, document.line(("a", "b"))
        ({'a': {'b': 0.0001}}, 1)
    """
    if len(text) > _MOST_BYTES:
        raise RecipeError(origin, [f"{origin}: is larger than {_MOST_BYTES // 1024} KiB, the most a recipe may be"])
    try:
        _refuse_the_rest_of_yaml(text, origin)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(origin, [_syntax(error, text, origin)]) from error
    lines: dict[Location, int] = {}
    problems = Problems(Document(None, origin, lines))
    data = None if root is None else _built(root, (), lines, problems)
    problems.raise_if_any()
    return Document(data, origin, lines)


def dump(data: Any) -> str:
    """Plain data as YAML text that :func:`parse` reads back to the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


# The core schema of YAML 1.2 (§10.3.2). PyYAML's own resolvers follow 1.1, where `1e-4` is text,
# `no` is false, `1:30` is 90 and `2018-04-22` is a date. Infinity and NaN are matched so that they
# can be refused by name.
_CORE = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
for _name, (_pattern, _first) in _CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def _refuse_the_rest_of_yaml(text: str, origin: str) -> None:
    """Reads the flat event stream, which costs no recursion and expands no alias."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        why = _refused(event, depth, documents)
        if why:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise RecipeError(origin, [f"{origin}:{line}: {why}"])


def _refused(event: yaml.Event, depth: int, documents: int) -> str | None:
    if documents > 1:
        return "a recipe is one YAML document; found a second one"
    if depth > MOST_DEPTH:
        return f"is nested more than {MOST_DEPTH} deep; a recipe needs 6 levels"
    if isinstance(event, yaml.AliasEvent):
        return f"the alias *{event.anchor} is not part of the format; write the value out"
    anchor = getattr(event, "anchor", None)
    if anchor:
        return f"the anchor &{anchor} is not part of the format; write the value out where it is used"
    tag = getattr(event, "tag", None)
    if tag:
        return f"the tag {tag!r} is not part of the format; a recipe holds plain text, numbers and lists"
    return None


def _syntax(error: yaml.YAMLError, text: str, origin: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        what = getattr(error, "problem", None) or getattr(error, "context", None) or "syntax error"
        return f"{origin}:{mark.line + 1}: is not valid YAML: {what}"
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{origin}:{line}: is not valid YAML: the character {chr(error.character)!r} is not allowed"
    return f"{origin}: is not valid YAML: {error}"


def _built(node: yaml.Node, at: Location, lines: dict[Location, int], problems: Problems) -> Any:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _built_mapping(node, at, lines, problems)
    if isinstance(node, yaml.SequenceNode):
        return [_built(item, (*at, index), lines, problems) for index, item in enumerate(node.value)]
    value = _scalar(node) if isinstance(node, yaml.ScalarNode) else None
    check_scalar(value, at, problems)
    return value


def _built_mapping(
    node: yaml.MappingNode, at: Location, lines: dict[Location, int], problems: Problems
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else key_node.tag
        here = (*at, str(key))
        line = key_node.start_mark.line + 1
        if here in lines:
            problems.add(here, f"is written twice, here and in line {line}; keep one")
            continue
        lines[here] = line
        if not isinstance(key, str) or not isinstance(key_node, yaml.ScalarNode):
            problems.add(here, "a key must be text")
            continue
        check_scalar(key, here, problems)
        result[key] = _built(value_node, here, lines, problems)
    return result


def _scalar(node: yaml.ScalarNode) -> Any:
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":
            return _integer(node.value)
        case "float":
            return float(node.value.replace(".inf", "inf").replace(".nan", "nan").lower())
    return node.value


def _integer(text: str) -> int | float:
    # int() of a very long literal is quadratic and raises above 4300 digits; no count is that large.
    return int(text) if len(text) <= 20 else math.inf
