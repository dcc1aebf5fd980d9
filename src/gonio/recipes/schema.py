"""The recipe format as JSON Schema, for editors and other programs."""

from __future__ import annotations

from typing import Any

from gonio.recipes.names import VERBS, Entry, catalogue, objects_of
from gonio.recipes.options import Option
from gonio.recipes.read import Header

__all__ = ["json_schema"]

_WHERE = {
    "type": ["string", "null"],
    "description": "glob, 're:…', 'type:…', 'stem', 'classifier'; null for every module",
}


def json_schema() -> dict[str, Any]:
    """See :meth:`gonio.Recipe.json_schema`."""
    schema = Header.model_json_schema()
    for verb in VERBS:
        rules = [_rule(verb, use, entry) for use, entry in catalogue(verb).items()]
        items = {"oneOf": [_keep(), *rules]}
        schema["properties"][verb] = {
            "type": "array",
            "items": items,
            "description": f"rules of {verb}, first match wins",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "gonio recipe"}


def _keep() -> dict[str, Any]:
    return _mapping({"where": _WHERE, "use": {"const": "keep"}}, ["use"], "leave these modules alone")


def _rule(verb: str, use: str, entry: Entry) -> dict[str, Any]:
    properties: dict[str, Any] = {"where": _WHERE, "use": {"const": use}}
    if verb in ("init", "parametrize"):
        properties["tensor"] = {"type": "string", "default": "weight"}
    required = ["use", *(option.name for option in entry.options.values() if option.required)]
    return _mapping({**properties, **_options(entry)}, required, entry.summary)


def _options(entry: Entry) -> dict[str, Any]:
    return {name: _option(option) for name, option in entry.options.items()}


def _option(option: Option) -> dict[str, Any]:
    arms = [] if option.plain is None else [option.adapter.json_schema()]
    for kind in option.kinds:
        arms.append({"enum": list(objects_of(kind))})
        arms += [_object(name, entry) for name, entry in objects_of(kind).items()]
    schema = arms[0] if len(arms) == 1 else {"anyOf": arms}
    plain = isinstance(option.default, bool | int | float | str)
    return {**schema, "default": option.default} if plain and not option.required else schema


def _object(name: str, entry: Entry) -> dict[str, Any]:
    required = [option.name for option in entry.options.values() if option.required]
    return _mapping({name: _mapping(_options(entry), required, entry.summary)}, [name], entry.summary)


def _mapping(properties: dict[str, Any], required: list[str], description: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
