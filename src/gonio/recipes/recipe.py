"""A recipe: ordered rules for every verb, as data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError, closest, listing
from gonio.escaping import html_table
from gonio.messages import say
from gonio.recipes.apply import Applied, apply_
from gonio.recipes.catalogue import AFTER_STEPS, TRAINING, VERBS, Entry, Option, catalogue, objects_of
from gonio.recipes.document import Document, Problems, dump, from_data, parse, read, shortened
from gonio.recipes.plan import Assignment, Plan, assign, plan
from gonio.recipes.rule import TENSOR_VERBS, Rule, part_to_data, read_part, read_rule

BASELINE = "baseline"
_CATALOG = Path(__file__).with_name("catalog")


@dataclass(frozen=True)
class Recipe:
    r"""Changes to a model and its training as data: initialise, swap, parametrise and penalise by rules, train, hold.

    Within a verb, each module gets the first rule that selects it; `keep` excludes modules. `where` always refers to
    the model as it is given, not to the results of earlier verbs. The verbs run in the order init, swap,
    parametrize, penalty. `optimizer`, `hold` and `clip_qk` act when the optimizer is built: `gonio compare` does it in
    each run, and a loop of your own by `applied.make_optimizer()` or `applied.hold_(optimizer)`.

    Attributes:
        name: letters, digits, `.`, `_`, `+` and `-`.
        source: where the idea comes from; description: what it does. Neither changes the hash.
        init, swap, parametrize, penalty: the rules of each verb, in order.
        optimizer: what trains the model, in place of what it would be trained with; None: nothing special.
        hold: the arguments of :func:`gonio.hold_`; None: norms are free.
        clip_qk: the arguments of :func:`gonio.clip_qk_`; None: logits are free.
        origin: the file that it was read from, for messages.

    Example:
        >>> rule = {"where": "1*", "use": "Orthogonality", "strength": 1e-3}
        >>> recipe = gonio.Recipe.from_dict({"name": "demo", "penalty": [rule]})
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> applied = recipe.apply_(model)
        >>> applied.penalty().item() > 0
        True
        >>> applied.undo_()
    """

    name: str
    source: str = ""
    description: str = ""
    init: tuple[Rule, ...] = ()
    swap: tuple[Rule, ...] = ()
    parametrize: tuple[Rule, ...] = ()
    penalty: tuple[Rule, ...] = ()
    optimizer: Rule | None = None
    hold: Rule | None = None
    clip_qk: Rule | None = None
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        empty = not any(getattr(self, part) for part in (*VERBS, *TRAINING))
        if empty and not self.origin and self.name in built_in_names():
            raise InvalidArgumentError(
                "Recipe(name, …) makes a recipe of the rules that it is given",
                f"none, and {self.name!r} is the name of a built-in recipe",
                f"Write gonio.Recipe.load({self.name!r}).",
            )

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """A built-in recipe by its name, or a recipe file by its path.

        `baseline` is the recipe without rules. Built-in names take precedence; write `./name` for a file of the
        same name.

        Raises:
            UnknownNameError: if there is neither a built-in recipe nor a file of that name.
            RecipeError: if the file cannot be read or is invalid, with every problem at once.

        Example:
            >>> gonio.Recipe.load("baseline").to_dict()
            {'name': 'baseline'}
        """
        text = str(name_or_path)
        if text == BASELINE:
            return cls(BASELINE)
        if text in built_in_names():
            path = _CATALOG / f"{text}.yaml"
            return cls.from_yaml(read(path), origin=path.name)
        path = Path(name_or_path)
        if not path.exists() and path.name == text and path.suffix not in (".yaml", ".yml"):
            raise UnknownNameError("recipe", text, [BASELINE, *built_in_names()], do=_hint(text))
        return cls.from_yaml(read(path), origin=text)

    @classmethod
    def from_yaml(cls, text: str, *, origin: str = "recipe") -> Recipe:
        """A recipe from YAML text; `origin` is the file name in errors, which tell every problem of the text."""
        return cls(**_fields(parse(text, origin=origin)), origin=origin)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """A recipe from plain data, the inverse of :meth:`to_dict`; a RecipeError tells every problem of the data."""
        origin = f"recipe {data.get('name', '')!s}".strip()
        return cls(**_fields(from_data(dict(data), origin=origin)), origin=origin)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, without its empty parts."""
        head = {key: getattr(self, key) for key in ("name", "source", "description") if getattr(self, key)}
        rules = {verb: [rule.to_data() for rule in self.rules(verb)] for verb in VERBS if self.rules(verb)}
        parts = {part: part_to_data(part, rule) for part in TRAINING if (rule := getattr(self, part)) is not None}
        return {**head, **rules, **parts}

    def to_yaml(self) -> str:
        """The recipe as the text of a file; reading it gives an equal recipe."""
        return dump(self.to_dict())

    @property
    def hash(self) -> str:
        """SHA-256 of the name, the rules and what acts on steps; comments, key order, source and description do
        not change it."""
        data = self.to_dict()
        content = {key: data[key] for key in ("name", *VERBS, *TRAINING) if key in data}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def rules(self, verb: str) -> tuple[Rule, ...]:
        """The rules of one verb, in order."""
        found: tuple[Rule, ...] = getattr(self, verb)
        return found

    def plan(self, model: nn.Module) -> Plan:
        """Which rule would apply to which layer, and which layers no rule changes; the model is not changed.

        Raises:
            UnmatchedRuleError: if a rule applies to no layer, with the rule, the file and the line.
            RecipeError: if a verb would refuse a rule, as :meth:`apply_` does.
        """
        return plan(self.name, self._assigned(model), model, optimizer=self.optimizer)

    def apply_(self, model: nn.Module, *, seed: int = 0, accumulate: int = 1) -> Applied:
        """Apply every rule to the model, or none of them.

        Build the optimizer afterwards: a swapped or parametrised layer may have further parameters. If the recipe names
        an optimizer, a hold or a clip, take the optimizer from `applied.make_optimizer()`, or hand it over by
        `applied.hold_(optimizer)`; the step of another one raises.

        Args:
            model: changed in place.
            seed: of the random numbers of initialisers and sampling penalties.
            accumulate: calls of the penalty per optimizer step.

        Raises:
            UnmatchedRuleError: if a rule applies to no layer.
            GonioError: raised by a verb; the verbs that ran before it are undone.
        """
        assigned = self._assigned(model)
        return apply_(self.name, assigned, model, seed=seed, accumulate=accumulate, optimizer=self.optimizer)

    def __repr__(self) -> str:
        counts = [f"{len(self.rules(verb))} {verb}" for verb in VERBS if self.rules(verb)]
        parts = [f", {rule}" for rule in map(partial(getattr, self), TRAINING) if rule is not None]
        return f"<Recipe {self.name}: {', '.join(counts) or 'no'} rules{''.join(parts)}>"

    def __str__(self) -> str:
        return self.to_yaml()

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object, object]] = [
            (verb, number, rule) for verb in VERBS for number, rule in enumerate(self.rules(verb), 1)
        ]
        rows += [(part, "", rule) for part in TRAINING if (rule := getattr(self, part)) is not None]
        return html_table(
            self.name, ("verb", "rule", ""), rows, [text for text in (self.description, self.source) if text]
        )

    def _assigned(self, model: nn.Module) -> list[Assignment]:
        rules = {verb: self.rules(verb) for verb in VERBS}
        rules |= {part: (rule,) for part in AFTER_STEPS if (rule := getattr(self, part)) is not None}
        return assign(rules, model, origin=self.origin or self.name)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The format as JSON Schema (draft 2020-12), for editors: every name with its options."""
        schema = Header.model_json_schema()
        keep = _mapping_schema({"where": _WHERE, "use": {"const": "keep"}}, ["use"], "leave these modules alone")
        for verb in VERBS:
            tensor = {"tensor": {"type": "string", "default": "weight"}} if verb in TENSOR_VERBS else {}
            rules = [_part_schema({"where": _WHERE, "use": {"const": use}, **tensor}, each, required=each.required)
                     for use, each in catalogue(verb).items()]  # fmt: skip
            description, items = f"rules of {verb}, first match wins", {"oneOf": [keep, *rules]}
            schema["properties"][verb] = {"type": "array", "items": items, "description": description}
        schema["properties"]["optimizer"] = {
            "oneOf": [_part_schema({"use": {"const": use}}, e) for use, e in catalogue("optimizer").items()],
            "description": "what trains the model",
        }
        for part in AFTER_STEPS:
            (entry,) = catalogue(part).values()
            schema["properties"][part] = _part_schema({"where": _WHERE}, entry)
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "gonio recipe"}


def built_in_names() -> list[str]:
    """The names of the recipes that come with the library.

    Example:
        >>> "scale-shift" in gonio.recipes.built_in_names()
        True
    """
    return sorted(path.stem for path in _CATALOG.glob("*.yaml"))


def _hint(text: str) -> str:
    """The built-in recipes whose source or description has this name of a method; empty without one."""
    word = re.compile(rf"\b{re.escape(text)}\b", flags=re.IGNORECASE)
    recipes = [Recipe.load(name) for name in built_in_names()] if len(text) > 2 else []
    found = [recipe.name for recipe in recipes if word.search(f"{recipe.source} {recipe.description}")]
    if not found:
        return ""
    return say("{text} is the method of {recipes}.", text=text, recipes=listing(found, limit=3))


class Header(BaseModel):
    """The top level of a recipe file; the rules are read one by one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    # Names become folder names, file names and labels.
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    source: str = ""
    description: str = ""
    init: list[Any] = []
    swap: list[Any] = []
    parametrize: list[Any] = []
    penalty: list[Any] = []
    optimizer: Any = None
    hold: Any = None
    clip_qk: Any = None


