"""House style of the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from style.source import ROOT, Source, suite


def unmatched_raises(source: Source) -> Iterator[str]:
    """`pytest.raises` and `pytest.warns` that would accept any message."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in {"raises", "warns"} and getattr(node.func.value, "id", "") == "pytest":
            matches = [k.value for k in node.keywords if k.arg in {"match", "check"}]
            empty = any(isinstance(m, ast.Constant) and m.value in {"", ".*", "."} for m in matches)
            if not matches or empty:
                yield source.at(node)


def vacuous_comparisons(source: Source) -> Iterator[str]:
    """A comparison as a statement: computed, and not asserted."""
    silent = {"allclose", "equal", "isclose", "all", "any"}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Expr):
            continue
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(node.value, ast.Compare) or getattr(called, "attr", None) in silent:
            yield source.at(node)


def test_every_expected_error_has_its_message() -> None:
    hits = [hit for source in suite() for hit in unmatched_raises(source)]
    assert not hits, f"give match= to {hits}"


def test_every_comparison_is_asserted() -> None:
    assert not [hit for source in suite() for hit in vacuous_comparisons(source)]


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("pytest.raises(ValueError)", "pytest.raises(ValueError, match='x')"),
        ("pytest.raises(ValueError, match='')", "pytest.raises(ValueError, match=f'{x}')"),
        ("pytest.warns(UserWarning)", "pytest.warns(UserWarning, match='x')"),
    ],
)
def test_the_search_finds_unmatched_errors(bad: str, good: str) -> None:
    path = ROOT / "tests" / "control.py"
    assert list(unmatched_raises(Source(path, bad, ast.parse(bad))))
    assert not list(unmatched_raises(Source(path, good, ast.parse(good))))


@pytest.mark.parametrize("bad", ["torch.allclose(a, b)", "a == b"])
def test_the_search_finds_silent_comparisons(bad: str) -> None:
    path = ROOT / "tests" / "control.py"
    assert list(vacuous_comparisons(Source(path, bad, ast.parse(bad))))
    assert not list(vacuous_comparisons(Source(path, f"assert {bad}", ast.parse(f"assert {bad}"))))
