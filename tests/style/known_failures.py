"""Whether tests that are named exist."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache

from style.source import ROOT

TESTS = ROOT / "tests"


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def missing(tests: Iterable[str]) -> list[str]:
    found = []
    for test in tests:
        file, _, name = test.partition("::")
        if not (TESTS / file).exists() or name not in names_in(file):
            found.append(test)
    return found
