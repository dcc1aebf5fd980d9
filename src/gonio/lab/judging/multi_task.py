"""Several tasks together: the effect of a recipe over all of them, with equal weight for each pair of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gonio.errors import InvalidArgumentError
from gonio.lab.judging.results import Effect, Results
from gonio.lab.judging.statistics import Array, improvement, require_scipy

PROFILE = (-2.0, -1.0, 0.0, 1.0, 2.0)  # in smallest effects of interest
_REPETITIONS = 5000  # bootstrap samples; the ends of a 95 % interval then vary by about 1 % of its width


@dataclass(frozen=True)
class Across:
    """One recipe over several tasks.

    Attributes:
        tasks: in the order of the studies. pairs: number of pairs per task.
        iqm: interquartile mean of the paired differences of all tasks, each divided by its task's smallest
            effect of interest, signed so that positive is better: 1 is an effect just worth having.
        iqm_low, iqm_high: its 95 % interval by stratified bootstrap.
        improvement: probability that the recipe beats the baseline in one pair, mean over the tasks.
        improvement_low, improvement_high: its 95 % interval by the same bootstrap.
        effects, verdicts: mean scaled difference and verdict of each single task.
        profile: share of the pairs whose scaled difference is above each of :data:`PROFILE`, mean over the tasks.
    """

    recipe: str
    tasks: tuple[str, ...]
    pairs: tuple[int, ...]
    iqm: float
    iqm_low: float
    iqm_high: float
    improvement: float
    improvement_low: float
    improvement_high: float
    effects: tuple[float, ...] = ()
    verdicts: tuple[str, ...] = ()
    profile: tuple[float, ...] = ()


def interquartile_mean(values: Array) -> Array:
    """Mean without the lowest and the highest quarter, over the last axis."""
    found: Array = np.asarray(require_scipy().trim_mean(values, 0.25, axis=-1))
    return found


def across(studies: Sequence[Results]) -> tuple[Across, ...]:
    r"""The recipes that every study has, over all of their tasks.

    With :math:`d_{ts}` the difference of seed s on task t, :math:`\sigma` its sign for "better" and
    :math:`\delta_t` the task's smallest effect of interest: the interquartile mean of all
    :math:`\sigma_t d_{ts} / \delta_t`. The bootstrap resamples pairs within each task. With fewer than about 10
    pairs per task its interval is too narrow (a percentile bootstrap of 5 pairs covers 83 % instead of 95 %); the
    verdicts of the single tasks do not have this fault.

    Args:
        studies: of different tasks, each with a smallest effect of interest.

    Raises:
        InvalidArgumentError: fewer than two, one of them twice, or one without a smallest effect of interest.

    Example:
        >>> gonio.lab.across([gonio.lab.showing.example()])
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: several tasks are at least two studies; found 1. Name another study.

    References:
        R. Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021,
        §4.

    Differs:
        The performance profile is of differences, not of normalised scores, with tasks weighing the same. The
        probability of improvement compares pairs of one seed, not all pairs of runs: the runs are paired.
    """
    if len(studies) < 2:
        raise InvalidArgumentError("several tasks are at least two studies", str(len(studies)), "Name another study.")
    if len({study.plan.hash for study in studies}) < len(studies):
        raise InvalidArgumentError("several tasks are different studies", "one of them twice", "Name each once.")
    if lacking := [study.plan.task for study in studies if not study.plan.sesoi > 0]:
        raise InvalidArgumentError(
            "tasks are put on one scale by their smallest effects of interest",
            f"none for {', '.join(lacking)}",
            "Plan that study with --sesoi.",
        )
    found = [{effect.recipe: effect for effect in study.effects if effect.n} for study in studies]
    shared = [name for name in found[0] if all(name in effects for effects in found)]
    return tuple(_across(studies, [effects[name] for effects in found]) for name in shared)


def _across(studies: Sequence[Results], effects: Sequence[Effect]) -> Across:
    """One recipe's effects in the studies, in smallest effects of interest, more being better."""
    strata = [
        study.plan.sign * np.asarray(effect.differences, dtype=np.float64) / study.plan.sesoi
        for study, effect in zip(studies, effects, strict=True)
    ]
    iqm, better = _estimates([stratum[None] for stratum in strata])
    draw = np.random.Generator(np.random.PCG64(0))
    resampled = [stratum[draw.integers(0, len(stratum), (_REPETITIONS, len(stratum)))] for stratum in strata]
    (iqm_low, better_low), (iqm_high, better_high) = np.quantile(_estimates(resampled), (0.025, 0.975), axis=1)
    return Across(
        effects[0].recipe,
        tuple(study.plan.task for study in studies),
        tuple(map(len, strata)),
        iqm=float(iqm[0]),
        iqm_low=float(iqm_low),
        iqm_high=float(iqm_high),
        improvement=float(better[0]),
        improvement_low=float(better_low),
        improvement_high=float(better_high),
        effects=tuple(float(stratum.mean()) for stratum in strata),
        verdicts=tuple(effect.verdict for effect in effects),
        profile=tuple(float(np.mean([(stratum > least).mean() for stratum in strata])) for least in PROFILE),
    )


def _estimates(strata: Sequence[Array]) -> tuple[Array, Array]:
    """The two estimates for each row of the strata."""
    better = np.mean([improvement(rows) for rows in strata], axis=0)
    return interquartile_mean(np.concatenate(strata, axis=1)), better
