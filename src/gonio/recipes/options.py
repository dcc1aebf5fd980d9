"""Which options a name takes and what may be given for each, read off its signature."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, reduce
from operator import or_
from types import MappingProxyType
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

__all__ = ["Option", "options_of", "type_hints"]

_SCALARS = (bool, int, float, str, type(None))
_STRICT = ConfigDict(strict=True)


@dataclass(frozen=True)
class Option:
    """One keyword argument, as far as data can express it.

    Attributes:
        plain: the part of its annotation that is text, a number, true, false, null or a list of
            these; None if there is no such part.
        kinds: the classes of the catalogue that it accepts as objects.
        required: whether it has no default.
    """

    name: str
    plain: Any = None
    kinds: tuple[type, ...] = ()
    required: bool = False
    default: Any = field(default=None, compare=False)

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Pydantic's validator of the plain part; strict, so that "3" is no number and true is no 1."""
        return TypeAdapter(self.plain, config=_STRICT)

    def check(self, value: Any) -> Any:
        """The value as its type has it, e.g. 1 as 1.0 where a float is meant.

        Raises:
            ValueError: with one sentence that says what would be accepted.
        """
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            wanted = dict.fromkeys(_wanted(row) for row in error.errors())
            raise ValueError(f"found {value!r}; it takes {' or '.join(wanted)}") from error


def _wanted(error: Any) -> str:
    """Pydantic's sentence without its beginning: `a valid number`, `'norm', 'rms' or 'both'`."""
    message = str(error["msg"])
    return message.removeprefix("Input should be ").removeprefix("Input should ")


def options_of(
    target: Callable[..., Any], *, skip: int, objects: Sequence[type], hidden: Sequence[str] = ()
) -> Mapping[str, Option]:
    """The options of a function, converter or class.

    Args:
        target: what is called.
        skip: number of leading parameters that the verb fills itself (the weight, the layer).
        objects: classes that may be values of options.
        hidden: names of further parameters that the verb fills itself.

    Example:
        >>> from collections.abc import Callable
        >>> from gonio.recipes.options import options_of
        >>> def scale_(weight, *, gain: float | Callable = 1.0, generator=None): ...
        >>> options_of(scale_, skip=1, objects=(), hidden=("generator",))
        mappingproxy({'gain': Option(name='gain', plain=<class 'float'>, kinds=(), required=False, default=1.0)})
    """
    hints = type_hints(target)
    found = {}
    for parameter in list(inspect.signature(target).parameters.values())[skip:]:
        if parameter.name in hidden or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        option = _option(parameter, hints.get(parameter.name), objects)
        if option.plain is not None or option.kinds:
            found[option.name] = option
    return MappingProxyType(found)


def type_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The evaluated annotations of a callable's parameters; dataclass fields each in their own module."""
    function: Any = getattr(target, "__func__", target)
    if isinstance(function, type) and not is_dataclass(function):
        function = inspect.getattr_static(function, "__init__")
    return typing.get_type_hints(function)


def _option(parameter: inspect.Parameter, annotation: Any, objects: Sequence[type]) -> Option:
    arms = _arms(annotation)
    plain = tuple(p for p in map(_plain, arms) if p is not None)
    kinds = tuple(arm for arm in arms if isinstance(arm, type) and any(issubclass(o, arm) for o in objects))
    required = parameter.default is parameter.empty
    default = None if required else parameter.default
    return Option(parameter.name, reduce(or_, plain) if plain else None, kinds, required, default)


def _arms(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


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
