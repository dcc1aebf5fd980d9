"""Whatever is done to the text of a recipe, reading it gives a recipe or a RecipeError, quickly."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gonio.errors import RecipeError
from gonio.recipes import Recipe, built_in_names
from gonio.recipes.catalogue import VERBS, catalogue
from gonio.recipes.rule import _backtracks

SEEDS = [Recipe.load(name).to_yaml() for name in built_in_names()]
PIECES = [
    "&a ", "*a", "!!python/name:os.system ", "{", "}", "[", "]", ": ", "- ", "\n", "  ", "\t", "'", '"', "|\n", "<<: ",
    "null", "1e999", "-.inf", "true", "keep", "use", "where", "strength", "re:(a+)+", "type:", "stem", "#", "---\n",
    "\u202e", "\x00", "é", "\ud800", "%YAML 1.1\n", "? ", "@", "`", "0x1f", "1_0", "~", "Cosine", "Tanh", "L2",
    "__class__",
]  # fmt: skip


def mutated(text: str, choice: random.Random) -> str:
    for _ in range(choice.randint(1, 6)):
        start = choice.randrange(len(text) + 1)
        end = min(len(text), start + choice.choice([0, 0, 1, 3, 12]))
        text = text[:start] + choice.choice([*PIECES, ""]) + text[end:]
    return text


def attempt(read: Callable[[], Recipe]) -> Recipe | RecipeError:
    """What reading gives; any other exception fails the test."""
    try:
        return read()
    except RecipeError as error:
        return error


@pytest.mark.parametrize("seed", range(8))
def test_damaged_text_is_a_recipe_or_a_recipe_error(seed: int) -> None:
    choice = random.Random(seed)
    refused = 0
    for _ in range(150):
        text = mutated(choice.choice(SEEDS), choice)
        found = attempt(lambda text=text: Recipe.from_yaml(text, origin="fuzz.yaml"))
        if isinstance(found, RecipeError):
            refused += 1
            assert found.problems
            assert all(problem.startswith("fuzz.yaml") for problem in found.problems)
        else:
            assert Recipe.from_yaml(found.to_yaml()) == found
    assert 10 < refused < 150


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(PIECES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["where", "use", "strength", "magnitude", "Tanh", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["name", "source", *VERBS, "other"]), DATA | st.lists(DATA, max_size=3)))
@settings(max_examples=300, deadline=None)
def test_any_data_is_a_recipe_or_a_recipe_error(data: dict[str, object]) -> None:
    found = attempt(lambda: Recipe.from_dict(data))
    if isinstance(found, RecipeError):
        assert found.problems
    else:
        assert Recipe.from_dict(found.to_dict()) == found


RULES = st.builds(
    lambda where, strength, use, every: {"where": where, "use": use, "strength": strength, "every": every},
    st.sampled_from([None, "stem", "classifier", "type:Conv2d", "conv*", "re:fc[12]"]),
    st.floats(0, 1e6, allow_subnormal=False),
    st.sampled_from([use for use in catalogue("penalty") if "." not in use]),
    st.integers(1, 1000),
)


@given(st.lists(RULES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_valid_rules_survive_every_form(rules: list[dict[str, object]]) -> None:
    recipe = Recipe.from_dict({"name": "valid", "penalty": rules})
    again = Recipe.from_yaml(recipe.to_yaml())
    assert (again, again.hash) == (recipe, recipe.hash)
    assert [rule.to_data() for rule in again.penalty] == [dict(rule) for rule in rules]


@pytest.mark.parametrize(
    ("pattern", "explodes"),
    [
        ("(a+)+", True),
        ("(a*)*", True),
        ("((a|b)+c)*", True),
        ("(?:a+b?)+", True),
        ("(a{2,})+", True),
        ("([a-z.]+)*", True),
        ("(a|a)*b", True),
        ("(a|ab?){9}", True),
        ("((a?)(b))+", True),
        ("(?x)(a+) +", True),
        ("a*" * 5, True),
        ("(a|a)" * 25, True),
        ("a?" * 25 + "a" * 25, True),
        ("|".join(f"layer{i}" for i in range(60)), False),
        (r".*\.(q|k|v|o)_proj\.(weight|bias)?", False),
        (r"(?:\d{2})+", False),
        (r"layer[34]\..*", False),
        (r"(conv|fc)\d+", False),
        ("(a+)b+", False),
        (r"(\(+)b", False),
        ("[(a+)]+", False),
        ("[]+)]+", False),
        (r"(\+a)+", False),
        ("a{2}b{3}", False),
        ("(a?)?", False),
    ],
)
def test_nested_repetitions_are_found(pattern: str, explodes: bool) -> None:
    assert _backtracks(pattern) == explodes
