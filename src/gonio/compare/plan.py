"""What a comparison will do, fixed and hashed before the first run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gonio.compare.threat import Threat
from gonio.compare.tuning_space import Tuning
from gonio.errors import PlanChangedError
from gonio.seeding import derive_seed

__all__ = ["Plan", "RecipeEntry", "Training", "extended"]

# Fields that plans of older versions lack: at these values they leave the hash as it was.
_LATER = {"self_test": False, "tuning": None, "threat": None}
_ALWAYS = object()
# What no result depends on.
_UNHASHED = ("notes", "versions", "command", "history")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How every run is trained, whatever its recipe.

    Attributes:
        optimizer: `sgd` (Nesterov momentum) or `adamw`.
        lr: the peak; it falls to 0 over the run as a half cosine.
    """

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass(frozen=True)
class RecipeEntry:
    """A recipe as data, with its hash; the baseline has empty content."""

    name: str
    content: Mapping[str, Any]
    hash: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Recipes × seeds on one task and model, with one way to train and one way to judge.

    Attributes:
        recipes: the baseline first.
        direction: `max` if a larger score is better, else `min`.
        unit: of the score and of `sesoi`.
        splits: number of examples in `train`, `validation` and `test`.
        data: sha256 over every number of the three splits.
        sesoi: smallest effect of interest, in the metric's unit.
        worst: the score that a diverged run counts as; None: the worst finished score of the study.
        code: sha256 of each user file that the task or model comes from.
        notes: what a reader must know; not part of the hash, nor are `versions`, `command` and `history`.
        training: None: `task` is a script of the user's own, which trains as it likes.
        self_test: the recipes change nothing and draw other random numbers than the baseline.
        tuning: how every recipe is tuned first; None: not at all.
        threat: how trained models are attacked; None: not at all.
        history: one entry for each time that seeds or recipes were added after results existed.
    """

    task: str
    model: str
    recipes: tuple[RecipeEntry, ...]
    seeds: tuple[int, ...]
    training: Training | None
    metric: str
    direction: str
    unit: str
    splits: Mapping[str, int]
    data: str
    sesoi: float
    worst: float | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    history: tuple[Mapping[str, Any], ...] = ()
    self_test: bool = False
    tuning: Tuning | None = None
    threat: Threat | None = None

    @property
    def scripted(self) -> bool:
        """Whether `task` is a training function of the user's own."""
        return self.training is None

    @property
    def trained(self) -> Training:
        """How gonio trains; of a script it does not."""
        if self.training is None:
            raise ValueError(f"{self.task} trains by itself")
        return self.training

    def seed_of(self, entry: RecipeEntry, seed: int) -> int:
        """What a run's randomness starts from: its seed; in a self-test each recipe draws its own."""
        own = self.self_test and entry.name != self.baseline.name
        return derive_seed(seed, entry.name) if own else seed

    @property
    def hash(self) -> str:
        """SHA-256 over everything that a result depends on."""
        content = {key: value for key, value in asdict(self).items() if key not in _UNHASHED}
        content = {key: value for key, value in content.items() if value != _LATER.get(key, _ALWAYS)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def baseline(self) -> RecipeEntry:
        """The unchanged model, to which every recipe is compared."""
        return self.recipes[0]

    @property
    def grid(self) -> tuple[tuple[RecipeEntry, int], ...]:
        """Every run, seed by seed, so that a study that is cut short holds whole pairs."""
        return tuple((recipe, seed) for seed in self.seeds for recipe in self.recipes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data, `hash` included."""
        return {**asdict(self), "hash": self.hash}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`; unknown keys are an error."""
        values = {key: value for key, value in data.items() if key != "hash"}
        values["recipes"] = tuple(RecipeEntry(**entry) for entry in values["recipes"])
        values["training"] = None if values["training"] is None else Training(**values["training"])
        for key, kind in (("tuning", Tuning), ("threat", Threat)):
            values[key] = kind(**values[key]) if values.get(key) else None
        for key in ("seeds", "notes", "history"):
            values[key] = tuple(values[key])
        return cls(**values)


def extended(old: Plan, new: Plan, *, path: str, finished: int) -> Plan:
    """The plan of a study that has `old` and is asked for `new`.

    Seeds and recipes may be added; everything else must be as it was. If runs were finished, the
    addition goes to `history`: whoever adds seeds after a look at the results has looked twice.

    Raises:
        PlanChangedError: with every key that differs, its old and its new value.
    """
    changes = _changes(old, new)
    if changes:
        raise PlanChangedError(path, changes)
    added = {
        "seeds": [seed for seed in new.seeds if seed not in old.seeds],
        "recipes": [entry.name for entry in new.recipes if entry not in old.recipes],
    }
    looked = finished > 0 and any(added.values())
    history = (*old.history, {**added, "finished": finished}) if looked else old.history
    # The first versions stay: they are those of the first run. Each run's row has its own.
    return replace(new, history=history, versions=old.versions, notes=new.notes)


def _changes(old: Plan, new: Plan) -> list[tuple[str, str, str]]:
    before, after = _flat(old), _flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    changes = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in keys]
    changes = [(key, was, now) for key, was, now in changes if was != now]
    lost = [seed for seed in old.seeds if seed not in new.seeds]
    if lost:
        changes.append(("seeds", str(list(old.seeds)), str(list(new.seeds))))
    recipes = {entry.name: entry.hash for entry in new.recipes}
    for entry in old.recipes:
        if recipes.get(entry.name) != entry.hash:
            now = recipes.get(entry.name)
            changes.append((f"recipe {entry.name}", _short(entry.hash), _short(now) if now else "absent"))
    return changes


def _flat(plan: Plan) -> dict[str, str]:
    """What may not change, one text per key; nested keys as `training.lr`."""
    flat: dict[str, str] = {}
    for key, value in asdict(plan).items():
        if key in (*_UNHASHED, "recipes", "seeds"):
            continue
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": _short(str(item)) for inner, item in value.items()})
        else:
            flat[key] = _short(str(value))
    return flat


def _short(text: str) -> str:
    """Hashes cut to what a person compares."""
    return f"{text[:12]}…" if len(text) == 64 else text
