"""What a training function of the user's own is given: one recipe, one seed, and a place for its checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gonio.compare.portrait import portrait
from gonio.compare.randomness import kept_generators
from gonio.compare.workers import die_with_parent
from gonio.errors import InvalidArgumentError
from gonio.recipes import Recipe
from gonio.recipes.applied import Applied

__all__ = ["Outcome", "Run", "leads"]

_LOG, _OUTCOME, _PLAN, _RESUME = "log.jsonl", "outcome.json", "plan.txt", "resume"
_VERBS = ("init", "swap", "parametrize", "penalty")
_LONGEST = 1000  # points of a curve in the database


class Run:
    """One run of `gonio compare --script train.py:train`, as `train` sees it.

    It may be handed to processes that `train` starts (before `apply_` is called): they then log, and report
    the score, into the same run, and end when the process that started them ends.

    Attributes:
        seed: of everything random in the run. The global generators were seeded with it already.
        recipe: the recipe's name; `baseline` for the unchanged model.
        folder: for whatever the run writes; removed when the run is finished.
        resume_path: where `train` may keep a checkpoint, a file or a folder. What lies there at the start
            was left by an earlier try of the same run that was cut short; nothing does at the first try.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> def train(run):
        ...     model = nn.Linear(4, 2)
        ...     run.apply_(model)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loss = model(torch.ones(1, 4)).square().sum() + run.penalty()
        ...     loss.backward()
        ...     optimizer.step()
        ...     run.log(0, train_loss=loss)
        ...     return -loss
        >>> run = gonio.compare.Run({"name": "baseline"}, seed=0, folder=Path(tempfile.mkdtemp()))
        >>> train(run).item() < 0, run.resume_path.exists()
        (True, False)
    """

    def __init__(self, recipe: Mapping[str, Any], *, seed: int, folder: Path) -> None:
        self.seed = seed
        self.recipe = str(recipe["name"])
        self.folder = folder
        self.resume_path = folder / _RESUME
        self._content = dict(recipe)
        self._model: nn.Module | None = None
        self._applied: Applied | None = None

    def apply_(self, model: nn.Module) -> Applied:
        """Apply the run's recipe to the model, in place; the baseline leaves it alone.

        Call it once in each process that trains, before the optimizer is made and before the model is
        wrapped. The global random generators are left as they were, so that what is drawn later is the same
        for all recipes.

        Raises:
            InvalidArgumentError: it was called before.
            UnmatchedRuleError: a rule takes no layer of this model.
        """
        if self._applied is not None:
            raise InvalidArgumentError(
                "run.apply_ takes the one model of the run", "a second call", "Call it once in each process."
            )
        recipe = Recipe.from_dict(self._content)
        text = str(recipe.plan(model))
        with kept_generators():
            self._applied = recipe.apply_(model, seed=self.seed)
        self._model = model
        if leads():
            _write(self.folder / _PLAN, text if any(recipe.rules(v) for v in _VERBS) else "")
        return self._applied

    @property
    def penalty(self) -> Callable[[], Tensor]:
        """A function whose value is added to the loss of each step; it is 0 for a recipe without penalty.

        Raises:
            InvalidArgumentError: `apply_` was not called in this process.
        """
        if self._applied is None:
            raise InvalidArgumentError(
                "run.penalty belongs to the model that run.apply_ was given", "no call of it", "Call it first."
            )
        return self._applied.penalty or _nothing

    def log(self, step: int, **values: float | Tensor) -> None:
        """Keep numbers of this step for the page's curves; a step that is logged again is replaced.

        In a process group only rank 0 writes. `train_loss` and `val_score` are drawn for all recipes.

        Raises:
            InvalidArgumentError: a value is no number, or there is none.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        if not numbers:
            raise InvalidArgumentError("run.log keeps numbers", f"none for step {step}", "Write run.log(step, loss=…).")
        if leads():
            with (self.folder / _LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": int(step), "values": numbers}) + "\n")

    def report(self, score: float | Tensor) -> None:
        """Give the run's score from whatever process knows it, if it is not what `train` returns.

        In a process group only rank 0 writes. A score that is not finite says that the run diverged.
        """
        if not leads():
            return
        found: dict[str, Any] = {"score": _number("the score", score), "geometry": {}}
        if self._model is not None:
            found["geometry"] = portrait(self._model)
        _write(self.folder / _OUTCOME, json.dumps(found))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "_applied": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        die_with_parent()  # a process that the run was sent to is part of it


class Outcome:
    """What a run's processes left in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def applied(self) -> bool:
        """Whether `apply_` was called."""
        return (self._folder / _PLAN).exists()

    @property
    def plan(self) -> str:
        """What the recipe did, layer by layer."""
        return (self._folder / _PLAN).read_text(encoding="utf-8") if self.applied else ""

    @property
    def reported(self) -> Mapping[str, Any] | None:
        """`score` (None if it was not finite) and `geometry`; None if nothing was reported."""
        path = self._folder / _OUTCOME
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return found

    @property
    def curve(self) -> dict[str, list[float | None]]:
        """Every name that was logged, with one value per step, and the steps; every n-th of more than 1,000."""
        steps: dict[int, dict[str, float | None]] = {}
        path = self._folder / _LOG
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the line that was being written when the process was killed
                continue
            steps.setdefault(entry["step"], {}).update(entry["values"])
        names = dict.fromkeys(name for values in steps.values() for name in values)
        kept = sorted(steps)[:: max(1, math.ceil(len(steps) / _LONGEST))]
        curve: dict[str, list[float | None]] = {name: [steps[step].get(name) for step in kept] for name in names}
        return {"step": [float(step) for step in kept], **curve} if kept else {}

    def forget(self) -> None:
        """Remove what an earlier try left, but for its checkpoint and its log."""
        for name in (_OUTCOME, _PLAN):
            (self._folder / name).unlink(missing_ok=True)


def leads() -> bool:
    """Whether this process is the only one, or the first of its process group."""
    group = torch.distributed
    return not (group.is_available() and group.is_initialized()) or group.get_rank() == 0


def _nothing() -> Tensor:
    return torch.zeros(())


def _number(name: str, value: object) -> float | None:
    """As JSON can hold it: None for what is not finite."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} must be a number", f"{value!r}"[:80], "Give one number.") from error
    return number if math.isfinite(number) else None


def _write(path: Path, text: str) -> None:
    """The whole file or none of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
