"""The JSON Schema names what the catalogue names, and says of examples what the reader says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gonio.errors import RecipeError
from gonio.recipes import Recipe, built_in_names
from gonio.recipes.catalogue import VERBS, catalogue

SCHEMA = Recipe.json_schema()


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """As much of JSON Schema as our schema uses, written from the specification."""
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "number": (int, float), "integer": int,
    }  # fmt: skip
    checks = {
        "type": lambda names: any(_is(value, kinds[n]) for n in ([names] if isinstance(names, str) else names)),
        "const": lambda constant: value == constant and type(value) is type(constant),
        "enum": lambda items: any(value == item and type(value) is type(item) for item in items),
        "anyOf": lambda arms: any(valid(value, arm) for arm in arms),
        "oneOf": lambda arms: sum(valid(value, arm) for arm in arms) == 1,
        "items": lambda inner: not isinstance(value, list) or all(valid(item, inner) for item in value),
        "required": lambda names: not isinstance(value, dict) or set(names) <= set(value),
        "properties": lambda known: (
            not isinstance(value, dict) or all(valid(item, known[key]) for key, item in value.items() if key in known)
        ),
        "additionalProperties": lambda allowed: allowed or set(value) <= set(schema["properties"]),
        "pattern": lambda text: True,
    }
    ignored = {"$schema", "title", "description", "default"}
    assert schema.keys() <= checks.keys() | ignored, f"unknown keyword in {schema.keys()}"
    return all(check(schema[key]) for key, check in checks.items() if key in schema)


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def test_it_is_json_and_names_the_catalogue() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    for verb in VERBS:
        arms = SCHEMA["properties"][verb]["items"]["oneOf"]
        assert [arm["properties"]["use"]["const"] for arm in arms] == ["keep", *catalogue(verb)]


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_recipes_are_valid(name: str) -> None:
    assert valid(Recipe.load(name).to_dict(), SCHEMA)


@pytest.mark.parametrize(
    "rules",
    [
        {"penalty": [{"use": "L2"}]},
        {"penalty": [{"use": "L2", "strength": "1"}]},
        {"penalty": [{"use": "L2", "strength": True}]},
        {"penalty": [{"use": "L3", "strength": 1}]},
        {"penalty": [{"use": "L2", "strength": 1, "depth": 2}]},
        {"penalty": [{"use": "L2", "strength": 1, "where": 3}]},
        {"penalty": {"use": "L2", "strength": 1}},
        {"penalty": [{"use": "keep", "strength": 1}]},
        {"swap": [{"use": "DecoupledConv2d", "magnitude": "Tahn"}]},
        {"swap": [{"use": "DecoupledConv2d", "magnitude": {"Tanh": {"radios": 1}}}]},
        {"init": [{"use": "he_", "distribution": "cauchy"}]},
        {"parametrize": [{"use": "Sphere", "tensor": 3}]},
        {"balance": []},
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(rules: dict[str, Any]) -> None:
    data = {"name": "x", **rules}
    assert not valid(data, SCHEMA)
    with pytest.raises(RecipeError, match="recipe x"):
        Recipe.from_dict(data)
