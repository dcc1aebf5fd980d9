"""The page of sources: its names exist, its tests are there, and it is what its data give."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from types import ModuleType
from typing import Any

import pytest

import gonio
from docs.pages import ROOT, builder_of
from gonio.lab.claims import load_claim


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return builder_of("build_sources")


@pytest.fixture(scope="module")
def rows(builder: ModuleType) -> list[dict[str, Any]]:
    return [row for article in builder.sources().values() for row in article["rows"]]


def exists(name: str) -> bool:
    """Whether `gonio.NAME` can be imported, or is an attribute of what can be."""
    found: Any = importlib.import_module("gonio")
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@cache
def functions_of(path: str) -> frozenset[str]:
    """The functions of a file of tests; empty for a file that is not there."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def collects(test: str) -> bool:
    path, _, name = test.partition("::")
    return name.startswith("test_") and name in functions_of(path)


def test_the_pages_are_what_the_data_give(builder: ModuleType) -> None:
    stale = [path.name for path, text in builder.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/build_sources.py"


def test_every_name_test_and_claim_exists(rows: list[dict[str, Any]]) -> None:
    assert [name for row in rows for name in row["names"] if not exists(name)] == []
    assert [test for row in rows for test in row.get("tests", ()) if not collects(test)] == []
    assert [load_claim(name).name for row in rows for name in row.get("claims", ())]


def test_what_does_not_exist_is_found() -> None:
    assert not exists("geometry.no_such_function")
    assert not exists("regularizers.SelfOrthogonality.no_such_form")
    assert not collects("tests/docs/test_sources.py::test_no_such_test")
    assert not collects("tests/docs/no_such_file.py::test_the_pages_are_what_the_data_give")
    assert collects("tests/docs/test_sources.py::test_what_does_not_exist_is_found")


def test_every_row_is_held_or_says_why_not(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 96
    for row in rows:
        assert 0 < len(row["quote"]) <= 15, row["quote"]
        assert row["names"], row["quote"]
        assert row["state"] == "met" or (row["why"] and row["why_zh"]), row["quote"]
        assert row.get("tests") or (row["state"] == "missing" and row["claims"]), row["quote"]


def test_a_missing_row_is_a_claim_that_says_what_it_needs(rows: list[dict[str, Any]]) -> None:
    missing = [name for row in rows if row["state"] == "missing" for name in row["claims"]]
    assert missing == ["decoupled-imagenet"]
    assert all(load_claim(name).not_tried for name in missing)


def test_each_article_has_what_identifies_it(builder: ModuleType) -> None:
    """Two of the five state no address, two no date; the page says so."""
    articles = builder.sources().values()
    assert [bool(article["address"]) for article in articles] == [True, False, True, False, True]
    assert [bool(article["date"]) for article in articles] == [True, False, False, True, True]
    for article in articles:
        assert article["title"]
        assert article["author"]
        assert article["teaches"]
        assert article["wrong"]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_both_readmes_name_weissi_and_decoupled_networks_and_link_the_sources(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "WEISSI" in text
    assert "decoupled networks" in text
    assert "sources.md" in text


def test_the_line_of_an_article_runs_as_pasted_and_its_recipe_acts_on_a_network(builder: ModuleType) -> None:
    """In the README's table, after `import gonio` and a model."""
    for article in builder.sources().values():
        names = {"gonio": gonio, "model": gonio.models.digits_cnn()}
        assert eval(article["line"], names) is not None
        gonio.Recipe.load(article["recipe"]).apply_(gonio.models.digits_cnn())
