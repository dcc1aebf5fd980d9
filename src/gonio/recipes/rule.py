"""One rule of a recipe: where, which method and its options; read from plain data and checked without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gonio.errors import GonioError, UnknownNameError, closest, listing
from gonio.optim import clip_qk, hold
from gonio.recipes.catalogue import Entry, Option, catalogue, find, objects_of
from gonio.recipes.document import Location, Problems, shortened
from gonio.surgery import as_selector

KEEP = "keep"
ENDS = ("stem", "classifier")
TENSOR_VERBS = ("init", "parametrize")  # their rules may name the tensor of the layer

_EXAMPLES = {
    "optimizer": "{use: muon, lr: 0.02}",
    "hold": "{where: …, norm: …, step: …}",
    "clip_qk": "{where: …, limit: …}",
}
_CHECKS: dict[str, Callable[..., None]] = {"hold": hold.check_arguments, "clip_qk": clip_qk.check_arguments}

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Named:
    """An object of the catalogue as data: `Cosine`, or `{Tanh: {learn_radius: true}}`.

    Attributes:
        name: of the class.
        options: its arguments, sorted by name.
        kind: the class that it must be a subclass of; two packages may use the same name.

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
        return known[self.name].target(**_built(self.options))

    def __str__(self) -> str:
        return f"{self.name}({_text(self.options)})"


@dataclass(frozen=True)
class Rule:
    """A selection of modules and the method that they get.

    Attributes:
        where: as a recipe file writes it; None for every module that the verb can act on.
        use: a name of the catalogue, or `keep`.
        options: arguments of the method, sorted by name.
        line: of the file, if it was read from one.

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
        """Whether the rule excludes the modules that it selects."""
        return self.use == KEEP

    def to_data(self) -> dict[str, Any]:
        """As a recipe file writes it."""
        return {"where": self.where, "use": self.use, **_data(self.options)}

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments, with every named object built."""
        return _built(self.options)

    def __str__(self) -> str:
        return f"{self.use}({_text(self.options)})" if self.options else self.use


def part_to_data(part: str, rule: Rule) -> dict[str, Any]:
    """`optimizer`, `hold` or `clip_qk` as a recipe file writes it: the first has no `where`, the others no `use`."""
    data = rule.to_data()
    del data["where" if part == "optimizer" else "use"]
    return data


def _built(options: Options) -> dict[str, Any]:
    return {name: value.build() if isinstance(value, Named) else value for name, value in options}


def _data(options: Options) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return value.to_data() if isinstance(value, Named) else list(value) if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in options}


def _text(options: Options) -> str:
    return ", ".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in options)


def read_rule(verb: str, number: int, raw: Any, problems: Problems) -> Rule | None:
    """A rule of a verb from plain data; None if something is wrong with it, which is added to `problems`."""
    at = (verb, number)
    if not isinstance(raw, dict):
        problems.add(at, f"a rule is a mapping such as {{where: …, use: …}}; found {shortened(raw)}")
        return None
    before, line = len(problems), problems.document.line(at)
    where, use = raw.get("where"), raw.get("use")
    rest = {key: value for key, value in raw.items() if key not in ("where", "use")}
    _check_where(where, (*at, "where"), problems)
    if not isinstance(use, str):
        found = shortened(use) if "use" in raw else "nothing"
        problems.add((*at, "use") if "use" in raw else at, f"a rule needs `use` with a name; found {found}")
        return None
    if use == KEEP:
        for key in rest:
            problems.add((*at, key), f"`keep` takes no options; remove {key!r}")
        return Rule(where, KEEP, line=line) if len(problems) == before else None
    try:
        entry = find(verb, use)
    except UnknownNameError as error:
        problems.add((*at, "use"), str(error))
        return None
    own = {"tensor": rest.pop("tensor")} if verb in TENSOR_VERBS and "tensor" in rest else {}
    for key, value in own.items():
        if not isinstance(value, str) or not value.isidentifier():
            problems.add((*at, key), f"must be a name; found {shortened(value)}")
    options = _read_options(entry, rest, at, problems, build=verb in ("parametrize", "penalty"))
    return Rule(where, entry.name, tuple(sorted([*own.items(), *options])), line) if len(problems) == before else None