def _fields(document: Document) -> dict[str, Any]:
    """The fields of a recipe; one error for every problem of the document."""
    problems, data = Problems(document), document.data
    if not isinstance(data, dict):
        problems.add((), f"a recipe is a mapping that begins with `name: …`; found {_kind(data)}")
        problems.raise_if_any()
    if data.get("name") == BASELINE and any(data.get(key) for key in (*VERBS, *TRAINING)):
        problems.add(("name",), "`baseline` is the name of the unchanged model; choose another")
    try:
        Header.model_validate(data)
    except ValidationError as error:
        for row in error.errors():
            problems.add(tuple(row["loc"]), _header_message(row))
    fields: dict[str, Any] = {key: data[key] for key in ("name", "source", "description") if key in data}
    for verb in VERBS:
        listed = data.get(verb)
        rules = enumerate(listed if isinstance(listed, list) else ())
        fields[verb] = tuple(read_rule(verb, number, raw, problems) for number, raw in rules)
    for part in (part for part in TRAINING if part in data):
        fields[part] = read_part(part, data[part], problems)
    problems.raise_if_any()
    return fields


def _header_message(row: Any) -> str:
    key, known = str(row["loc"][0]), list(Header.model_fields)
    match row["type"]:
        case "extra_forbidden":
            near = closest(key, known)
            hint = f"Did you mean {listing(near)}?" if near else f"Known: {listing(known)}."
            return f"a recipe has no key {shortened(key)}. {hint}"
        case "missing":
            return f"a recipe needs the key {key!r}"
        case "string_pattern_mismatch":
            rule = "must begin with a letter or digit and have at most 64 letters, digits, '.', '_', '+' and '-'"
            return f"{rule}; found {shortened(row['input'])}"
        case "list_type":
            return f"must be a list of rules, each beginning with `-`; found {_kind(row['input'])}"
    return f"must be text; found {_kind(row['input'])}"


