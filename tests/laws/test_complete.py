"""Law: every public member is in the catalogue, so none escapes the other laws."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn

import gonio
from catalog import INITS, LAYERS, PARAMETRIZATIONS, REGULARIZERS, VERBS
from gonio.nn.angular import Angular
from gonio.nn.magnitude import Magnitude
from gonio.parametrizations import Parametrization
from gonio.regularizers import Regularizer
from gonio.surgery import Edited


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


# What changes something without being a verb, and why.
_NO_VERB = {
    "parametrizations.tick_": "a part of a training step: it moves the singular vectors, which cannot be taken back",
}
# Verbs that are tested elsewhere, and where.
_TESTED = {
    "lab.retrain_": "tests/lab/treating/test_retrain.py: it takes a task",
    "integrations.lightning.add_penalty_": "tests/integrations: its model is a LightningModule",
    "integrations.transformers.add_penalty_": "tests/integrations: it takes a Trainer",
}


def takes_a_model(function: Callable[..., Any]) -> bool:
    """Whether it takes a model, or what has one; functions of `gonio.init` take a tensor, methods of an Edit a part."""
    names = list(inspect.signature(function).parameters)
    return any(name in names for name in (("model",) if names[:1] == ["self"] else ("model", "module", "trainer")))


def verbs_of_all_packages() -> dict[str, Callable[..., Any]]:
    """Public functions, and public methods of public classes, that end in an underscore and take a model, by name."""
    packages = [name for name in gonio.__all__ if inspect.ismodule(getattr(gonio, name))]
    found: dict[str, Callable[..., Any]] = {}
    for package in [*packages, "integrations.lightning", "integrations.transformers"]:
        module = importlib.import_module(f"gonio.{package}")
        public = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for name in public:
            member = getattr(module, name)
            inner = inspect.getmembers(member, inspect.isroutine) if inspect.isclass(member) else [(name, member)]
            for own, function in inner:
                ends = own.endswith("_") and not own.startswith("_") and inspect.isfunction(function)
                if ends and takes_a_model(function):
                    found[f"{package}.{name}.{own}" if inspect.isclass(member) else f"{package}.{name}"] = function
    return found


def test_verbs() -> None:
    """Every verb of every package is in the catalogue, and so under the laws of verbs."""
    found = verbs_of_all_packages()
    assert {"surgery.swap_", "optim.hold_", "recipes.Recipe.apply_", "parametrizations.tick_"} <= set(found)
    names = {name.rpartition(".")[2] for name in found if name not in {**_NO_VERB, **_TESTED}}
    assert not missing(names, first_words(VERBS))
    gone = [name for name in {**_NO_VERB, **_TESTED} if name not in found]
    assert not gone, f"excused, but not there: {gone}"


def test_verbs_return_an_edited() -> None:
    """One handle: `str()` of it is a table, and `undo_()` ends the change."""
    for name, function in verbs_of_all_packages().items():
        if name not in _NO_VERB:
            returned = typing.get_type_hints(function)["return"]
            assert issubclass(returned, Edited), f"{name} returns {returned}"


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
