"""What stands beside the verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compare.plans import plan_of
from gonio.compare import RecipeEntry, RunRecord, Threat
from gonio.compare.judging.summary import reach_of, robust_of, summarise


def run(recipe: str, seed: int, curve: list[float | None], status: str = "finished", **more: object) -> RunRecord:
    return RunRecord(recipe, seed, status, score=1.0, curve={"val_score": curve}, **more)  # type: ignore[arg-type]


def test_the_time_to_the_baselines_last_score_counts_epochs_and_step_time() -> None:
    base = [10.0, 50.0, 60.0, 60.0]  # there after 3 of 4 epochs
    runs = [run("baseline", s, base) for s in range(3)]
    runs += [run("r0", 0, [60.0, 1.0, 1.0, 1.0]), run("r0", 1, [1.0, 61.0, 1.0, 1.0]), run("r0", 2, [1.0] * 4)]
    found = reach_of(plan_of(seeds=3), "r0", runs, 1.5)
    assert found is not None
    assert (found.n, found.reached) == (3, 2)
    assert found.ratio == pytest.approx(2 / 3 * 1.5)  # the median of 1/3, 2/3 and never
    without = reach_of(plan_of(seeds=3), "r0", runs, None)
    assert without is not None
    assert without.ratio is None


def test_where_less_is_better_the_score_is_reached_from_above() -> None:
    runs = [run("baseline", 0, [3.0, 2.0]), run("r0", 0, [2.5, 1.9])]
    found = reach_of(plan_of(seeds=1, direction="min"), "r0", runs, 1.0)
    assert found is not None
    assert (found.reached, found.ratio) == (1, 1.0)
    never = reach_of(plan_of(seeds=1, direction="min"), "r0", [runs[0], run("r0", 0, [2.5, 2.1])], 1.0)
    assert never is not None
    assert (never.reached, never.ratio) == (0, None)


def test_a_recipe_that_diverged_never_reaches_it_and_a_failed_one_is_no_pair() -> None:
    runs = [run("baseline", 0, [1.0, 2.0]), run("baseline", 1, [1.0, 2.0])]
    diverged = reach_of(plan_of(seeds=2), "r0", [*runs, run("r0", 0, [0.5], "diverged")], 1.0)
    assert diverged is not None
    assert (diverged.n, diverged.reached) == (1, 0)
    assert reach_of(plan_of(seeds=2), "r0", [*runs, run("r0", 0, [9.0], "failed")], 1.0) is None


def test_a_recipe_with_more_than_one_change_is_confounded() -> None:
    one = {"swap": [{"where": "stem", "use": "keep"}, {"where": None, "use": "A"}, {"where": "x", "use": "A"}]}
    two = {"init": [{"where": None, "use": "I"}], "penalty": [{"where": None, "use": "L2", "strength": 1}]}
    same_verb = {"penalty": [{"where": "a", "use": "L2", "strength": 1}, {"where": "b", "use": "L1", "strength": 1}]}
    assert [RecipeEntry("r", content, "r").changes for content in (one, two, same_verb)] == [
        ("swap A",),
        ("init I", "penalty L2"),
        ("penalty L2", "penalty L1"),
    ]
    plan = plan_of()
    entries = (plan.recipes[0], RecipeEntry("r0", two, "r0"))
    effect = summarise(replace(plan, recipes=entries), [], [], []).effects[0]
    assert (effect.confounded, effect.changes) == (True, ("init I", "penalty L2"))
    assert not summarise(plan, [], [], []).effects[0].confounded


def attacked(recipe: str, seed: int, worst: float, status: str = "finished", signs: tuple[str, ...] = ()) -> RunRecord:
    found = {"clean": 90.0, "pgd": worst + 1, "worst": worst, "signs": list(signs), "radii": []}
    return run(recipe, seed, [1.0], status, robustness=found if status == "finished" else {})


def test_robustness_is_paired_and_a_diverged_run_is_right_about_nothing() -> None:
    plan = replace(plan_of(seeds=3), threat=Threat(epsilon=0.1))
    sign = "one step (FGSM) misleads more than many (PGD): 10 % against 20 % remain right"
    runs = [attacked("baseline", s, 40.0) for s in range(3)]
    runs += [attacked("r0", 0, 50.0, signs=(sign,)), attacked("r0", 1, 50.0), attacked("r0", 2, 0.0, "diverged")]
    baseline, recipe = robust_of(plan, runs)
    assert (baseline.mean, baseline.means["worst"]) == (None, 40.0)
    assert recipe.means == {"clean": 60.0, "pgd": pytest.approx(102 / 3), "worst": pytest.approx(100 / 3)}
    assert recipe.mean == pytest.approx((10 + 10 - 40) / 3)
    assert recipe.signs == {"one step (FGSM) misleads more than many (PGD)": 1}
    assert recipe.n == 3
    assert robust_of(plan_of(), runs) == ()


def test_sizes_stand_beside_the_baselines() -> None:
    plan = plan_of()
    rows = [("baseline", "parameters", 0, 100.0), ("r0", "parameters", 0, 110.0), ("r0", "flops", 0, 5.0)]
    effect = summarise(plan, [], rows, []).effects[0]
    assert effect.parameters is not None
    assert (effect.parameters.baseline, effect.parameters.recipe) == (100.0, 110.0)
    assert effect.parameters.ratio == pytest.approx(1.1)
    assert effect.flops is None  # the baseline's was not measured
