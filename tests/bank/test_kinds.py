"""Each kind of fault that others' files, models and optimizers showed is held by several cases or tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bank.files.members import CASES as FILES
from bank.live.cases import CASES as MODELS

TESTS = Path(__file__).parents[1]
KINDS = yaml.safe_load((Path(__file__).parent / "kinds.yaml").read_text(encoding="utf-8"))
NAMES = {model.name for model in MODELS}


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(test: str) -> bool:
    """Whether the file has the function, and names the member in the brackets."""
    file, function, member = re.fullmatch(r"(.+)::(\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
    return function in functions(file) and (not member or member in (TESTS / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row["kind"])
def test_a_kind_has_three_cases(row: dict[str, Any]) -> None:
    held = [*row.get("members", []), *row.get("models", []), *row.get("tests", [])]
    assert len(set(held)) == len(held) >= 3
    assert set(row) <= {"kind", "members", "models", "tests"}
    assert [name for name in row.get("members", []) if name not in FILES] == []
    assert [name for name in row.get("models", []) if name not in NAMES] == []
    assert [test for test in row.get("tests", []) if not exists(test)] == []


def test_a_kind_stands_there_once() -> None:
    assert len({row["kind"] for row in KINDS}) == len(KINDS)


def test_a_test_that_is_not_there_is_missed() -> None:
    here = "bank/test_kinds.py::test_a_kind_stands_there_once"
    assert exists(here)
    assert not exists(here + "_twice")
    assert not exists(here + "[" + "-".join(("no", "such", "member")) + "]")
