"""What a comparison will do, fixed and hashed before the first run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Plan", "RecipeEntry", "Training"]


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
        sesoi: smallest effect of interest, in the metric's unit.
        worst: the score that a diverged run counts as; None: the worst finished score of the study.
        code: sha256 of each user file that the task or model comes from.
        notes: what a reader must know; not part of the hash, nor are `versions`, `command` and `history`.
        history: one entry for each time that seeds or recipes were added after results existed.
    """

    task: str
    model: str
    recipes: tuple[RecipeEntry, ...]
    seeds: tuple[int, ...]
    training: Training
    metric: str
    direction: str
    unit: str
    splits: Mapping[str, int]
    sesoi: float
    worst: float | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    history: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data, `hash` included."""
        return {**asdict(self), "hash": self.hash}

    @property
    def hash(self) -> str:
        """SHA-256 over everything that a result depends on."""
        content = asdict(self)
        for key in ("notes", "versions", "command", "history"):
            del content[key]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
