"""`where`: which modules an edit touches, as composable data."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from gonio.errors import InvalidArgumentError

__all__ = [
    "All",
    "Any_",
    "Everything",
    "Not",
    "OfType",
    "Path",
    "Predicate",
    "Regex",
    "Selector",
    "Where",
    "as_selector",
]


class Selector(ABC):
    """A predicate over `(path, module)` that combines with `&`, `|` and `~`.

    Example:
        >>> hidden = OfType(nn.Linear) & ~Path("head")
        >>> hidden("body.0", nn.Linear(2, 2)), hidden("head", nn.Linear(2, 2))
        (True, False)
        >>> str(hidden)
        'type:Linear & ~head'
    """

    @abstractmethod
    def __call__(self, path: str, module: nn.Module) -> bool:
        """Whether the module at `path` is selected."""

    @abstractmethod
    def __str__(self) -> str:
        """The selector as a user would write it."""

    def __and__(self, other: Where) -> Selector:
        return All((self, as_selector(other)))

    def __or__(self, other: Where) -> Selector:
        return Any_((self, as_selector(other)))

    def __invert__(self) -> Selector:
        return Not(self)


@dataclass(frozen=True)
class Everything(Selector):
    """Selects every module; what `where=None` means.

    Example:
        >>> Everything()("any.path", nn.ReLU())
        True
    """

    def __call__(self, path: str, module: nn.Module) -> bool:
        return True

    def __str__(self) -> str:
        return "every module"


class OfType(Selector):
    """Selects instances of the given module classes, subclasses included.

    Example:
        >>> OfType(nn.Conv2d, nn.Linear)("fc", nn.Linear(2, 2))
        True
    """

    def __init__(self, *types: type[nn.Module]) -> None:
        if not types or not all(isinstance(t, type) for t in types):
            raise InvalidArgumentError("OfType() takes module classes", repr(types), "Pass e.g. OfType(nn.Conv2d).")
        self.types = types

    def __call__(self, path: str, module: nn.Module) -> bool:
        return isinstance(module, self.types)

    def __str__(self) -> str:
        return " | ".join(f"type:{t.__name__}" for t in self.types)

    def __repr__(self) -> str:
        return f"OfType({', '.join(t.__name__ for t in self.types)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfType) and other.types == self.types

    def __hash__(self) -> int:
        return hash(self.types)


@dataclass(frozen=True)
class OfTypeName(Selector):
    """Selects modules by the name of their class or of a base class; `"type:Conv2d"` in recipes."""

    name: str

    def __call__(self, path: str, module: nn.Module) -> bool:
        return any(self.name == base.__name__ for base in type(module).__mro__)

    def __str__(self) -> str:
        return f"type:{self.name}"


@dataclass(frozen=True)
class Path(Selector):
    """Selects modules whose dotted path matches a shell-style glob; `*` also crosses dots.

    Example:
        >>> Path("layer1.*")("layer1.0.conv1", nn.ReLU())
        True
        >>> Path("layer1")("layer1.0.conv1", nn.ReLU())
        False
    """

    glob: str

    def __call__(self, path: str, module: nn.Module) -> bool:
        return fnmatchcase(path, self.glob)

    def __str__(self) -> str:
        return self.glob


@dataclass(frozen=True)
class Regex(Selector):
    """Selects modules whose whole dotted path matches a regular expression; `"re:…"` in recipes.

    Example:
        >>> Regex(r"layer[34]\\..*")("layer3.0.conv1", nn.ReLU())
        True
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise InvalidArgumentError(
                "where was given a regular expression", f"{self.pattern!r} ({error})", "Correct the pattern."
            ) from error

    def __call__(self, path: str, module: nn.Module) -> bool:
        return re.fullmatch(self.pattern, path) is not None

    def __str__(self) -> str:
        return f"re:{self.pattern}"


@dataclass(frozen=True)
class Predicate(Selector):
    """Selects modules by a function `(path, module) -> bool`.

    Example:
        >>> wide = Predicate(lambda path, module: getattr(module, "out_features", 0) > 100)
        >>> wide("fc", nn.Linear(2, 200))
        True
    """

    function: Callable[[str, nn.Module], bool]

    def __call__(self, path: str, module: nn.Module) -> bool:
        return bool(self.function(path, module))

    def __str__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True)
class All(Selector):
    """Selects what every part selects; written `a & b`.

    Example:
        >>> All((OfType(nn.ReLU), Path("a.*")))("b.0", nn.ReLU())
        False
    """

    parts: tuple[Selector, ...]

    def __call__(self, path: str, module: nn.Module) -> bool:
        return all(part(path, module) for part in self.parts)

    def __str__(self) -> str:
        return " & ".join(_grouped(part) for part in self.parts)


@dataclass(frozen=True)
class Any_(Selector):
    """Selects what at least one part selects; written `a | b`.

    Example:
        >>> Any_((OfType(nn.ReLU), Path("a.*")))("b.0", nn.ReLU())
        True
    """

    parts: tuple[Selector, ...]

    def __call__(self, path: str, module: nn.Module) -> bool:
        return any(part(path, module) for part in self.parts)

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


@dataclass(frozen=True)
class Not(Selector):
    """Selects what the other selector does not; written `~a`.

    Example:
        >>> (~Path("head"))("head", nn.ReLU())
        False
    """

    part: Selector

    def __call__(self, path: str, module: nn.Module) -> bool:
        return not self.part(path, module)

    def __str__(self) -> str:
        return f"~{_grouped(self.part, tight=True)}"


Where = Selector | str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None


def as_selector(where: Where) -> Selector:
    """The selector that a `where` argument stands for.

    Args:
        where: a module class or tuple of classes, a glob over dotted paths (`"layer1.*"`), a regular
            expression (`"re:layer[34]\\..*"`), a class name (`"type:Conv2d"`), a function
            `(path, module) -> bool`, a :class:`Selector`, or `None` for every module.

    Raises:
        InvalidArgumentError: for anything else, and for a regular expression that does not compile.

    Example:
        >>> as_selector("type:Linear")("fc", nn.Linear(2, 2))
        True
        >>> as_selector(nn.Conv2d)("fc", nn.Linear(2, 2))
        False
    """
    match where:
        case None:
            return Everything()
        case Selector():
            return where
        case str():
            return _from_text(where)
        case type() if issubclass(where, nn.Module):
            return OfType(where)
        case tuple():
            return OfType(*where)
        case _ if callable(where) and not isinstance(where, type):
            return Predicate(where)
    raise InvalidArgumentError(
        "where takes a module class, a glob, 're:…', 'type:…', a function of path and module, or a selector",
        repr(where),
        "Pass one of these, or None for every module.",
    )


def _from_text(text: str) -> Selector:
    if text.startswith("re:"):
        return Regex(text[3:])
    if text.startswith("type:"):
        name = text[5:]
        if not name.isidentifier():
            raise InvalidArgumentError(
                "where='type:…' takes the name of a class", repr(text), "Write e.g. type:Conv2d."
            )
        return OfTypeName(name)
    return Path(text)


def _grouped(part: Selector, *, tight: bool = False) -> str:
    loose = isinstance(part, Any_) or (isinstance(part, OfType) and len(part.types) > 1)
    return f"({part})" if loose or (tight and isinstance(part, All)) else str(part)
