"""Propose trials and choose among them: Optuna samples, the study's database remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from gonio.compare.plan import Plan, RecipeEntry
from gonio.compare.results import RunRecord
from gonio.compare.tuning_space import space_of
from gonio.errors import MissingExtraError
from gonio.seeding import derive_seed

__all__ = ["Trial", "best", "propose", "ready", "require_optuna"]

_RANDOM = 8  # trials that look at no others: the defaults and seven at random
_ROUND = 4  # later trials that look at the same others, and so can run at the same time


@dataclass(frozen=True)
class Trial:
    """One run of a recipe with other values, judged by the validation split alone.

    Attributes:
        number: from 0; the first has the defaults.
        values: by the names of :func:`~gonio.compare.tuning_space.space_of`.
        record: as it ended; its `score` is the best validation score.
    """

    number: int
    values: Mapping[str, float]
    record: RunRecord


def ready(plan: Plan, done: Sequence[Trial]) -> list[int]:
    """The numbers of a recipe's trials that can be run now: those that wait for no other.

    Example:
        >>> from gonio.compare.tuning import ready
        >>> plan = gonio.compare.make_plan([], seeds=1, tune=10)
        >>> ready(plan, [])
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if plan.tuning is None:
        return []
    numbers = {trial.number for trial in done}
    waiting = [number for number in range(plan.tuning.trials) if number not in numbers]
    return [number for number in waiting if all(seen in numbers for seen in range(_looked_at(number)))]


def _looked_at(number: int) -> int:
    """How many of the first trials a trial's values depend on."""
    return 0 if number < _RANDOM else _RANDOM + (number - _RANDOM) // _ROUND * _ROUND


def propose(plan: Plan, entry: RecipeEntry, number: int, done: Sequence[Trial]) -> dict[str, float]:
    """The values of one trial. They depend on the plan and on the trials that it looks at, and on nothing else.

    So a tuning that was killed and goes on proposes what it would have proposed, with any number of runs
    at a time. The random trials draw the same learning rates for every recipe: none is luckier.

    Raises:
        MissingExtraError: optuna is not installed.
    """
    space = space_of(plan, entry)
    if number == 0 or plan.tuning is None:
        return {dimension.name: dimension.default for dimension in space}
    optuna = require_optuna()
    seed = derive_seed(plan.tuning.seed, "trial", number) % 2**32
    ranges = {d.name: optuna.distributions.FloatDistribution(d.low, d.high, log=True) for d in space}
    with _quiet(optuna):
        search = optuna.create_study(
            direction="maximize" if plan.direction == "max" else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM),
        )
        seen = [trial for trial in done if trial.number < _looked_at(number)]
        for trial in sorted(seen, key=lambda trial: trial.number):
            search.add_trial(_told(optuna, ranges, trial, _scores(plan, seen)))
        return dict(search.ask(ranges).params)


def _told(optuna: ModuleType, ranges: Mapping[str, object], trial: Trial, scores: Mapping[int, float]) -> object:
    """A trial as Optuna knows it; a failed one has no value."""
    score = scores.get(trial.number)
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        params=dict(trial.values), distributions=dict(ranges), value=score,
        state=states.FAIL if score is None else states.COMPLETE,
    )  # fmt: skip


def _scores(plan: Plan, trials: Sequence[Trial]) -> dict[int, float]:
    """Validation scores by number; a diverged trial has the worst, a failed one none."""
    finished = [trial.record.score for trial in trials if trial.record.score is not None]
    reached = finished if plan.worst is None else [*finished, plan.worst]
    worst = (min if plan.direction == "max" else max)(reached, default=None)
    found = {t.number: worst if t.record.status == "diverged" else t.record.score for t in trials}
    return {number: score for number, score in found.items() if score is not None}


def best(plan: Plan, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best validation score, the first of equals; None if none finished."""
    finished = [trial for trial in trials if trial.record.score is not None]
    sign = 1 if plan.direction == "max" else -1
    return max(finished, key=lambda t: (sign * (t.record.score or 0.0), -t.number), default=None)


@contextmanager
def _quiet(optuna: ModuleType) -> Iterator[None]:
    """Optuna reports each study that is made, which is the sampler's business alone."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def require_optuna() -> ModuleType:
    """The package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import optuna  # a second, which a study without tuning need not cost
    except ModuleNotFoundError as error:
        raise MissingExtraError("tuning (--tune)", "optuna", "tune") from error
    return optuna
