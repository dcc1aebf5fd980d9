"""Recipes as values: reading, writing, hashing, loading by name, and their JSON Schema."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from gonio.errors import RecipeError, UnknownNameError
from gonio.recipes import BASELINE, Named, Recipe, Rule, built_in_names
from gonio.recipes.catalogue import VERBS, catalogue

FULL = """
name: everything
source: "a paper"   # with a comment
description: what it does
init:
  - {where: stem, use: keep}
  - {where: "conv*", use: he_, distribution: uniform}
  - {where: null, use: orthogonal_, gain: 2}
swap:
  - {where: "type:Conv2d", use: DecoupledConv2d.from_conv, magnitude: {Tanh: {learn_radius: true}}, angular: Cosine}
parametrize:
  - {where: "re:fc[12]", use: WeightNorm}
penalty:
  - where: "conv*"
    use: Orthogonality
    strength: 1e-4
  - {where: null, use: L2, strength: 1, every: 2}
"""

# the same content, otherwise written
SHUFFLED = """
penalty:
  - {strength: 0.0001, use: Orthogonality, where: "conv*"}
  - every: 2
    strength: 1.0
    use: L2
parametrize: [{use: WeightNorm, where: 're:fc[12]'}]
swap:
  - angular: {Cosine: {}}
    magnitude:
      Tanh:
        learn_radius: true
    use: DecoupledConv2d.from_conv
    where: type:Conv2d
init:
  - {use: keep, where: stem}
  - {distribution: uniform, use: he_, where: conv*}
  - {gain: 2.0, use: orthogonal_}
name: everything
"""


def test_reading_gives_the_rules_in_order() -> None:
    recipe = Recipe.from_yaml(FULL, origin="full.yaml")
    assert [rule.use for rule in recipe.init] == ["keep", "he_", "orthogonal_"]
    assert recipe.swap[0].options[0] == ("angular", Named("Cosine", (), object))
    assert recipe.penalty[0] == Rule("conv*", "Orthogonality", (("strength", 1e-4),))
    assert recipe.penalty[1].where is None
    assert [rule.line for rule in recipe.rules("penalty")] == [14, 17]


def test_yaml_and_dict_round_trips_are_identities() -> None:
    recipe = Recipe.from_yaml(FULL)
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_yaml(recipe.to_yaml()).to_yaml() == recipe.to_yaml()


def test_a_file_is_yaml_that_others_read_too() -> None:
    recipe = Recipe.from_yaml(FULL)
    assert yaml.safe_load(recipe.to_yaml()) == recipe.to_dict()


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda recipe: pickle.loads(pickle.dumps(recipe))])
def test_a_recipe_is_a_value(twin) -> None:
    recipe = Recipe.from_yaml(FULL)
    assert twin(recipe) == recipe
    assert hash(twin(recipe)) == hash(recipe)
    with pytest.raises(AttributeError, match="cannot assign"):
        recipe.name = "other"


def test_the_hash_depends_on_the_content_alone() -> None:
    recipe, shuffled = Recipe.from_yaml(FULL), Recipe.from_yaml(SHUFFLED, origin="another/file.yaml")
    assert recipe.hash == shuffled.hash
    assert len(recipe.hash) == 64
    int(recipe.hash, 16)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("everything", "everything2"),
        ("1e-4", "1.1e-4"),
        ("stem", "classifier"),
        ("uniform", "normal"),
        ("learn_radius: true", "learn_radius: false"),
        ("Cosine", "SquaredCosine"),
        ("every: 2", "every: 3"),
        ("WeightNorm", "Sphere"),
    ],
)
def test_the_hash_changes_with_the_content(old: str, new: str) -> None:
    assert old in FULL
    assert Recipe.from_yaml(FULL.replace(old, new)).hash != Recipe.from_yaml(FULL).hash


def test_the_order_of_rules_is_content() -> None:
    recipe = Recipe.from_yaml(FULL)
    data = recipe.to_dict()
    data["penalty"].reverse()
    assert Recipe.from_dict(data).hash != recipe.hash


def test_the_baseline_is_the_recipe_without_rules() -> None:
    assert Recipe.load(BASELINE) == Recipe("baseline")
    assert Recipe.load(BASELINE).to_dict() == {"name": "baseline"}


def test_built_in_recipes_are_found_before_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in built_in_names():
        assert Recipe.load(name).name == name
    Path("scale-shift").write_text("name: mine\n")
    assert Recipe.load("scale-shift").name == "scale-shift"
    assert Recipe.load("./scale-shift").name == "mine"
    assert Recipe.load(tmp_path / "scale-shift").name == "mine"


def test_an_unknown_name_gives_the_closest() -> None:
    with pytest.raises(UnknownNameError, match=r"no recipe named 'scaleshift'\. Did you mean scale-shift"):
        Recipe.load("scaleshift")
    with pytest.raises(RecipeError, match=r"mine\.yaml: cannot be read: there is no such file"):
        Recipe.load("mine.yaml")


def test_every_mistake_of_a_file_is_in_one_error() -> None:
    text = (
        "name: 5\n"
        "swop: []\n"
        "penalty:\n"
        "  - {where: 're:(', use: Orthogonality, strength: 1e-4}\n"
        "  - where: conv*\n"
        "    use: Orthogonalty\n"
        "  - {where: null, use: L2, strenth: 1}\n"
        "init:\n"
        "  - {where: null, use: orthogonal_, gain: [1]}\n"
    )
    with pytest.raises(RecipeError, match=r"bad\.yaml has 7 problems") as caught:
        Recipe.from_yaml(text, origin="bad.yaml")
    places = [problem.split(": ", 2)[:2] for problem in caught.value.problems]
    assert places == [
        ["bad.yaml:1", "name"],
        ["bad.yaml:2", "swop"],
        ["bad.yaml:4", "penalty[1].where"],
        ["bad.yaml:6", "penalty[2].use"],
        ["bad.yaml:7", "penalty[3].strenth"],
        ["bad.yaml:7", "penalty[3]"],
        ["bad.yaml:9", "init[1].gain"],
    ]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_a_dict_is_checked_like_a_file() -> None:
    with pytest.raises(RecipeError, match=r"recipe mine: penalty\[1\]: L2 needs strength"):
        Recipe.from_dict({"name": "mine", "penalty": [{"where": None, "use": "L2"}]})


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
        {"optimizer": {"use": "lamb"}},
        {"optimizer": {"use": "sgd", "betas": [0.9, 0.99]}},
        {"optimizer": {"lr": 0.1}},
        {"hold": {"norm": "rows"}},
        {"hold": [{"norm": "matrix"}]},
        {"hold": {"use": "hold_"}},
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(rules: dict[str, Any]) -> None:
    data = {"name": "x", **rules}
    assert not valid(data, SCHEMA)
    with pytest.raises(RecipeError, match="recipe x"):
        Recipe.from_dict(data)


@pytest.mark.parametrize("name", ["weissi", "WEISSI"])
def test_the_name_of_a_method_leads_to_its_recipe(name: str) -> None:
    with pytest.raises(
        UnknownNameError, match=rf"^there is no recipe named '{name}'\. {name} is the method of scale-shift\.$"
    ):
        Recipe.load(name)
