"""Reading recipe files: the format, hostile and damaged input, one error for all problems."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gonio.errors import RecipeError
from gonio.recipes import Recipe, built_in_names
from gonio.recipes.catalogue import VERBS, catalogue
from gonio.recipes.document import dump, from_data, parse, read

PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"]) | st.just(" "))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | PRINTABLE
)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PRINTABLE, inner, max_size=4), max_leaves=12
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.0e-4", 1e-4), ("+.5", 0.5), ("-3", -3), ("'5'", "5"), ("True", True),
        ("~", None), ("", None),
        *[(text, text) for text in ("no", "off", "1:30", "2018-04-22", "1_000")],
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    data = parse(f"a: {text}", origin="f.yaml").data["a"]
    assert data == value
    assert type(data) is type(value)


@given(st.dictionaries(PRINTABLE, DATA, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # it measures the machine's load
def test_what_is_dumped_is_read_back(data: dict[str, object]) -> None:
    assert parse(dump(data), origin="f.yaml").data == data


def test_lines_are_those_of_the_keys() -> None:
    document = parse("a: 1\nb:\n  - {c: 2}\n  - d:\n      e: 3\n", origin="f.yaml")
    assert [document.line(at) for at in [("a",), ("b",), ("b", 0, "c"), ("b", 1, "d", "e")]] == [1, 2, 3, 5]
    assert document.line(("b", 1, "d", "missing")) == 4
    assert document.at(("b", 0, "c")) == "f.yaml:3: b[1].c"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"f\.yaml:1: is not valid YAML: expected"),
        ("a: 1\n\tb: 2", r"f\.yaml:2: is not valid YAML: .*cannot start any token"),
        ("a: 1\nb: \x07", r"f\.yaml:2: is not valid YAML: the character '\\x07'"),
        ("a: 1\na: 2", r"f\.yaml:1: a: the key occurs twice, here and in line 2"),
        ("a: .inf", r"f\.yaml:1: a: must be a finite number"),
        ("a: 1\nb: -.inf", r"f\.yaml:2: b: must be a finite number"),
        ("a: .nan", r"f\.yaml:1: a: must be a finite number"),
        ("a: " + "9" * 5000, r"f\.yaml:1: a: must be a finite number"),
        ("a: 1e999", r"f\.yaml:1: a: must be a finite number"),
        ('a: "\\ud800"', r"f\.yaml:1: a: must be printable text"),
        ('a: "\\e[31m"', r"f\.yaml:1: a: must be printable text"),
        ('"a\\u202e": 1', r"must be printable text"),
        ("? [1, 2]\n: 3", r"a key must be text"),
        ("1: 2", r"f\.yaml:1: 1: a key must be text"),
        ("~: 2", r"a key must be text"),
        ("---\na: 1\n---\nb: 2", r"f\.yaml:3: a recipe is one YAML document"),
        ("%YAML 9.9\n---\na: 1", r"f\.yaml:1: is not valid YAML: found incompatible"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse(text, origin="f.yaml")


def test_every_problem_is_reported_at_once_in_the_order_of_lines() -> None:
    with pytest.raises(RecipeError, match=r"f\.yaml has 3 problems") as caught:
        parse("a: .nan\nb: 1\nc: .inf\n2: x\n", origin="f.yaml")
    assert [problem.split(": ")[0] for problem in caught.value.problems] == ["f.yaml:1", "f.yaml:3", "f.yaml:4"]
    assert str(caught.value).startswith("f.yaml has 3 problems:\n")


CYCLIC: dict[str, object] = {}
CYCLIC["a"] = CYCLIC


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": object()}, r"a: must be text, a number.* found an object of type object"),
        ({"a": [0.0, math.nan]}, r"a\[2\]: must be a finite number"),
        ({"a": 10**400}, r"a: must be a number of at most 18 digits"),
        ({"a": {1: 2}}, r"a key must be text; found int"),
        (CYCLIC, r"nested more than 16 deep"),
    ],
)
def test_data_that_no_file_could_hold_is_refused(data: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        from_data(data, origin="dict")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"a\.yaml: cannot be read: there is no such file"),
        (b"\xff\xfe\x00", r"a\.yaml: cannot be read: 'utf-8' codec"),
        (b"#" * (256 * 1024 + 1), "is larger than 256 KiB"),
    ],
)
def test_files_that_cannot_be_recipes_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read(tmp_path / "a.yaml")
    with pytest.raises(RecipeError, match=r"cannot be read: it is not a regular file"):
        read(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfname: a")
    assert read(tmp_path / "bom.yaml") == "name: a"


SWAP = "name: x\nswap:\n  - {{where: null, use: {}}}\n"
PENALTY = "name: x\npenalty:\n  - {{where: null, use: L2, strength: {}}}\n"
WHERE = "name: x\npenalty:\n  - {{where: {}, use: L2, strength: 1}}\n"

# (what it tries, text, what the error says)
PAYLOADS = [
    # code through tags
    ("os.system", "!!python/object/apply:os.system ['touch CANARY']", "the tag"),
    ("subprocess", "name: !!python/object/apply:subprocess.check_output [[touch, CANARY]]", "the tag"),
    ("eval", 'name: x\nsource: !!python/object/apply:eval [\'open("CANARY", "w")\']', "the tag"),
    ("tag directive", "%TAG ! tag:yaml.org,2002:python/object/apply:\n---\n!os.system [touch CANARY]", "the tag"),
    # code through names
    ("dotted path", SWAP.format("os.system"), "no entry of swap.*'os.system'"),
    ("dunder", SWAP.format("__import__"), "no entry of swap"),
    ("torch class method", SWAP.format("DecoupledConv2d.register_forward_hook"), "no entry of swap"),
    ("hydra target", "name: x\n_target_: os.system", "no key '_target_'"),
    ("dunder option", "name: x\npenalty:\n  - {use: L2, strength: 1, __class__: x}", "no option '__class__'"),
    ("self as option", "name: x\npenalty:\n  - {use: L2, strength: 1, self: 1}", "no option 'self'"),
    (
        "object that is none",
        "name: x\nswap:\n  - {use: DecoupledConv2d.from_conv, magnitude: os}",
        "no magnitude named 'os'",
    ),
    (
        "object of another kind",
        "name: x\nswap:\n  - {use: DecoupledConv2d.from_conv, magnitude: Cosine}",
        "no magnitude named",
    ),
    # time and memory
    ("billion laughs", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "the anchor &a"),
    ("self reference", "name: x\nswap: &s [*s]", "the anchor &s"),
    ("merge key", "name: x\n<<: {swap: []}", "no key '<<'"),
    ("deep lists", "[" * 50_000, "nested more than"),
    ("large", "name: " + "x" * 300_000, "larger than 256 KiB"),
    ("huge count", WHERE.format("'re:a{4294967295}'"), "where: "),
    ("long where", WHERE.format("a*" * 300), "where: must be text"),
    # text that would act elsewhere
    ("html", "name: <script>alert(1)</script>", "name: must begin with"),
    ("long name", "name: " + "x" * 65, "name: must begin with"),
    ("bidi override", 'name: x\nsource: "\\u202egnp.exe"', "printable"),
    ("reserved", "name: baseline\ninit: [{use: orthogonal_}]", "`baseline` is the name of the unchanged model"),
    # mistakes
    ("empty", "", "a recipe is a mapping"),
    ("name is a number", "name: 5", "name: must be text"),
    ("unknown key", "name: x\npenalties: []", "no key 'penalties'. Did you mean penalty"),
    ("verb is no list", "name: x\nswap: {where: a, use: b}", "swap: must be a list"),
    ("rule is no mapping", "name: x\nswap: [DecoupledConv2d]", "a rule is a mapping"),
    ("use is a list", "name: x\nswap: [{use: [a, b]}]", "needs `use`"),
    ("where is a list", WHERE.format("[a, b]"), "where: must be text"),
    ("where is empty", WHERE.format("''"), "where: must be text"),
    ("where is no regex", WHERE.format("'re:('"), "where: .*regular expression"),
    ("strength is text", PENALTY.format("'1'"), "strength: found '1'; expected a valid number"),
    ("strength is true", PENALTY.format("true"), "strength: found True; expected a valid number"),
    ("strength is negative", PENALTY.format("-1"), "finite strength >= 0"),
    ("every is zero", "name: x\npenalty: [{use: L2, strength: 1, every: 0}]", "every"),
    (
        "object's value",
        "name: x\nswap: [{use: DecoupledConv2d, magnitude: {Tanh: {learn_radius: 2}}}]",
        "learn_radius: found 2",
    ),
    ("tensor is a path", "name: x\nparametrize: [{use: WeightNorm, tensor: a.b}]", "tensor: must be a name"),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in PAYLOADS], ids=[row[0] for row in PAYLOADS])
def test_each_is_one_error_that_names_the_file(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.yaml").write_text(text, encoding="utf-8")
    Recipe.load("scale-shift")  # so that only what the payload imports is new afterwards
    before, start = set(sys.modules), time.process_time()
    with pytest.raises(RecipeError, match=rf"(?s)^payload\.yaml[: ].*{message}") as caught:
        Recipe.load("payload.yaml")
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 2000
    assert set(sys.modules) <= before
    assert [path.name for path in tmp_path.iterdir()] == ["payload.yaml"]


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


@pytest.mark.parametrize("seed", range(3))
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


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(PIECES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["where", "use", "strength", "magnitude", "Tanh", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["name", "source", *VERBS, "other"]), ANYTHING | st.lists(ANYTHING, max_size=3)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_data_is_a_recipe_or_a_recipe_error(data: dict[str, object]) -> None:
    found = attempt(lambda: Recipe.from_dict(data))
    if isinstance(found, RecipeError):
        assert found.problems
    else:
        assert Recipe.from_dict(found.to_dict()) == found


RULES = st.builds(
    lambda where, strength, use, every: {"where": where, "use": use, "strength": strength, "every": every},
    st.sampled_from([None, "stem", "classifier", "type:Conv2d", "conv*", "re:fc[12]"]),
    st.just(0.0) | st.floats(1e-18, 1e6),
    st.sampled_from([use for use in catalogue("penalty") if "." not in use]),
    st.integers(1, 1000),
)


@given(st.lists(RULES, max_size=4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_valid_rules_survive_every_form(rules: list[dict[str, object]]) -> None:
    recipe = Recipe.from_dict({"name": "valid", "penalty": rules})
    again = Recipe.from_yaml(recipe.to_yaml())
    assert (again, again.hash) == (recipe, recipe.hash)
    assert [rule.to_data() for rule in again.penalty] == [dict(rule) for rule in rules]