def read_part(part: str, raw: Any, problems: Problems) -> Rule | None:
    """`optimizer`, `hold` or `clip_qk` from plain data; None if something is wrong, which is added to `problems`."""
    at, before = (part,), len(problems)
    if not isinstance(raw, dict):
        example = _EXAMPLES[part]
        problems.add(at, f"must be a mapping such as {example}; found {shortened(raw)}")
        return None
    rest, where = dict(raw), None
    if part == "optimizer":
        use = rest.pop("use", None)
        if not isinstance(use, str):
            problems.add(at, f"the optimizer needs `use` with a name; known: {listing(list(catalogue(part)))}")
            return None
        try:
            entry = find(part, use)
        except UnknownNameError as error:
            problems.add((*at, "use"), str(error))
            return None
    else:
        (entry,) = catalogue(part).values()
        where = rest.pop("where", None)
        _check_where(where, (*at, "where"), problems)
    options = _read_options(entry, rest, at, problems, build=False)
    if len(problems) == before:
        try:
            _try_part(part, entry, dict(options))
        except GonioError as error:
            problems.add(at, str(error))
    return Rule(where, entry.name, options, problems.document.line(at)) if len(problems) == before else None


def _try_part(part: str, entry: Entry, options: dict[str, Any]) -> None:
    """Find values out of range before there is a model or an optimizer."""
    if part in _CHECKS:
        _CHECKS[part](**options)
        return
    smallest = nn.Module()
    smallest.weight = nn.Parameter(torch.zeros(2, 2))
    entry.target(smallest, **{"lr": 1.0, **options})


def _read_options(entry: Entry, raw: Mapping[str, Any], at: Location, problems: Problems, *, build: bool) -> Options:
    """The options of one name, checked.

    Args:
        build: whether to make the object once, so that a value out of range is found before there is a model.
    """
    before, known = len(problems), list(entry.options)
    for name in raw.keys() - entry.options.keys():
        near = closest(name, known)
        takes = f"Its options: {listing(known)}." if known else "It has none."
        hint = f"Did you mean {listing(near)}?" if near else takes
        problems.add((*at, name), f"{entry.name} has no option {shortened(name)}. {hint}")
    missing = [name for name in entry.required if name not in raw]
    if missing:
        problems.add(at, f"{entry.name} needs {listing(missing)}")
    names = sorted(raw.keys() & entry.options.keys())
    options = tuple((name, _read_value(entry.options[name], raw[name], (*at, name), problems)) for name in names)
    if build and len(problems) == before:
        try:
            entry.target(**_built(options))
        except GonioError as error:
            problems.add(at, str(error))
    return options


def _read_value(option: Option, raw: Any, at: Location, problems: Problems) -> Any:
    if option.kinds and (isinstance(raw, str) or (isinstance(raw, dict) and len(raw) == 1)):
        return _read_named(option, raw, at, problems)
    if option.plain is None:
        names = listing([name for kind in option.kinds for name in objects_of(kind)])
        problems.add(at, f"found {shortened(raw)}; expected one of {names}, bare or as {{Name: {{option: value}}}}")
        return None
    try:
        value = option.check(raw)
    except ValueError as error:
        problems.add(at, str(error))
        return None
    return tuple(value) if isinstance(value, list) else value


def _read_named(option: Option, raw: str | dict[str, Any], at: Location, problems: Problems) -> Named | None:
    name, inner = (raw, {}) if isinstance(raw, str) else next(iter(raw.items()))
    here = at if isinstance(raw, str) else (*at, name)
    kind = next((kind for kind in option.kinds if name in objects_of(kind)), None)
    if kind is None:
        names = [known for kind in option.kinds for known in objects_of(kind)]
        problems.add(here, str(UnknownNameError(option.kinds[0].__name__.lower(), name, names)))
        return None
    if inner is not None and not isinstance(inner, dict):
        problems.add(here, f"the options of {name} are a mapping; found {shortened(inner)}")
        return None
    return Named(name, _read_options(objects_of(kind)[name], inner or {}, here, problems, build=True), kind)


def _check_where(where: Any, at: Location, problems: Problems) -> None:
    """Check a `where` before there is a model."""
    if where is None or where in ENDS:
        return
    if not isinstance(where, str) or not where.strip() or len(where) > 500:
        expected = "text such as 'layer1.*', 'type:Conv2d', 're:…' or 'stem', of at most 500 characters, or null"
        problems.add(at, f"must be {expected}; found {shortened(where)}")
        return
    try:
        as_selector(where)
    except (GonioError, OverflowError, RecursionError) as error:
        problems.add(at, str(error))
