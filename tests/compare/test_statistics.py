"""The statistics against scipy, values worked by hand, and simulations of what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from gonio.compare.judging.statistics import correlation, detectable, holm, improvement, least_p, paired_t, sign_flip


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)


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


@pytest.mark.parametrize("n", [4, 9])
def test_sign_flip_is_scipys_permutation_test(n: int) -> None:
    d = normal(n, seed=n) + 0.5
    found = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(d.tolist()) == pytest.approx(found.pvalue, abs=1e-12)


def test_sign_flip_counts_ties_in_spite_of_rounding() -> None:
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floating point: exactly equal sums must count as equal.
    assert sign_flip([0.1, 0.2, 0.3]) == 0.25
    assert sign_flip([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([]) == 1.0


def test_drawn_sign_flip_agrees_with_the_exact_one() -> None:
    d = (normal(24, seed=3) + 0.45).tolist()
    exact, drawn = sign_flip(d), sign_flip([*d, 0.0])  # a zero difference changes no sum
    # standard error of a share p from a million draws
    assert drawn == pytest.approx(exact, abs=4 * (exact / 1e6) ** 0.5)


@pytest.mark.parametrize(("pairs", "expected"), [(3, 0.25), (5, 0.0625), (6, 0.03125), (8, 0.0078125)])
def test_least_p_is_reached(pairs: int, expected: float) -> None:
    assert least_p(pairs) == expected == sign_flip([1.0] * pairs)


def test_holm_by_hand() -> None:
    # sorted: .01·4, .02·3, .03·2, .9·1; never less than the one before
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_correlation_is_scipys_and_undefined_without_variance() -> None:
    a, b = normal(2, 9)
    assert correlation(a.tolist(), b.tolist()) == pytest.approx(stats.pearsonr(a, b).statistic, rel=1e-12)
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert correlation([1.0, 2.0], [1.0, 2.0]) is None


def test_improvement_follows_the_direction() -> None:
    assert improvement([1.0, 2.0, -1.0, 0.0], "max") == 0.625
    assert improvement([1.0, 2.0, -1.0, 0.0], "min") == 0.375
    assert improvement([], "max") is None


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


@pytest.mark.parametrize(("pairs", "comparisons"), [(8, 1), (8, 5), (16, 5)])
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


@pytest.mark.parametrize("n", [3, 5, 8])
def test_interval_covers_what_it_claims(n: int) -> None:
    studies = 2000
    covered = sum(low <= 0.3 <= high for _, low, high in map(paired_t, (normal(studies, n) + 0.3).tolist()))
    assert covered / studies == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / studies) ** 0.5)


def family_wise_error(studies: int, recipes: int, n: int, *, correct: bool) -> float:
    """Share of studies of recipes without any effect, on one shared baseline, that find one."""
    noise = normal(studies, recipes + 1, n, seed=5)
    wrong = 0
    for baseline, *ours in noise:
        p = [sign_flip((scores - baseline).tolist()) for scores in ours]
        wrong += min(holm(p) if correct else p) < 0.05
    return wrong / studies


def test_holm_keeps_the_family_wise_error_and_no_correction_does_not() -> None:
    studies = 400
    bound = 0.05 + 4 * (0.05 * 0.95 / studies) ** 0.5
    assert family_wise_error(studies, 4, 8, correct=True) <= bound
    assert family_wise_error(studies, 4, 8, correct=False) > bound


@pytest.mark.slow
@pytest.mark.parametrize(("recipes", "n"), [(1, 6), (2, 8), (5, 8), (5, 10), (8, 10)])
def test_family_wise_error_long(recipes: int, n: int) -> None:
    studies = 20_000
    assert family_wise_error(studies, recipes, n, correct=True) <= 0.05 + 4 * (0.05 * 0.95 / studies) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 5, 8, 10, 20])
def test_coverage_long(n: int) -> None:
    studies = 50_000
    covered = sum(low <= 0.3 <= high for _, low, high in map(paired_t, (normal(studies, n) + 0.3).tolist()))
    assert covered / studies == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / studies) ** 0.5)
