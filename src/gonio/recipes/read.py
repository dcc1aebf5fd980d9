"""Plain data to the fields of a recipe, with every mistake of the file in one error."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from gonio.errors import closest, listing
from gonio.recipes.document import Document, Problems
from gonio.recipes.names import VERBS
from gonio.recipes.rule import Rule, read_rule

__all__ = ["Header", "read_recipe"]

# Names become folder names, file names and labels.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$"


class Header(BaseModel):
    """The top level of a recipe file; the rules are read one by one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, StringConstraints(pattern=_NAME)]
    source: str = ""
    description: str = ""
    init: list[Any] = []
    swap: list[Any] = []
    parametrize: list[Any] = []
    penalty: list[Any] = []


def read_recipe(document: Document) -> dict[str, Any]:
    """The fields of a recipe.

    Raises:
        RecipeError: with every problem of the document, each with its line.
    """
    problems = Problems(document)
    if not isinstance(document.data, dict):
        problems.add((), f"a recipe is a mapping that begins with `name: …`; found {_kind(document.data)}")
        problems.raise_if_any()
    _check_header(document.data, problems)
    rules = {verb: _read_rules(verb, document, problems) for verb in VERBS}
    problems.raise_if_any()
    head = {key: document.data[key] for key in ("name", "source", "description") if key in document.data}
    return {**head, **rules}


def _check_header(data: dict[str, Any], problems: Problems) -> None:
    if data.get("name") == "baseline" and any(data.get(verb) for verb in VERBS):
        problems.add(("name",), "`baseline` is the name of the unchanged model; choose another")
    try:
        Header.model_validate(data)
    except ValidationError as error:
        for row in error.errors():
            problems.add(tuple(row["loc"]), _header_message(row))


def _header_message(row: Any) -> str:
    key = str(row["loc"][0])
    match row["type"]:
        case "extra_forbidden":
            near = closest(key, list(Header.model_fields))
            hint = f"Did you mean {listing(near)}?" if near else f"Known: {listing(list(Header.model_fields))}."
            return f"a recipe has no key {key!r}. {hint}"
        case "missing":
            return f"a recipe needs the key {key!r}"
        case "string_pattern_mismatch":
            return (
                f"must begin with a letter or digit and hold at most 64 letters, digits, '.', '_', '+' and '-'; "
                f"found {row['input']!r:.80}"
            )
        case "list_type":
            return f"must be a list of rules, each beginning with `-`; found {_kind(row['input'])}"
    return f"{row['msg'].removeprefix('Input ')}; found {_kind(row['input'])}"


def _read_rules(verb: str, document: Document, problems: Problems) -> tuple[Rule, ...]:
    raw = document.data.get(verb, [])
    if not isinstance(raw, list):
        return ()  # the header's check has said so
    found = [
        read_rule(verb, rule, (verb, index), problems, line=document.line((verb, index)))
        for index, rule in enumerate(raw)
    ]
    return tuple(rule for rule in found if rule is not None)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
    return repr(value)[:80]
