"""Results: verdicts, secondary figures, costs, and the norms and angles of filters."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gonio.lab import AttackConfig, Results, RunRecord, filter_summary
from gonio.lab.judging.results import reach_of, robust_of, summarise
from gonio.lab.plan import RecipeEntry
from gonio.lab.planning.planner import make_plan
from gonio.lab.record import ANGLE_EDGES, QUANTILES
from gonio.lab.running.cost import measure_costs, peak_bytes, time_blocks
from lab.plans import TINY, plan_of, runs_of

BASE = [90.0, 91.0, 92.0, 93.0, 94.0, 95.0, 96.0, 97.0]


def compare(differences: list[float | str | None], **options: object) -> Results:
    seeds = len(differences)
    plan = plan_of(seeds=seeds, **options)
    ours = [b + d if isinstance(d, float) else d for b, d in zip(BASE, differences, strict=False)]
    return summarise(plan, runs_of("baseline", BASE[:seeds]) + runs_of("r0", ours), [], [])


@pytest.mark.parametrize(
    ("differences", "verdict", "reason"),
    [
        ([1.5, 2.5, 2.0, 1.0, 3.0, 2.0, 1.5, 2.5], "helps", r"Larger in 8 of 8 seeds, by 2 on average"),
        ([-1.5, -2.5, -2.0, -1.0, -3.0, -2.0, -1.5, -2.5], "hurts", "Smaller in 8 of 8 seeds, by 2 on"),
        ([0.2, 0.3, 0.2, 0.1, 0.3, 0.2, 0.1, 0.2], "no useful effect", "interest; the effect is real, but smaller"),
        ([0.5, -0.5, 0.4, -0.4, 0.3, -0.3, 0.2, -0.2], "no useful effect", "lies within ±1 point, the smal"),
        ([0.0] * 8, "no useful effect", "95 % interval lies within"),
        ([1.5, 0.3, 1.2, -0.2, 1.3, 0.2, 0.6, -0.1], "undecided", "of 1 point would probably have been seen"),
        ([5.0, -4.0, 3.0, -2.0, 4.0, -5.0, 1.0, 2.0], "undecided", "Only effects from 4.* points on would"),
        ([9.0, 9.5, 8.0, 8.5, 9.0], "undecided", "With 5 seeds and 1 comparison the smallest p .* 0.062: use 6"),
        ([2.0], "undecided", "There is 1 seed with all runs"),
        ([None, None], "undecided", "There are 0 seeds"),
        ([0.25, 0.25], "undecided", "There are 2 seeds"),
    ],
)
def test_verdicts(differences: list[float | str | None], verdict: str, reason: str) -> None:
    effect = compare(differences).effects[0]
    assert effect.verdict == verdict
    assert re.search(reason, effect.reason), effect.reason


def test_ties_are_neither_won_nor_lost() -> None:
    effect = compare([0.0, 0.0, 0.0, 1.0, -1.0, 2.0, 0.0, 0.0]).effects[0]
    assert (effect.wins, effect.ties, effect.improvement) == (2, 5, (2 + 2.5) / 8)
    assert compare([-1.0, 0.0], direction="min").effects[0].wins == 1


def test_a_loss_that_falls_helps() -> None:
    effect = compare([-0.5] * 4 + [-0.4] * 4, direction="min", worst=None, unit="", sesoi=0.2).effects[0]
    assert (effect.verdict, effect.improvement) == ("helps", 1.0)
    assert effect.mean == pytest.approx(-0.45)


def test_more_recipes_make_every_one_of_them_harder() -> None:
    plan = plan_of(recipes=8)
    runs = runs_of("baseline", [*BASE]) + [r for i in range(8) for r in runs_of(f"r{i}", [b + 5 for b in BASE])]
    results = summarise(plan, runs, [], [])
    assert {effect.verdict for effect in results.effects} == {"undecided"}
    assert "With 8 seeds and 8 comparisons" in results.effects[0].reason
    assert "use 9 seeds or more" in results.effects[0].reason


def test_diverged_counts_as_worst_and_is_stated() -> None:
    results = compare([0.1, "diverged", 0.1, 0.2, 0.1, 0.2, 0.1, 0.1])
    effect = results.effects[0]
    assert (effect.n, effect.diverged, effect.failed) == (8, 1, 0)
    assert effect.differences[1] == -BASE[1]
    assert any("Diverged: 1 run, with the score of the worst case: 0 %." in note for note in results.notes)
    assert results.failed == 0


@pytest.mark.parametrize("worst", [None, 8.0])
def test_diverged_is_never_better_than_a_run_that_finished(worst: float | None) -> None:
    # bits per byte: 8 is what knowing nothing costs, but a finished run may be worse still
    shifts = [0.1, "diverged", 0.1, 0.2, 0.1, 0.2, 0.1, 0.1]
    results = compare(shifts, worst=worst, direction="min")
    assert results.effects[0].differences[1] == pytest.approx(max(BASE) + 0.1 - BASE[1])
    assert results.effects[0].verdict != "helps"
    assert any("the worst case: the worst finished run" in note for note in results.notes) == (worst is None)


def test_failed_runs_leave_their_pair_out_and_are_stated() -> None:
    results = compare([0.1, "failed", 0.1, None, 0.1, 0.2, 0.1, 0.1])
    effect = results.effects[0]
    assert (effect.n, effect.failed, effect.seeds) == (6, 1, (0, 2, 4, 5, 6, 7))
    assert (results.missing, results.failed) == (1, 1)
    assert results.notes[0] == "1 run of 16 to do; the verdicts are provisional."
    assert results.notes[1] == "Failed: 1 run, without a score; their pairs are left out."


def test_second_looks_and_mixed_versions_are_stated() -> None:
    plan = plan_of(history=({"seeds": [6, 7], "recipes": [], "finished": 12},))
    results = summarise(plan, [], [], [{"torch": "2.12"}, {"torch": "2.13"}])
    assert any("After 12 runs had been done, seeds 6, 7 were added" in note for note in results.notes)
    assert any("different versions of torch" in note for note in results.notes)


def test_costs_become_a_median_with_quartiles() -> None:
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4]
    costs = [("r0", "step_time", i, ratio) for i, ratio in enumerate(ratios)] + [("r0", "memory", 0, 1.5)]
    effect = summarise(plan_of(), [], costs, []).effects[0]
    assert (effect.step_time.low, effect.step_time.median, effect.step_time.high) == (1.1, 1.2, 1.3)
    assert (effect.memory.median, effect.memory.n) == (1.5, 1)


def test_a_study_without_runs_has_results() -> None:
    results = summarise(plan_of(), [], [], [])
    assert (results.baseline_mean, results.baseline_sd, results.missing) == (None, None, 16)
    assert results.effects[0].p is None


def test_a_small_difference_keeps_the_hyphen_of_its_exponent_in_a_notebook() -> None:
    results = compare([-(2.0**-22)] * 8)  # exact beside the scores
    assert "<td>−2.38e-07</td>" in results._repr_html_()


def test_results_can_be_written_as_json() -> None:
    results = compare([0.1, "diverged", 0.3])
    data = json.loads(json.dumps(results.to_dict()))
    assert data["plan"]["hash"] == results.plan.hash
    assert data["effects"][0]["differences"] == list(results.effects[0].differences)
    assert data["runs"][0]["score"] == BASE[0]


def curve_run(recipe: str, seed: int, curve: list[float | None], status: str = "finished", **more: object) -> RunRecord:
    return RunRecord(recipe, seed, status, score=1.0, curve={"val_score": curve}, **more)


def test_the_time_to_the_baselines_last_score_counts_epochs_and_step_time() -> None:
    base = [10.0, 50.0, 60.0, 60.0]  # there after 3 of 4 epochs
    runs = [curve_run("baseline", s, base) for s in range(3)]
    runs += [
        curve_run("r0", 0, [60.0, 1.0, 1.0, 1.0]),
        curve_run("r0", 1, [1.0, 61.0, 1.0, 1.0]),
        curve_run("r0", 2, [1.0] * 4),
    ]
    found = reach_of(plan_of(seeds=3), "r0", runs, 1.5)
    assert (found.n, found.reached) == (3, 2)
    assert found.ratio == pytest.approx(2 / 3 * 1.5)  # the median of 1/3, 2/3 and never
    without = reach_of(plan_of(seeds=3), "r0", runs, None)
    assert without.ratio is None


def test_where_less_is_better_the_score_is_reached_from_above() -> None:
    runs = [curve_run("baseline", 0, [3.0, 2.0]), curve_run("r0", 0, [2.5, 1.9])]
    found = reach_of(plan_of(seeds=1, direction="min"), "r0", runs, 1.0)
    assert (found.reached, found.ratio) == (1, 1.0)
    never = reach_of(plan_of(seeds=1, direction="min"), "r0", [runs[0], curve_run("r0", 0, [2.5, 2.1])], 1.0)
    assert (never.reached, never.ratio) == (0, None)


def test_a_recipe_that_diverged_never_reaches_it_and_a_failed_one_is_no_pair() -> None:
    runs = [curve_run("baseline", 0, [1.0, 2.0]), curve_run("baseline", 1, [1.0, 2.0])]
    diverged = reach_of(plan_of(seeds=2), "r0", [*runs, curve_run("r0", 0, [0.5], "diverged")], 1.0)
    assert (diverged.n, diverged.reached) == (1, 0)
    assert reach_of(plan_of(seeds=2), "r0", [*runs, curve_run("r0", 0, [9.0], "failed")], 1.0) is None


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
    return curve_run(recipe, seed, [1.0], status, robustness=found if status == "finished" else {})


def test_robustness_is_paired_and_a_diverged_run_is_right_about_nothing() -> None:
    plan = replace(plan_of(seeds=3), threat=AttackConfig(epsilon=0.1))
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


def test_further_metrics_are_paired_and_a_run_without_a_finite_value_is_left_out() -> None:
    plan = replace(plan_of(seeds=4), metrics={"loss": "nats", "nothing": ""})
    losses = {"baseline": (1.0, 2.0, 3.0, 4.0), "r0": (1.5, 2.5, None, 4.8)}
    runs = [
        curve_run(recipe, seed, [1.0], metrics={"loss": loss, "nothing": None})
        for recipe, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    found = {(one.metric, one.recipe): one for one in summarise(plan, runs, [], []).further}
    assert list(found) == [(metric, recipe) for metric in ("loss", "nothing") for recipe in ("baseline", "r0")]
    assert found["loss", "baseline"].score == 2.5
    ours = found["loss", "r0"]
    assert (ours.n, ours.unit, ours.score) == (3, "nats", pytest.approx(8.8 / 3))
    assert ours.mean == pytest.approx(0.6)
    assert ours.low is not None
    assert ours.high is not None
    # t(2) at 97.5 % is 4.303, and the sd of 0.5, 0.5, 0.8 is 0.1732
    assert ours.high - ours.mean == pytest.approx(4.303 * 0.1732 / 3**0.5, rel=1e-3)
    nothing = found["nothing", "r0"]
    assert (nothing.score, nothing.n, nothing.mean, nothing.low) == (None, 0, None, None)
    assert summarise(plan_of(), [curve_run("baseline", 0, [1.0])], [], []).further == ()


def test_sizes_stand_beside_the_baselines() -> None:
    plan = plan_of()
    rows = [("baseline", "parameters", 0, 100.0), ("r0", "parameters", 0, 110.0), ("r0", "flops", 0, 5.0)]
    effect = summarise(plan, [], rows, []).effects[0]
    assert (effect.parameters.baseline, effect.parameters.recipe) == (100.0, 110.0)
    assert effect.parameters.ratio == pytest.approx(1.1)
    assert effect.flops is None  # the baseline's was not measured


def product(tensor: Tensor, count: int) -> None:
    for _ in range(count):
        tensor @ tensor


@pytest.mark.slow  # it reads a clock: no gate of every change
def test_times_of_equal_and_of_double_work() -> None:
    square = torch.ones(64, 64)
    steps = [lambda n=n: product(square, n) for n in (20, 20, 40)]
    blocks = time_blocks(steps, torch.device("cpu"), least=5, until=time.monotonic() + 30)
    ratios = [(same / first, double / first) for first, same, double in blocks]
    same, double = (sorted(each)[len(blocks) // 2] for each in zip(*ratios, strict=True))
    # medians over blocks on a machine that may be busy; they were within 3 % on an idle one
    assert same == pytest.approx(1, rel=0.2)
    assert double == pytest.approx(2, rel=0.2)


def test_peak_bytes_counts_what_is_held_at_the_same_time_and_was_not_before() -> None:
    def one_after_the_other() -> None:
        for _ in range(5):
            torch.zeros(1000)

    held = torch.zeros(100_000)
    assert peak_bytes(one_after_the_other) == 4000
    assert peak_bytes(lambda: sum(map(len, [torch.zeros(1000) for _ in range(5)]))) == 20000
    assert peak_bytes(held.neg_) == 0


def test_every_recipe_gets_both_ratios(capfd: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(["orthogonal-init", "switchable-norm"], task=f"{TINY}:task", seeds=1)
    rows = measure_costs(plan, plan.recipes[1:])
    for entry in plan.recipes[1:]:
        mine = [row for row in rows if row[0] == entry.hash]
        assert [block for _, kind, block, _ in mine if kind == "memory"] == [0, 1, 2]
        assert len([row for row in mine if row[1] == "step_time"]) >= 5
        assert all(ratio > 0 for *_, ratio in mine)
    memory = {hash_: ratio for hash_, kind, _, ratio in rows if kind == "memory"}
    assert memory[plan.recipes[1].hash] == 1.0  # an initialiser leaves the step as it was
    assert memory[plan.recipes[2].hash] > 1.0
    assert capfd.readouterr().err == ""


def test_without_a_smallest_effect_of_interest_none_is_too_small() -> None:
    effect = compare([0.5, -0.5, 0.4, -0.4, 0.3, -0.3, 0.2, -0.2], sesoi=0.0).effects[0]
    assert effect.verdict == "undecided"
    assert "no smallest effect of interest is named" in effect.reason


@pytest.mark.parametrize(
    ("scores", "trains"),
    [
        ([10.0, 11.0, 9.0, 10.5], False),
        (["diverged"] * 4, False),
        ([10.0, 11.0, 9.0, 30.0], True),
        ([11.8] * 4, True),  # within two standard errors in each seed, but not on average
        ([60.0] * 4, True),
    ],
)
def test_a_baseline_at_chance_level_is_said_first(scores: list[float | str], trains: bool) -> None:
    plan = plan_of(seeds=4, chance=10.0, splits={"train": 9, "validation": 9, "test": 1000})
    better = [score + 30 if isinstance(score, float) else 50.0 for score in scores]
    results = summarise(plan, runs_of("baseline", [*scores]) + runs_of("r0", [*better]), [], [])
    assert (results.effects[0].verdict != "not a fair test") == trains
    said = [number for number, note in enumerate(results.notes) if "does not train: its mean accuracy is" in note]
    assert said == ([] if trains else [0])
    assert "does not train" not in str(summarise(replace(plan, chance=None), results.runs, [], []).notes)


def test_where_less_is_better_chance_is_an_upper_bound() -> None:
    plan = plan_of(seeds=2, chance=8.0, direction="min", unit="bits", metric="bits per byte")
    verdicts = [
        summarise(plan, runs_of("baseline", scores) + runs_of("r0", [3.0, 3.0]), [], []).effects[0].verdict
        for scores in ([8.0, 8.1], [8.1, 7.9])
    ]
    assert verdicts == ["not a fair test", "undecided"]


def reference(filters: np.ndarray) -> tuple[list[float], list[int]]:
    """Norm quantiles and angle counts of one matrix, filter by filter and pair by pair."""
    norms = np.sqrt((filters**2).sum(axis=1))
    found = []
    for i in range(len(filters)):
        for j in range(i):
            if norms[i] > 0 and norms[j] > 0:
                cosine = np.clip(filters[i] @ filters[j] / norms[i] / norms[j], -1, 1)
                found.append(np.degrees(np.arccos(cosine)))
    return np.quantile(norms, QUANTILES).tolist(), np.histogram(found, ANGLE_EDGES)[0].tolist()


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(7, 5), nn.Conv2d(3, 6, 3), nn.Conv1d(4, 9, 2)],
    ids=["linear", "conv2d", "conv1d"],
)
def test_norms_and_angles_of_flattened_filters(layer: nn.Module) -> None:
    weight = layer.weight.detach().double().numpy()
    norms, counts = reference(weight.reshape(len(weight), -1))
    found = filter_summary(nn.Sequential(layer))["layers"]["0"]
    assert found["norms"] == pytest.approx(norms, rel=1e-9)
    assert found["angle_counts"] == counts
    assert (found["dim"], found["filters"]) == (weight[0].size, len(weight))


def angles_of(layer: nn.Module, *filters: list[float]) -> list[int]:
    with torch.no_grad():
        for row, values in enumerate(filters):
            layer.weight[row] = torch.tensor(values)
    found = filter_summary(nn.Sequential(layer))["layers"]["0"]
    assert found["norms"][0] == pytest.approx(float(layer.weight.detach().flatten(1).norm(dim=1).min()))
    return found["angle_counts"]


def test_which_angles_are_counted() -> None:
    assert sum(angles_of(nn.Conv2d(4, 6, 1, groups=2))) == 2 * 3  # within groups
    assert sum(angles_of(nn.Linear(3, 4), [0.0] * 3)) == 3  # a zero filter has none
    assert sum(angles_of(nn.Linear(3, 1))) == 0
    counts = angles_of(nn.Linear(2, 3), [1.0, 2.0], [2.0, 4.0], [-1.0, -2.0])
    assert (counts[0], counts[-1], sum(counts)) == (1, 2, 3)  # parallel and opposite
    assert list(filter_summary(nn.Sequential(nn.BatchNorm2d(3), nn.Embedding(3, 2)))["layers"]) == []


def test_missing_rows_of_costs_are_named() -> None:
    plan = plan_of(seeds=2)
    rows = [(plan.recipes[1].hash, "memory", block, 1.0) for block in range(3)]
    assert not [note for note in summarise(plan, [], rows, []).notes if "cost" in note]
    (note,) = [note for note in summarise(plan, [], rows[:2], []).notes if "cost" in note]
    assert note == "The cost ratios (memory) of r0 are incomplete: 2 rows left."
