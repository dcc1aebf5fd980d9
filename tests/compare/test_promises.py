"""What the statistics promise, over simulated studies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from compare.plans import plan_of
from gonio.compare import RunRecord
from gonio.compare.judging.statistics import paired_t
from gonio.compare.judging.summary import summarise

Noise = Callable[..., np.ndarray]
KINDS = ["normal", "t3"]


def noise_of(kind: str, seed: int = 0) -> Noise:
    draw = np.random.Generator(np.random.PCG64(seed))
    return draw.standard_normal if kind == "normal" else lambda size: draw.standard_t(3, size)


def covered(rows: np.ndarray) -> float:
    """Share of rows whose interval holds 0, by a formula of its own."""
    n = rows.shape[1]
    standard_error = np.sqrt(((rows - rows.mean(1, keepdims=True)) ** 2).sum(1) / (n - 1) / n)
    return float((np.abs(rows.mean(1)) <= stats.t.isf(0.025, n - 1) * standard_error).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", range(3, 21))
def test_intervals_cover_what_they_claim(kind: str, n: int) -> None:
    """Within 93.5 to 96.5 %: under the heavy tails of t₃ they cover up to 96.3 %, by simulation."""
    noise = noise_of(kind, n)
    first = noise((1000, n))
    ours = np.mean([low <= 0 <= high for _, low, high in map(paired_t, first.tolist())])  # type: ignore[misc]
    assert ours == covered(first)  # a thousand studies by the library, and the same by the formula
    # a hundred thousand by the formula, whose standard error is 0.07 %
    assert 0.935 <= covered(noise((100_000, n))) <= 0.965


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_cover_over_all_numbers_of_seeds(kind: str) -> None:
    noise = noise_of(kind)
    found = [
        low <= 0 <= high  # type: ignore[operator]
        for n in range(3, 21)
        for _, low, high in map(paired_t, noise((56, n)).tolist())  # type: ignore[misc]
    ]
    # 1,008 studies: two standard errors are 1.4 %
    assert 0.935 <= np.mean(found) <= 0.975


def false_claims(noise: Noise, studies: int, *, recipes: int = 8, n: int = 10, shift: float = 0.0) -> float:
    """Share of whole studies, from scores to verdicts, that say of a recipe that it helps or hurts."""
    plan = plan_of(recipes=recipes, seeds=n)
    names = [entry.name for entry in plan.recipes]
    wrong = 0
    for table in noise((studies, recipes + 1, n)):
        table[1] += shift
        runs = [
            RunRecord(name, seed, "finished", 90 + float(score))
            for name, row in zip(names, table, strict=True)
            for seed, score in enumerate(row)
        ]
        verdicts = {effect.verdict for effect in summarise(plan, runs, [], []).effects}
        wrong += bool(verdicts & {"helps", "hurts"})
    return wrong / studies


@pytest.mark.parametrize("kind", KINDS)
def test_eight_null_recipes_are_seldom_said_to_help(kind: str) -> None:
    studies = 100
    # three standard errors of a share of 5 % among 100
    assert false_claims(noise_of(kind), studies) <= 0.05 + 3 * (0.05 * 0.95 / studies) ** 0.5


def test_a_recipe_with_an_effect_is_found() -> None:
    assert false_claims(noise_of("normal"), 20, shift=5.0) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_eight_null_recipes_in_a_thousand_studies(kind: str) -> None:
    assert false_claims(noise_of(kind, 1), 1000) <= 0.05
