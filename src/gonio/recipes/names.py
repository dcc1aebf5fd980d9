"""The closed catalogue: every name that a recipe may use, read off the namespaces' `__all__`.

A recipe never names a Python path. What is not in the catalogue does not exist for it, and a method
that enters a namespace enters the catalogue with it, options, types and defaults included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

from torch import nn

from gonio import init, parametrizations, regularizers
from gonio import nn as layers
from gonio.errors import UnknownNameError
from gonio.nn import angular, magnitude
from gonio.recipes.options import Option, options_of, type_hints

__all__ = ["VERBS", "Entry", "catalogue", "find", "objects", "objects_of"]

VERBS = ("init", "swap", "parametrize", "penalty")


@dataclass(frozen=True)
class Entry:
    """One name of the catalogue.

    Attributes:
        name: as a recipe writes it under `use`; the long form, where there is a short one.
        target: the function, class or converter that it stands for.
        options: what may be given with it, by name.
        accepts: for a converter, the layers that it takes.
    """

    name: str
    target: Callable[..., Any]
    options: Mapping[str, Option]
    accepts: tuple[type[nn.Module], ...] = ()

    @property
    def makes(self) -> type:
        """The class of what it makes, for a class and its named constructors; `object` for the rest."""
        owner = getattr(self.target, "__self__", self.target)
        return owner if isinstance(owner, type) else object

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.target) or "").split("\n")[0]


@cache
def catalogue(verb: str) -> Mapping[str, Entry]:
    """The names that may follow `use` under a verb.

    Example:
        >>> from gonio.recipes.names import catalogue
    >>> "orthogonal_" in catalogue("init"), "Orthogonality" in catalogue("penalty")
        (True, True)
    """
    entries = {
        "init": _initialisers,
        "swap": _converters,
        "parametrize": lambda: _classes(parametrizations, parametrizations.Parametrization),
        "penalty": lambda: _classes(regularizers, regularizers.Regularizer),
    }[verb]()
    found = {entry.name: entry for entry in entries}
    return MappingProxyType({**found, **_short(found)} if verb == "swap" else found)


@cache
def objects() -> tuple[type, ...]:
    """The classes that may be the value of an option, e.g. `magnitude: {Tanh: {learn_radius: true}}`."""
    found = [value for module in (magnitude, angular, regularizers) for _, value in _public(module)]
    concrete = [value for value in found if is_dataclass(value) and not inspect.isabstract(value)]
    return tuple(value for value in concrete if isinstance(value, type))


@cache
def objects_of(kind: type) -> Mapping[str, Entry]:
    """The objects of a kind by name, with their named constructors such as `Milestones.srip`."""
    found: dict[str, Entry] = {}
    for value in objects():
        if issubclass(value, kind):
            found |= {entry.name: entry for entry in _constructors(value, objects=())}
    return MappingProxyType(found)


def find(verb: str, name: str) -> Entry:
    """The entry of a name under a verb.

    Raises:
        UnknownNameError: with the closest names, and the verb under which the name would be known.
    """
    known = catalogue(verb)
    if name in known:
        return known[name]
    elsewhere = [other for other in VERBS if other != verb and name in catalogue(other)]
    kind = f"name for {verb} (it belongs under {elsewhere[0]})" if elsewhere else f"name for {verb}"
    raise UnknownNameError(kind, name, ["keep", *known])


def _initialisers() -> Iterator[Entry]:
    for name, value in _public(init):
        if name.endswith("_") and inspect.isfunction(value):
            yield Entry(name, value, options_of(value, skip=1, hidden=("layout", "generator"), objects=objects()))


def _converters() -> Iterator[Entry]:
    """`Class.from_x` for every converter of a class, and the functions `to_x`."""
    for name, value in _public(layers):
        if name.startswith("to_") and inspect.isfunction(value):
            yield _converter(name, value)
        elif isinstance(value, type) and issubclass(value, nn.Module):
            for method in _own_classmethods(value, "from_"):
                yield _converter(f"{name}.{method}", getattr(value, method))


def _short(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """Plain `Class` for its converter, where it has one only; a recipe's hash is that of the long form."""
    owners = [name.partition(".")[0] for name in found]
    return {o: e for o, e in zip(owners, found.values(), strict=True) if owners.count(o) == 1}


def _converter(name: str, target: Callable[..., Any]) -> Entry:
    options = options_of(target, skip=1, objects=objects())
    first = next(iter(inspect.signature(target).parameters))
    accepts = type_hints(target).get(first, nn.Module)
    arms = getattr(accepts, "__args__", (accepts,))
    return Entry(name, target, options, tuple(arm for arm in arms if isinstance(arm, type)))


def _classes(namespace: ModuleType, base: type) -> Iterator[Entry]:
    """Every concrete subclass of `base`, and its named constructors."""
    for _, value in _public(namespace):
        concrete = isinstance(value, type) and value is not base and not inspect.isabstract(value)
        if concrete and issubclass(value, base):
            yield from _constructors(value, objects=objects())


def _constructors(value: type, *, objects: Sequence[type]) -> Iterator[Entry]:
    yield Entry(value.__name__, value, options_of(value, skip=0, objects=objects))
    for method in _own_classmethods(value, ""):
        target = getattr(value, method)
        yield Entry(f"{value.__name__}.{method}", target, options_of(target, skip=0, objects=objects))


def _public(namespace: ModuleType) -> list[tuple[str, Any]]:
    return [(name, getattr(namespace, name)) for name in namespace.__all__]


def _own_classmethods(value: type, prefix: str) -> list[str]:
    """Public class methods that gonio defines; torch's own (`Embedding.from_pretrained`) are not meant."""
    found = []
    for name in sorted(name for name in dir(value) if name.startswith(prefix) and not name.startswith("_")):
        attribute = inspect.getattr_static(value, name)
        if isinstance(attribute, classmethod) and attribute.__func__.__module__.startswith("gonio."):
            found.append(name)
    return found
