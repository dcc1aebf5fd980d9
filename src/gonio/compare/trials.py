"""The trials of a study, in its database: which were made, and what was chosen among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gonio.compare.database import select, transaction
from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.results import RunRecord, Tuned
from gonio.compare.tuning import Trial, best, ready
from gonio.compare.tuning_space import space_of

__all__ = ["Trials"]


class Trials:
    """The trials of the study in a folder.

    A trial is made exactly when its row is committed. A recipe is tuned exactly when its choice is, which
    happens once, after its last trial: runs that were compared are never joined by runs of another choice.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan

    def of(self, entry: RecipeEntry) -> list[Trial]:
        """The trials of one recipe, by number."""
        if self._plan.tuning is None:
            return []
        query = "SELECT number, vals, record, seconds FROM trials WHERE hash = ? ORDER BY number"
        rows = select(self._folder, query, (entry.hash,))
        return [Trial(n, json.loads(v), RunRecord(**json.loads(r), seconds=s)) for n, v, r, s in rows]

    def add(self, entry: RecipeEntry, trial: Trial, versions: Mapping[str, str]) -> None:
        """Commit one trial."""
        content = trial.record.to_dict()
        seconds = content.pop("seconds")
        values, record, used = (json.dumps(part) for part in (dict(trial.values), content, dict(versions)))
        row = (entry.hash, trial.number, values, trial.record.status, record, seconds, used)
        with transaction(self._folder) as database:
            database.execute("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def ready(self, entry: RecipeEntry) -> list[int]:
        """The numbers of the trials that can be made now; none once the choice is made."""
        return [] if self.chosen(entry) is not None else ready(self._plan, self.of(entry))

    def choose(self, entry: RecipeEntry) -> None:
        """Commit the values of the best trial; the defaults if no trial finished."""
        trial = best(self._plan, self.of(entry))
        values = {d.name: d.default for d in space_of(self._plan, entry)} if trial is None else dict(trial.values)
        with transaction(self._folder) as database:
            database.execute("INSERT INTO choices VALUES (?, ?)", (entry.hash, json.dumps(values)))

    def chosen(self, entry: RecipeEntry) -> dict[str, float] | None:
        """The values with which a recipe is compared; None before they are chosen, {} without tuning."""
        if self._plan.tuning is None:
            return {}
        rows = select(self._folder, "SELECT vals FROM choices WHERE hash = ?", (entry.hash,))
        return dict(json.loads(rows[0][0])) if rows else None

    def left(self) -> int:
        """How many trials are still to be made."""
        if self._plan.tuning is None:
            return 0
        return sum(self._plan.tuning.trials - len(self.of(e)) for e in self._plan.recipes if self.chosen(e) is None)

    def summary(self) -> tuple[Tuned, ...]:
        """What tuning did for each recipe, the baseline included; empty without tuning."""
        if self._plan.tuning is None:
            return ()
        return tuple(self._tuned(entry) for entry in self._plan.recipes)

    def _tuned(self, entry: RecipeEntry) -> Tuned:
        trials, chosen = self.of(entry), self.chosen(entry)
        winner, first = best(self._plan, trials), next((t for t in trials if t.number == 0), None)
        return Tuned(
            recipe=entry.name,
            trials=len(trials),
            failed=sum(trial.record.status == "failed" for trial in trials),
            diverged=sum(trial.record.status == "diverged" for trial in trials),
            defaults={dimension.name: dimension.default for dimension in space_of(self._plan, entry)},
            chosen=chosen or {},
            score=winner.record.score if winner else None,
            default_score=first.record.score if first else None,
            seconds=sum(trial.record.seconds or 0.0 for trial in trials),
        )
