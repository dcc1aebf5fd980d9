"""One rule of a recipe: where, what, with which options; read from plain data and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gonio.errors import GonioError, UnknownNameError, closest, listing
from gonio.recipes.document import Location, Problems
from gonio.recipes.names import Entry, find, objects_of
from gonio.recipes.options import Option
from gonio.recipes.where import check_where

__all__ = ["KEEP", "Named", "Rule", "read_rule"]

KEEP = "keep"
# What the verb itself reads from a rule, beside the options that go to the thing named.
_OWN = {"init": ("tensor",), "swap": (), "parametrize": ("tensor",), "penalty": ()}

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Named:
    """An object of the catalogue as data: `Cosine`, or `{Tanh: {learn_radius: true}}`.

    Attributes:
        name: of the class.
        options: its arguments, sorted by name.
        kind: the class that it must be a subclass of; two namespaces may use the same name.

    Example:
        >>> tanh = gonio.recipes.Named("Tanh", (("radius", 2.0),), gonio.nn.magnitude.Magnitude)
        >>> tanh.to_data(), tanh.build().radius
        ({'Tanh': {'radius': 2.0}}, 2.0)
    """

    name: str
    options: Options
    kind: type = field(compare=False, repr=False)

    def to_data(self) -> str | dict[str, Any]:
        """As a recipe file writes it."""
        return {self.name: _data(self.options)} if self.options else self.name

    def build(self) -> Any:
        """The object itself."""
        known = objects_of(self.kind)
        if self.name not in known:
            raise UnknownNameError(self.kind.__name__.lower(), self.name, known)
        return known[self.name].target(**built(self.options))


@dataclass(frozen=True)
class Rule:
    """Which modules, and what is done to them.

    Attributes:
        where: as a recipe file writes it; None for every module that the verb can act on.
        use: a name of the catalogue, or `keep`.
        options: arguments of the thing named, sorted by name.
        line: where the rule was written, if it was read from a file.

    Example:
        >>> rule = gonio.Recipe.load("self-orthogonality").penalty[0]
        >>> print(rule.where, rule)
        type:Conv2d SelfOrthogonality(strength=0.01)
    """

    where: str | None
    use: str
    options: Options = ()
    line: int | None = field(default=None, compare=False)

    @property
    def keeps(self) -> bool:
        """Whether the rule excludes what it selects."""
        return self.use == KEEP

    def to_data(self) -> dict[str, Any]:
        """As a recipe file writes it."""
        return {"where": self.where, "use": self.use, **_data(self.options)}

    def arguments(self) -> dict[str, Any]:
        """The options with every named object built."""
        return built(self.options)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={_text(value)}" for name, value in self.options)
        return f"{self.use}({options})" if options else self.use


def built(options: Options) -> dict[str, Any]:
    """Options as keyword arguments."""
    return {name: value.build() if isinstance(value, Named) else value for name, value in options}


def read_rule(verb: str, raw: Any, at: Location, problems: Problems, *, line: int | None) -> Rule | None:
    """A rule from plain data; what is wrong with it is added to `problems`, and then there is no rule."""
    if not isinstance(raw, dict):
        problems.add(at, f"a rule is a mapping such as {{where: …, use: …}}; found {raw!r}")
        return None
    where_is_fine = check_where(raw.get("where"), (*at, "where"), problems)
    use = raw.get("use")
    if not isinstance(use, str):
        found = "nothing" if "use" not in raw else repr(use)
        problems.add((*at, "use") if "use" in raw else at, f"a rule needs `use` with a name; found {found}")
        return None
    rest = {key: value for key, value in raw.items() if key not in ("where", "use")}
    options = _read_options_of_rule(verb, use, rest, at, problems)
    if options is None or not where_is_fine:
        return None
    return Rule(raw.get("where"), use if use == KEEP else find(verb, use).name, options, line)


def _read_options_of_rule(
    verb: str, use: str, raw: Mapping[str, Any], at: Location, problems: Problems
) -> Options | None:
    if use == KEEP:
        for key in raw:
            problems.add((*at, key), f"`keep` takes no options; remove {key!r}")
        return None if raw else ()
    try:
        entry = find(verb, use)
    except UnknownNameError as error:
        problems.add((*at, "use"), str(error))
        return None
    own = [(key, raw[key]) for key in _OWN[verb] if key in raw]
    wrong = [key for key, value in own if not isinstance(value, str) or not value.isidentifier()]
    for key in wrong:
        problems.add((*at, key), f"must be a name; found {raw[key]!r}")
    options = _read_options(entry, {k: v for k, v in raw.items() if k not in _OWN[verb]}, at, problems)
    if options is None or wrong:
        return None
    if verb in ("parametrize", "penalty") and not _builds(entry, options, at, problems):
        return None
    return tuple(sorted([*own, *options]))


def _read_options(entry: Entry, raw: Mapping[str, Any], at: Location, problems: Problems) -> Options | None:
    """Every option of one name; None if any is unknown, missing or of the wrong type."""
    fine = True
    for name in raw.keys() - entry.options.keys():
        problems.add((*at, name), _unknown_option(entry, name))
        fine = False
    missing = [name for name, option in entry.options.items() if option.required and name not in raw]
    if missing:
        problems.add(at, f"{entry.name} needs {listing(missing)}")
        fine = False
    result = []
    for name in sorted(raw.keys() & entry.options.keys()):
        ok, value = _read_value(entry.options[name], raw[name], (*at, name), problems)
        fine = fine and ok
        result.append((name, value))
    return tuple(result) if fine else None


def _unknown_option(entry: Entry, name: str) -> str:
    known = list(entry.options)
    near = closest(name, known)
    takes = f"It takes {listing(known)}." if known else "It takes none."
    hint = f"Did you mean {listing(near)}?" if near else takes
    return f"{entry.name} has no option {name!r}. {hint}"


def _read_value(option: Option, raw: Any, at: Location, problems: Problems) -> tuple[bool, Any]:
    if option.kinds and _looks_named(raw):
        return _read_named(option, raw, at, problems)
    if option.plain is None:
        names = listing([name for kind in option.kinds for name in objects_of(kind)])
        problems.add(at, f"found {raw!r}; it takes one of {names}, bare or as {{Name: {{option: value}}}}")
        return False, None
    try:
        value = option.check(raw)
    except ValueError as error:
        problems.add(at, str(error))
        return False, None
    return True, tuple(value) if isinstance(value, list) else value


def _looks_named(raw: Any) -> bool:
    return isinstance(raw, str) or (isinstance(raw, dict) and len(raw) == 1)


def _read_named(option: Option, raw: Any, at: Location, problems: Problems) -> tuple[bool, Any]:
    name, inner = (raw, {}) if isinstance(raw, str) else next(iter(raw.items()))
    here = at if isinstance(raw, str) else (*at, name)
    found = [(kind, objects_of(kind)[name]) for kind in option.kinds if name in objects_of(kind)]
    if not found:
        names = [known for kind in option.kinds for known in objects_of(kind)]
        problems.add(here, str(UnknownNameError(option.kinds[0].__name__.lower(), name, names)))
        return False, None
    kind, entry = found[0]
    if inner is not None and not isinstance(inner, dict):
        problems.add(here, f"the options of {name} are a mapping; found {inner!r}")
        return False, None
    options = _read_options(entry, inner or {}, here, problems)
    if options is None or not _builds(entry, options, here, problems):
        return False, None
    return True, Named(name, options, kind)


def _builds(entry: Entry, options: Options, at: Location, problems: Problems) -> bool:
    """Makes the object once: a value out of range is found now and not when a model is at hand."""
    try:
        entry.target(**built(options))
    except GonioError as error:
        problems.add(at, str(error))
        return False
    return True


def _data(options: Options) -> dict[str, Any]:
    return {name: _plain(value) for name, value in options}


def _plain(value: Any) -> Any:
    if isinstance(value, Named):
        return value.to_data()
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, Named):
        inner = ", ".join(f"{name}={_text(item)}" for name, item in value.options)
        return f"{value.name}({inner})"
    return f"{value:g}" if isinstance(value, float) else str(value)
