"""A recipe: an ordered list of rules as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gonio.errors import UnknownNameError
from gonio.recipes.applied import Applied, apply_
from gonio.recipes.assign import Assignment, assign
from gonio.recipes.document import plain
from gonio.recipes.names import VERBS
from gonio.recipes.plan import Plan, plan
from gonio.recipes.read import read_recipe
from gonio.recipes.rule import Rule
from gonio.recipes.schema import json_schema
from gonio.recipes.text import dump, parse, read

__all__ = ["BASELINE", "Recipe", "built_in_names"]

BASELINE = "baseline"
_CATALOG = Path(__file__).with_name("catalog")


@dataclass(frozen=True)
class Recipe:
    r"""What to do to a model, as data: initialise, swap, parametrise and penalise by rules.

    Within a verb the first rule that selects a module takes it, and `keep` takes it out. `where`
    always speaks about the model as it is given, whatever an earlier verb puts in its place. The
    verbs run in the order init, swap, parametrize, penalty.

    Attributes:
        name: letters, digits, `.`, `_`, `+` and `-`.
        source: where the idea comes from; description: what it does. Neither changes the hash.
        init, swap, parametrize, penalty: the rules of each verb, in order.
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
    origin: str = field(default="", compare=False)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """A built-in recipe by its name, or a recipe file by its path.

        The name `baseline` is the recipe without rules. Names are looked up first; write `./name`
        for a file that has the name of a built-in recipe.

        Raises:
            UnknownNameError: if there is neither a built-in recipe nor a file of that name.
            RecipeError: if the file cannot be read or says something wrong, all of it at once.

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
            raise UnknownNameError("recipe", text, [BASELINE, *built_in_names()])
        return cls.from_yaml(read(path), origin=text)

    @classmethod
    def from_yaml(cls, text: str, *, origin: str = "recipe") -> Recipe:
        """A recipe from YAML text; `origin` is the file name that errors show.

        Raises:
            RecipeError: with every problem of the text.
        """
        return cls(**read_recipe(parse(text, origin=origin)), origin=origin)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """A recipe from plain data, the inverse of :meth:`to_dict`.

        Raises:
            RecipeError: with every problem of the data.
        """
        origin = f"recipe {data.get('name', '')!s}".strip()
        return cls(**read_recipe(plain(dict(data), origin=origin)), origin=origin)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data; parts that are empty are left out."""
        head = {key: getattr(self, key) for key in ("name", "source", "description") if getattr(self, key)}
        return {**head, **{verb: [rule.to_data() for rule in self.rules(verb)] for verb in VERBS if self.rules(verb)}}

    def to_yaml(self) -> str:
        """The recipe as a file; reading it gives an equal recipe."""
        return dump(self.to_dict())

    @property
    def hash(self) -> str:
        """SHA-256 of the name and the rules; comments, key order, source and description do not count."""
        data = self.to_dict()
        content = {key: data[key] for key in ("name", *VERBS) if key in data}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def rules(self, verb: str) -> tuple[Rule, ...]:
        """The rules of one verb, in order."""
        found: tuple[Rule, ...] = getattr(self, verb)
        return found

    def plan(self, model: nn.Module) -> Plan:
        """Which rule would take which layer, and what would stay untouched; changes nothing.

        Raises:
            UnmatchedRuleError: if a rule takes no layer, naming the rule, the file and the line.
        """
        return plan(self.name, self._assigned(model), model)

    def apply_(self, model: nn.Module, *, seed: int = 0) -> Applied:
        """Apply every rule to the model, or none of them.

        Build the optimizer afterwards: a swapped or parametrised layer may have further parameters.

        Args:
            model: changed in place.
            seed: of the random numbers that initialisers and sampling penalties use.

        Raises:
            UnmatchedRuleError: if a rule takes no layer.
            GonioError: what the verbs raise; the verbs that ran before are undone then.
        """
        # Everything is assigned before anything is done, so that `where` speaks about the model as given.
        return apply_(self.name, self._assigned(model), model, seed=seed)

    def _assigned(self, model: nn.Module) -> list[Assignment]:
        rules = {verb: self.rules(verb) for verb in VERBS}
        return assign(rules, model, origin=self.origin or self.name)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The format as JSON Schema (draft 2020-12), for editors: every name with its options."""
        return json_schema()


def built_in_names() -> list[str]:
    """The names of the recipes that come with the library.

    Example:
        >>> "scale-shift" in gonio.recipes.built_in_names()
        True
    """
    return sorted(path.stem for path in _CATALOG.glob("*.yaml"))
