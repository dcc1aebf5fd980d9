"""Law: every public member is in the catalogue, so none escapes the other laws."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

from catalog import INITS, LAYERS, PARAMETRIZATIONS, REGULARIZERS, VERBS
from gonio.nn.angular import Angular
from gonio.nn.magnitude import Magnitude
from gonio.parametrizations import Parametrization
from gonio.regularizers import Regularizer


def exported(package: str) -> dict[str, Any]:
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in module.__all__}


def concrete(package: str, base: type) -> set[str]:
    """Public classes below `base` that can be made."""
    found = exported(package).items()
    return {n for n, m in found if inspect.isclass(m) and issubclass(m, base) and not inspect.isabstract(m)}


def verbs(package: str) -> set[str]:
    """Public functions that end in an underscore: they change what they are given."""
    return {name for name, member in exported(package).items() if name.endswith("_") and inspect.isroutine(member)}


def missing(public: Iterable[str], catalogued: Iterable[str]) -> list[str]:
    return sorted(set(public) - set(catalogued))


def made(cases: Iterable[Any]) -> set[str]:
    return {type(case.make()).__name__ for case in cases}


def first_words(cases: Iterable[Any]) -> set[str]:
    """`verb_` of a case named `verb_`, `verb_: …` or `verb_ …`."""
    return {case.name.replace(":", " ").split()[0] for case in cases}


def test_layers() -> None:
    assert not missing(concrete("gonio.nn", nn.Module), made(LAYERS))


def test_magnitudes_and_angular_functions() -> None:
    """Each is used by some layer of the catalogue."""
    for base in (Magnitude, Angular):
        attribute = base.__name__.lower()
        operators = [getattr(case.make(), "operator", None) for case in LAYERS]
        used = {type(getattr(operator, attribute, None)).__name__ for operator in operators}
        assert not missing(concrete(f"gonio.nn.{attribute}", base) - {base.__name__}, used)


def test_regularizers() -> None:
    assert not missing(concrete("gonio.regularizers", Regularizer) - {"Regularizer"}, made(REGULARIZERS))


def test_parametrizations() -> None:
    public = concrete("gonio.parametrizations", Parametrization) - {"Parametrization"}
    assert not missing(public, made(PARAMETRIZATIONS))


def test_inits() -> None:
    assert not missing(verbs("gonio.init"), {case.function.__name__ for case in INITS})


def test_verbs() -> None:
    ending = {"release_"}  # what `hold_` did, which needs the optimizer of that call
    for package in ("gonio.surgery", "gonio.nn", "gonio.optim"):
        assert not missing(verbs(package) - ending, first_words(VERBS)), package


@pytest.mark.parametrize("cases", [LAYERS, REGULARIZERS, PARAMETRIZATIONS, INITS, VERBS])
def test_names_are_unique(cases: list[Any]) -> None:
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)


@dataclasses.dataclass
class _Case:
    name: str


def test_the_law_finds_what_is_missing() -> None:
    assert missing({"L2", "SRIP"}, {"L2"}) == ["SRIP"]
    cases = [_Case("init_: orthogonal"), _Case("fold_ of a conv"), _Case("balance_")]
    assert first_words(cases) == {"init_", "fold_", "balance_"}
