"""The YAML reader: what it reads, and that everything else of YAML is refused with a line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gonio.errors import RecipeError
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
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("+.5", 0.5),
        ("-3", -3),
        ("no", "no"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2018-04-22", "2018-04-22"),
        ("1_000", "1_000"),
        ("'5'", "5"),
        ("True", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    data = parse(f"a: {text}", origin="f.yaml").data["a"]
    assert data == value
    assert type(data) is type(value)


@given(st.dictionaries(PRINTABLE, DATA, max_size=4))
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


def test_data_that_no_file_could_hold_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"a: must be text, a number.* found an object of type object"):
        from_data({"a": object()}, origin="dict")
    with pytest.raises(RecipeError, match=r"a\[2\]: must be a finite number"):
        from_data({"a": [0.0, math.nan]}, origin="dict")
    with pytest.raises(RecipeError, match=r"a: must be a number of at most 18 digits"):
        from_data({"a": 10**400}, origin="dict")
    with pytest.raises(RecipeError, match=r"a key must be text; found int"):
        from_data({"a": {1: 2}}, origin="dict")
    cyclic: dict[str, object] = {}
    cyclic["a"] = cyclic
    with pytest.raises(RecipeError, match=r"nested more than 16 deep"):
        from_data(cyclic, origin="dict")


def test_files_that_cannot_be_recipes_are_refused(tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"missing\.yaml: cannot be read: there is no such file"):
        read(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match=r"cannot be read: it is not a regular file"):
        read(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary\.yaml: cannot be read: 'utf-8' codec"):
        read(tmp_path / "binary.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (256 * 1024 + 1))
    with pytest.raises(RecipeError, match=r"is larger than 256 KiB"):
        read(tmp_path / "large.yaml")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path) -> None:
    (tmp_path / "bom.yaml").write_bytes("﻿name: a".encode())
    assert read(tmp_path / "bom.yaml") == "name: a"
