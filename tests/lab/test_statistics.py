"""The statistics, against scipy, by hand, and over simulated studies."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from gonio.lab import RunRecord
from gonio.lab.judging.results import summarise
from gonio.lab.judging.statistics import (
    Evidence,
    correlation,
    detectable,
    holm,
    improvement,
    judge,
    least_p,
    paired_t,
    sign_flip,
    sign_flip_rows,
)
from lab.plans import normal, plan_of


@pytest.mark.parametrize("n", [2, 3, 8, 20])
def test_interval_is_scipys(n: int) -> None:
    d = normal(n) + 0.3
    expected = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    assert paired_t(d.tolist()) == pytest.approx((d.mean(), expected.low, expected.high), rel=1e-12)


def test_interval_at_the_edges() -> None:
    assert paired_t([]) is None
    assert paired_t([1.0]) is None
    assert paired_t([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 10])
def test_sign_flip_counts_all_sign_vectors(n: int) -> None:
    d = normal(n, seed=n) + 0.5
    sums = [abs(np.dot(signs, d)) for signs in itertools.product((1, -1), repeat=n)]
    assert sign_flip(d.tolist()) == np.mean(np.array(sums) >= abs(d.sum()) - 1e-12)


def test_sign_flip_counts_ties_in_spite_of_rounding() -> None:
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floating point: exactly equal sums must count as equal.
    assert sign_flip([0.1, 0.2, 0.3]) == 0.25
    assert sign_flip([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([]) == 1.0


def test_drawn_sign_flip_agrees_with_the_exact_one() -> None:
    d = (normal(40, seed=3) + 0.3).tolist()
    exact, drawn = sign_flip(d), sign_flip([*d, 0.0])  # a zero difference changes no sum
    # standard error of a share p from a million draws
    assert drawn == pytest.approx(exact, abs=4 * (exact / 1e6) ** 0.5)


def test_all_sign_vectors_of_24_pairs_take_little_memory() -> None:
    """All sums of 400 rows were 27 GB."""
    rows = normal(400, 24, seed=5)
    tracemalloc.start()
    p = sign_flip_rows(rows)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    one = sign_flip_rows(rows[:1, :16])
    signs = 1 - 2 * (np.arange(2**16)[:, None] >> np.arange(16) & 1)
    assert one == [np.mean(np.abs(signs @ rows[0, :16]) >= abs(rows[0, :16].sum()) - 1e-12)]
    assert 0.0 < (p < 0.05).mean() < 0.05 + 4 * 0.011


@pytest.mark.parametrize(("pairs", "expected"), [(3, 0.25), (5, 0.0625), (6, 0.03125), (8, 0.0078125)])
def test_least_p_is_reached(pairs: int, expected: float) -> None:
    assert least_p(pairs) == expected == sign_flip([1.0] * pairs)


def test_holm_by_hand() -> None:
    # sorted: .01·4, .02·3, .03·2, .9·1; never less than the one before
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


def test_correlation_is_scipys_and_undefined_without_variance() -> None:
    a, b = normal(2, 9)
    assert correlation(a.tolist(), b.tolist()) == pytest.approx(stats.pearsonr(a, b).statistic, rel=1e-12)
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert correlation([1.0, 2.0], [1.0, 2.0]) is None


def test_ties_count_half_of_an_improvement() -> None:
    assert improvement([[1.0, 2.0, -1.0, 0.0], [-1.0, -2.0, 1.0, 0.0]]).tolist() == [0.625, 0.375]


@pytest.mark.parametrize(
    ("pairs", "comparisons", "possible"),
    # the least seeds for 1, 2, 4, 8 and 16 recipes, and one fewer
    [
        *[(6, 1, True), (7, 2, True), (8, 4, True), (9, 8, True), (10, 16, True)],
        *[(5, 1, False), (6, 2, False), (7, 4, False), (8, 8, False), (9, 16, False)],
    ],
)
def test_what_can_be_detected_at_all(pairs: int, comparisons: int, possible: bool) -> None:
    assert (detectable(pairs, comparisons) is not None) == possible


@pytest.mark.parametrize(("pairs", "comparisons"), [(8, 1), (8, 5), (16, 5), (11, 20), (12, 50)])
def test_detectable_effect_is_seen_four_times_in_five(pairs: int, comparisons: int) -> None:
    effect = detectable(pairs, comparisons)
    assert effect is not None
    seen = 0
    studies = 400
    for d in normal(studies, pairs, seed=11) + effect:
        low, high = paired_t(d.tolist())[1:]
        seen += sign_flip(d.tolist()) < 0.05 / comparisons and not low <= 0 <= high
    # four standard errors of a share of 0.8 among 400
    assert seen / studies == pytest.approx(0.8, abs=4 * (0.8 * 0.2 / studies) ** 0.5)


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


def test_intervals_of_skewed_differences_are_too_narrow() -> None:
    """82 % for five log-normal pairs, as the page on statistics says; the standard error here is 0.1 %."""
    rows = np.random.Generator(np.random.PCG64(0)).lognormal(size=(100_000, 5)) - math.exp(0.5)
    assert covered(rows) == pytest.approx(0.82, abs=0.005)


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


FEW = 0.05 + 3 * (0.05 * 0.95 / 100) ** 0.5  # three standard errors of a share of 5 % among 100


@pytest.mark.parametrize(
    ("seed", "studies", "most"), [(0, 100, FEW), pytest.param(1, 1000, 0.05, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_eight_null_recipes_are_seldom_said_to_help(kind: str, seed: int, studies: int, most: float) -> None:
    assert false_claims(noise_of(kind, seed), studies) <= most


def test_a_recipe_with_an_effect_is_found() -> None:
    assert false_claims(noise_of("normal"), 20, shift=5.0) == 1.0


@pytest.mark.parametrize("scale", [2.0**-1000, 2.0**-600, 2.0**600, 2.0**1000])
@pytest.mark.parametrize("direction", ["larger", "same"])
def test_the_unit_of_a_metric_does_not_change_a_verdict(scale: float, direction: str) -> None:
    values, sesoi = (1.5, 2.0, 0.5, 1.25, 1.0, 1.75, 0.75), 0.25
    told = {"direction": direction, "unit": ""}
    usual = judge([Evidence(values=values, sesoi=sesoi, **told)])[0]
    found = judge([Evidence(values=tuple(scale * value for value in values), sesoi=scale * sesoi, **told)])[0]
    assert (found.verdict, found.p, found.p_holm) == (usual.verdict, usual.p, usual.p_holm)
    numbers = [(each.mean, each.low, each.high) for each in (found, usual)]
    assert numbers[0] == tuple(scale * (number or math.nan) for number in numbers[1])
    assert found.reason.startswith("Larger in 7 of 7 seeds") or direction == "same"
    assert correlation([scale * value for value in values], [*values[1:], 0.0]) == correlation(
        values, [*values[1:], 0.0]
    )
