"""The baseline against itself: how often the comparison would claim an effect where there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gonio.errors import InvalidArgumentError
from gonio.lab.judging.results import Results, scores_of
from gonio.lab.judging.statistics import ALPHA, Array, enough, half_width, holm, require_scipy, sign_flip_rows
from gonio.lab.plan import RecipeEntry, StudyPlan, seeds_of
from gonio.recipes import Recipe

_COPIES = 4  # recipes that do nothing; 8 seeds are enough to show something against so many
_STUDIES = 4  # disjoint studies that the seeds make
_DIVISIONS = 50  # of the seeds into studies, drawn at random
_BANKS = 200  # simulated, of the same shape, to say what chance alone does
_NARROW = 1e-12


@dataclass(frozen=True)
class SelfTest:
    """Error rates of studies that compare a baseline with copies of itself; `str()` says them in sentences.

    Attributes:
        copies: how many. seeds: runs of each. size: seeds of one study.
        false_verdicts: share of studies in which a copy "helps" or "hurts". allowed: its 95 % quantile over
            self-tests of this shape with a true rate of 5 %.
        coverage: share of 95 % intervals that contain 0. coverage_allowed: its 5 % quantile by chance.
        disjoint, disjoint_wrong: number of independent studies (one recipe, the fewest seeds that can detect an
            effect, no run shared), and of those with a false verdict.
        claims: copies with the verdict "helps" or "hurts" in the study of all seeds.
    """

    copies: int
    seeds: int
    size: int
    false_verdicts: float
    allowed: float
    coverage: float
    coverage_allowed: float
    disjoint: int
    disjoint_wrong: int
    claims: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the error rates are within chance."""
        return self.false_verdicts <= self.allowed and self.coverage >= self.coverage_allowed

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data, `passed` included."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        claims = ", ".join(self.claims) if self.claims else "no copy"
        low, high = rate_interval(self.disjoint_wrong, self.disjoint)
        return "\n".join(
            [
                f"the baseline against {self.copies} copies of itself, {self.seeds} seeds each",
                f"false verdicts: {self.false_verdicts:.1%} of studies of {self.size} seeds say that a copy helps or "
                f"hurts (promised: at most {ALPHA:.0%}; by chance up to {self.allowed:.1%} with so few runs)",
                f"intervals: {self.coverage:.1%} contain 0 (promised: 95%; by chance down to "
                f"{self.coverage_allowed:.1%})",
                f"studies that share no run: {self.disjoint_wrong} of {self.disjoint} are wrong, which fits a rate of "
                f"{low:.1%} to {high:.1%}",
                f"over all seeds, {claims} is said to help or hurt",
                "passed" if self.passed else "NOT PASSED: verdicts on this task are wrong more often than they say",
            ]
        )


def self_test_plan(plan: StudyPlan, *, size: int) -> StudyPlan:
    """The plan in which 4 recipes change nothing and draw their own random numbers, with 4 · `size` seeds.

    Args:
        plan: its baseline is tested, its recipes are left out. Its smallest seed is the first.
        size: seeds of the studies whose error rate is estimated.

    Raises:
        InvalidArgumentError: fewer than 3 seeds, or one that tuning or attacks use.

    Example:
        >>> plan = gonio.lab.self_test_plan(gonio.lab.make_plan([]), size=8)
        >>> [entry.name for entry in plan.recipes], len(plan.seeds)
        (['baseline', 'again-1', 'again-2', 'again-3', 'again-4'], 32)
    """
    if size < 3:
        raise InvalidArgumentError("a self-test needs studies of at least 3 seeds", str(size), "Give --seeds 8.")
    copies = tuple(RecipeEntry.of(Recipe(f"again-{i + 1}")) for i in range(_COPIES))
    first = min(plan.seeds)
    seeds = seeds_of(range(first, first + _STUDIES * size))
    note = "A self-test: the recipes change nothing; each draws its own random numbers."
    return replace(plan, recipes=(plan.baseline, *copies), seeds=seeds, self_test=True, notes=(*plan.notes, note))


