"""The closed catalogue: every name that a recipe may use and its options, read from signatures.

A recipe never names a Python path: the catalogue is the `__all__` of the packages of methods. A method that is added
to a package is in the catalogue with its options, their types and defaults.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache, cached_property, reduce
from operator import or_
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from gonio import init, parametrizations, regularizers
from gonio import nn as layers
from gonio.errors import UnknownNameError
from gonio.nn import angular, magnitude
from gonio.optim import clip_qk_, hold_
from gonio.optim.named import OPTIMIZERS
from gonio.recipes.document import shortened
from gonio.surgery import init_

VERBS = ("init", "swap", "parametrize", "penalty")
# Parts that change weights after each step, and their verbs.
AFTER_STEPS: Mapping[str, Callable[..., Any]] = {"hold": hold_, "clip_qk": clip_qk_}
TRAINING = ("optimizer", *AFTER_STEPS)  # each is one mapping, no list of rules
_OF_VERB = ("where", "tensor", "seed")  # parameters of `init_` that a rule states otherwise
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Option:
    """One keyword argument, as far as data can express it.

    Attributes:
        plain: the part of its annotation that is text, a number, true, false, null or a list of these; None if
            there is no such part.
        kinds: the classes of the catalogue that it accepts as objects.
    """

    name: str
    plain: Any = None
    kinds: tuple[type, ...] = ()
    required: bool = False
    default: Any = field(default=None, compare=False)

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Validator of the plain part; strict: "3" is not a number and true is not 1."""
        return TypeAdapter(self.plain, config=ConfigDict(strict=True))

    def check(self, value: Any) -> Any:
        """The value with its type, e.g. 1 as 1.0 for a float.

        Raises:
            ValueError: with the value found and the values accepted.
        """
        arms = typing.get_args(self.plain) if isinstance(self.plain, types.UnionType) else (self.plain,)
        words = [each for arm in arms if typing.get_origin(arm) is Literal for each in typing.get_args(arm)]
        if isinstance(value, bool) and bool not in arms and words and not any(value is each for each in words):
            raise ValueError(f"found {value}; expected {' or '.join(map(repr, words))}")  # true equals 1
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            found = [row["msg"].removeprefix("Input should ").removeprefix("be ") for row in error.errors()]
            raise ValueError(f"found {shortened(value)}; expected {' or '.join(dict.fromkeys(found))}") from error


@dataclass(frozen=True)
class Entry:
    """One name of the catalogue.

    Attributes:
        name: as a recipe writes it under `use`; the long form if there is a short one.
        target: the function, class or converter.
        options: its options by name.
    """

    name: str
    target: Callable[..., Any]
    options: Mapping[str, Option]

    @property
    def makes(self) -> type:
        """The class of the result, for a class and its named constructors; `object` for the rest."""
        owner = getattr(self.target, "__self__", self.target)
        return owner if isinstance(owner, type) else object

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.target) or "").split("\n")[0]

    @property
    def required(self) -> list[str]:
        """Names of the options without a default."""
        return [name for name, option in self.options.items() if option.required]


@cache
def catalogue(verb: str) -> Mapping[str, Entry]:
    """The names that may follow `use` under a verb or `optimizer`; of a part after steps the one function."""
    match verb:
        case "init":
            entries = _initialisers()
        case "swap":
            entries = _converters()
        case "parametrize":
            entries = _classes(parametrizations, parametrizations.Parametrization)
        case "optimizer":
            entries = _optimizers()
        case _ if verb in AFTER_STEPS:
            act = AFTER_STEPS[verb]
            described = _options_of(act, skip=2, hidden=("where", "heads", "example"))
            entries = iter([(act.__name__, Entry(act.__name__, act, described))])
        case _:
            entries = _classes(regularizers, regularizers.Regularizer)
    return MappingProxyType(dict(entries))


@cache
def objects_of(kind: type) -> Mapping[str, Entry]:
    """The objects of a kind by name, e.g. of `magnitude:`, with named constructors such as `Milestones.srip`."""
    classes = [value for value in _objects() if issubclass(value, kind)]
    return MappingProxyType({name: entry for value in classes for name, entry in _constructors(value, objects=())})


def find(verb: str, name: str) -> Entry:
    """The entry of a name under a verb; the error has the closest names, and the verb that knows the name."""
    known = catalogue(verb)
    if name in known:
        return known[name]
    elsewhere = [other for other in (*VERBS, "optimizer") if other != verb and name in catalogue(other)]
    entry = "optimizer" if verb == "optimizer" else f"entry of {verb}"
    kind = f"{entry} (it belongs under {elsewhere[0]})" if elsewhere else entry
    raise UnknownNameError(kind, name, ["keep", *known] if verb in VERBS else known)


_Entries = Iterator[tuple[str, Entry]]


def _initialisers() -> _Entries:
    for name, value in _public(init):  # mup_ needs the shape of another model's weight, which a rule cannot give
        if name.endswith("_") and inspect.isfunction(value) and name != "mup_":
            own = _options_of(value, skip=1, hidden=("layout", "generator"))
            yield name, Entry(name, value, MappingProxyType({**own, **_options_of(init_, skip=2, hidden=_OF_VERB)}))


