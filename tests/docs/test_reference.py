"""Every public class has a page of the reference; methods with formula, example, picture and what they cost."""

from __future__ import annotations

import importlib
import sys
from inspect import getdoc, isclass
from types import ModuleType
from typing import Any

import pytest

from docs.pages import ROOT

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("reference_pages")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def members(reference: ModuleType) -> dict[str, Any]:
    return {name: one for package in reference.packages().values() for name, one in reference.members(package).items()}


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    found: dict[str, str] = reference.pages()
    return found


def test_every_public_class_has_a_page(members: dict[str, Any], pages: dict[str, str]) -> None:
    classes = {name for name, one in members.items() if isclass(one) and not issubclass(one, BaseException)}
    assert len(classes) > 100
    assert classes <= pages.keys()
    assert all(f".. autoclass:: {name}\n" in pages[name] for name in classes)
    assert {"gonio.hold_", "gonio.swap_", "gonio.init.orthogonal_"} <= pages.keys()


def test_the_index_has_every_public_name_with_one_line(members: dict[str, Any], pages: dict[str, str]) -> None:
    missing = [name for name in members if f"<{name}>` | " not in pages["index"]]
    assert missing == ["gonio.__version__"]
    assert "` |  |" not in pages["index"]


def test_a_method_has_formula_example_picture_and_cost(
    reference: ModuleType, members: dict[str, Any], pages: dict[str, str]
) -> None:
    methods = [name for name, one in members.items() if reference.is_method(one)]
    assert len(methods) > 40
    for name in methods:
        text = getdoc(members[name]) or ""
        assert ":math:" in text or ".. math::" in text, name
        assert ">>> " in text, name
        assert "<svg " in pages[name], name
        assert "## Cost" in pages[name], name


def test_a_class_without_an_example_says_where_it_is_found(
    reference: ModuleType, members: dict[str, Any], pages: dict[str, str]
) -> None:
    for name, one in members.items():
        if name in pages and ">>> " not in (getdoc(one) or ""):
            assert "## Where it is found" in pages[name], name
    assert "{py:obj}`~gonio.certify`" in pages["gonio.measuring.Certificate"]


def test_the_tables_name_what_exists(reference: ModuleType, members: dict[str, Any], pages: dict[str, str]) -> None:
    for name in (*reference.PICTURES, *reference.COSTS):
        assert name in members, name
        assert name in pages, name
    for name, rows in reference.COSTS.items():
        found = rows.found()
        assert found, name
        assert {row["case"] for row in found} >= set(rows.cases), name
        assert pages[name].count("| ×") >= len(found), name
    assert "Not measured." in pages["gonio.regularizers.DoubleOrthogonality"]


def test_a_cost_is_the_median_and_the_quartiles_of_the_result(reference: ModuleType, pages: dict[str, str]) -> None:
    row = next(row for row in reference.COSTS["gonio.regularizers.SRIP"].found() if row["table"] == "ResNet-18")
    wall = row["candidates"][0]["wall"]
    assert f"×{wall['median']:.2f} ({wall['low']:.2f}–{wall['high']:.2f})" in pages["gonio.regularizers.SRIP"]