def _kind(value: Any) -> str:
    return {type(None): "nothing", dict: "a mapping", list: "a list"}.get(type(value)) or shortened(value)


_WHERE = {
    "type": ["string", "null"],
    "description": "glob, 're:…', 'type:…', 'stem', 'classifier'; null for every module",
}


def _part_schema(head: dict[str, Any], entry: Entry, required: Sequence[str] = ()) -> dict[str, Any]:
    needed = [*(["use"] if "use" in head else []), *required]
    return _mapping_schema({**head, **_options_schema(entry)}, needed, entry.summary)


def _options_schema(entry: Entry) -> dict[str, Any]:
    return {name: _option_schema(option) for name, option in entry.options.items()}


def _option_schema(option: Option) -> dict[str, Any]:
    arms = [] if option.plain is None else [option.adapter.json_schema()]
    for kind in option.kinds:
        arms.append({"enum": list(objects_of(kind))})
        for name, entry in objects_of(kind).items():
            inner = _mapping_schema(_options_schema(entry), entry.required, entry.summary)
            arms.append(_mapping_schema({name: inner}, [name], entry.summary))
    schema = arms[0] if len(arms) == 1 else {"anyOf": arms}
    plain = isinstance(option.default, bool | int | float | str)
    return {**schema, "default": option.default} if plain and not option.required else schema


def _mapping_schema(properties: dict[str, Any], required: list[str], description: str) -> dict[str, Any]:
    head = {"type": "object", "description": description, "additionalProperties": False}
    return {**head, "properties": properties, "required": required}