def _converters() -> _Entries:
    """The functions `to_x` and `Class.from_x`, then plain `Class` for each class with one converter."""
    short: dict[str, Entry] = {}
    for name, value in _public(layers):
        if name.startswith("to_") and inspect.isfunction(value):
            yield name, _converter(name, value)
        elif isinstance(value, type) and issubclass(value, nn.Module):
            found = [_converter(f"{name}.{m}", getattr(value, m)) for m in _own_classmethods(value, "from_")]
            yield from ((entry.name, entry) for entry in found)
            short |= {name: found[0]} if len(found) == 1 else {}
    yield from short.items()


def _converter(name: str, target: Callable[..., Any]) -> Entry:
    options = getattr(getattr(target, "__self__", None), "options", None)  # a dataclass of the converter's keywords
    described = _options_of(target, skip=1) if options is None else _options_of(options, skip=0)
    return Entry(name, target, described)


def _optimizers() -> _Entries:
    """The named optimizers; the learning rate may come from elsewhere, so it is not required."""
    for name, make in OPTIMIZERS.items():
        options = {key: replace(option, required=False) for key, option in _options_of(make, skip=1).items()}
        yield name, Entry(name, make, MappingProxyType(options))


def _classes(namespace: ModuleType, base: type) -> _Entries:
    """Every concrete subclass of `base`, and its named constructors."""
    for _, value in _public(namespace):
        concrete = isinstance(value, type) and value is not base and not inspect.isabstract(value)
        if concrete and issubclass(value, base):
            yield from _constructors(value, objects=_objects())


def _constructors(value: type, *, objects: Sequence[type]) -> _Entries:
    named = {f"{value.__name__}.{method}": getattr(value, method) for method in _own_classmethods(value, "")}
    for name, target in {value.__name__: value, **named}.items():
        yield name, Entry(name, target, _options_of(target, skip=0, objects=objects))


@cache
def _objects() -> tuple[type, ...]:
    """The classes that may be the value of an option, e.g. `magnitude: {Tanh: {learn_radius: true}}`."""
    found = [value for module in (magnitude, angular, regularizers) for _, value in _public(module)]
    return tuple(v for v in found if isinstance(v, type) and is_dataclass(v) and not inspect.isabstract(v))


def _public(namespace: ModuleType) -> list[tuple[str, Any]]:
    return [(name, getattr(namespace, name)) for name in namespace.__all__]


def _own_classmethods(value: type, prefix: str) -> list[str]:
    """Public constructors that gonio defines, by their annotation; not torch's own (`Embedding.from_pretrained`)."""
    found, made = [], {"Self", *(base.__name__ for base in value.__mro__)}
    for name in sorted(name for name in dir(value) if name.startswith(prefix) and not name.startswith("_")):
        attribute = inspect.getattr_static(value, name)
        function = attribute.__func__ if isinstance(attribute, classmethod) else None
        if (
            function is not None
            and function.__module__.startswith("gonio.")
            and function.__annotations__["return"] in made
        ):
            found.append(name)
    return found


def _options_of(
    target: Callable[..., Any], *, skip: int, hidden: Sequence[str] = (), objects: Sequence[type] | None = None
) -> Mapping[str, Option]:
    """The options of a function, converter or class that data can express.

    Args:
        skip: number of leading parameters that the verb fills (the weight, the layer).
        hidden: names of further parameters that the verb fills.
        objects: classes that may be values of options; None: all.
    """
    hints, allowed = _hints(target), _objects() if objects is None else objects
    found = {}
    for parameter in list(inspect.signature(target).parameters.values())[skip:]:
        if parameter.name in hidden or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = hints.get(parameter.name)
        united = typing.get_origin(annotation) in (Union, types.UnionType)
        arms = typing.get_args(annotation) if united else (annotation,)
        plain = [made for made in map(_plain, arms) if made is not None]
        kinds = tuple(arm for arm in arms if isinstance(arm, type) and any(issubclass(o, arm) for o in allowed))
        if plain or kinds:
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            found[parameter.name] = Option(
                parameter.name, reduce(or_, plain) if plain else None, kinds, required, default
            )
    return MappingProxyType(found)


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The evaluated annotations of a callable's parameters; dataclass fields each in their own module."""
    function: Any = getattr(target, "__func__", target)
    if isinstance(function, type) and not is_dataclass(function):
        function = inspect.getattr_static(function, "__init__")
    return typing.get_type_hints(function)


def _plain(annotation: Any) -> Any:
    """The annotation if data can express it, with tuples as the lists that YAML has."""
    if annotation in _SCALARS or typing.get_origin(annotation) is Literal:
        return annotation
    if typing.get_origin(annotation) in (tuple, list, Sequence):
        items = [item for item in typing.get_args(annotation) if item is not Ellipsis]
        if items and all(item in _SCALARS for item in items):
            item: Any = reduce(or_, items)
            return types.GenericAlias(list, (item,))
    return None