def self_test(results: Results, *, size: int | None = None) -> SelfTest:
    """The error rates of verdicts, from a study of copies.

    Args:
        results: of a plan by :func:`self_test_plan`.
        size: seeds of one study; None: a quarter of the seeds.

    Raises:
        InvalidArgumentError: the study compares real recipes, or too few seeds have all runs.

    Example:
        >>> gonio.lab.self_test(gonio.lab.showing.example())
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: a self-test is a study of copies of the baseline; found ...
    """
    plan = results.plan
    if not plan.self_test:
        raise InvalidArgumentError(
            "a self-test is a study of copies of the baseline", "one of recipes", "Run gonio compare --self-test."
        )
    scores = scores_of(plan, results.runs)
    whole = [seed for seed in plan.seeds if all((entry.name, seed) in scores for entry in plan.recipes)]
    size = size or len(plan.seeds) // _STUDIES
    if len(whole) < size:
        raise InvalidArgumentError(
            f"a self-test of studies of {size} seeds", f"{len(whole)} with all of their runs", "Let it go on."
        )
    table = np.array([[scores[entry.name, seed] for seed in whole] for entry in plan.recipes])
    rate, coverage = false_verdicts(table, size=size)
    wrong, disjoint = disjoint_verdicts(table)
    draw = np.random.Generator(np.random.PCG64(2))
    chance = np.array([false_verdicts(draw.standard_normal(table.shape), size=size) for _ in range(_BANKS)])
    return SelfTest(
        copies=len(table) - 1,
        seeds=len(whole),
        size=size,
        false_verdicts=rate,
        allowed=float(np.quantile(chance[:, 0], 0.95)),
        coverage=coverage,
        coverage_allowed=float(np.quantile(chance[:, 1], 0.05)),
        disjoint=disjoint,
        disjoint_wrong=wrong,
        claims=tuple(effect.recipe for effect in results.effects if effect.verdict in ("helps", "hurts")),
    )


def false_verdicts(table: Array, *, size: int) -> tuple[float, float]:
    """Share of studies with a verdict "helps" or "hurts", and share of intervals that contain 0.

    The seeds are divided at random into disjoint studies of `size` seeds, 50 times, always in the same way.

    Shape:
        - ``table``: (1 + recipes, seeds) scores of recipes without any effect, the baseline's first.
    """
    draw = np.random.Generator(np.random.PCG64(3))
    seeds = table.shape[1]
    orders = [draw.permutation(seeds)[: seeds // size * size].reshape(-1, size) for _ in range(_DIVISIONS)]
    chosen = np.concatenate(orders)  # (studies, size)
    rows = (table[1:] - table[0])[:, chosen]  # (recipes, studies, size)
    recipes, studies, _ = rows.shape
    p = sign_flip_rows(rows.reshape(-1, size)).reshape(recipes, studies)
    covered = _covered(rows)
    wrong = (holm(p) < ALPHA) & ~covered
    return float(wrong.any(axis=0).mean()), float(covered.mean())


def disjoint_verdicts(table: Array) -> tuple[int, int]:
    """How many studies that share no run have a false verdict, and how many such studies there are.

    Two recipes at a time (the baseline is one of them), six seeds at a time: the fewest that can detect an effect.
    Studies that share runs, such as the baseline's, are wrong together; these share none, so the number of wrong ones
    is binomial.

    Shape:
        - ``table``: as in :func:`false_verdicts`.
    """
    size = enough(1)
    recipes, seeds = len(table) // 2 * 2, table.shape[1] // size * size
    rows = (table[1:recipes:2] - table[0:recipes:2])[:, :seeds].reshape(-1, size)
    wrong = (sign_flip_rows(rows) < ALPHA) & ~_covered(rows)
    return int(wrong.sum()), len(rows)


def rate_interval(hits: int, trials: int) -> tuple[float, float]:
    """The exact 95 % interval of a rate after `hits` in `trials`; 0 to 1 without trials.

    References:
        C. Clopper and E. Pearson, "The use of confidence or fiducial limits", Biometrika 26, 1934.
    """
    if trials == 0:
        return 0.0, 1.0
    found = require_scipy().binomtest(hits, trials).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def _covered(rows: Array) -> NDArray[np.bool_]:
    """Whether the interval of the differences along the last axis contains 0."""
    held: NDArray[np.bool_] = np.abs(rows.mean(axis=-1)) <= half_width(rows) + _NARROW
    return held
