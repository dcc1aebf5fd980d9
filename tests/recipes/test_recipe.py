"""Recipes as values: reading, writing, hashing, loading by name."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import yaml

from gonio.errors import RecipeError, UnknownNameError
from gonio.recipes import BASELINE, Named, Recipe, Rule, built_in_names

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
