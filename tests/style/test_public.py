"""Public names are documented with an executed example; the version is the changelog's."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import gonio
from gonio.errors import MissingExtraError
from style.source import ROOT

PACKAGES = ["gonio", "gonio.nn.angular", "gonio.nn.magnitude"]
PACKAGES += [f"gonio.{name}" for name in gonio.__all__ if inspect.ismodule(getattr(gonio, name))]


def package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


def speaks_for_itself(member: Any) -> bool:
    """Members whose use an example of another member shows: bases, protocols, errors, plain records."""
    if not inspect.isclass(member):
        return not inspect.isroutine(member)  # constants and aliases
    record = dataclasses.is_dataclass(member) and member.__bases__ == (object,)
    abstract = inspect.isabstract(member) or abc.ABC in member.__bases__ or getattr(member, "_is_protocol", False)
    return record or abstract or issubclass(member, BaseException)


def lacking(member: Any) -> str | None:
    """What the documentation of a public name lacks, or None."""
    if not (inspect.isroutine(member) or inspect.isclass(member)):
        return None
    document = inspect.getdoc(member) or ""
    if dataclasses.is_dataclass(member) and document.startswith(f"{member.__name__}("):
        document = ""  # dataclasses make up one of their own
    if not document:
        return "a docstring"
    return None if ">>>" in document or speaks_for_itself(member) else "an executed Example"


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_exist_and_are_documented(name: str) -> None:
    module = package(name)
    missing = {key: what for key in module.__all__ if (what := lacking(getattr(module, key)))}
    assert not missing, f"{name}: {missing}"


def test_version_is_the_changelogs() -> None:
    changelog = ROOT / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("no CHANGELOG.md yet")
    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+\S*?)\]?(?:\s|$)", changelog.read_text("utf-8"), flags=re.M)
    assert versions, "CHANGELOG.md has no entry"
    assert versions[0] == gonio.__version__, f"{versions[0]} in CHANGELOG.md, {gonio.__version__} in gonio"


def test_the_search_finds_missing_documentation() -> None:
    def bare() -> None: ...

    def told() -> None:
        """Without an example."""

    @dataclasses.dataclass(frozen=True)
    class Record:
        size: int

    assert lacking(bare) == "a docstring"
    assert lacking(told) == "an executed Example"
    assert lacking(Record) == "a docstring"  # dataclasses make one up, which says nothing
    assert lacking(gonio.errors.GonioError) is None
    assert lacking(gonio.errors.closest) is None


def test_the_laboratory_has_few_names() -> None:
    """What only some studies need lies in its modules."""
    assert len(gonio.lab.__all__) <= 25
