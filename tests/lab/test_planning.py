"""Plans: what they contain, what may change, and mistakes that are found before the first run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gonio.errors import InvalidArgumentError, PlanChangedError, UnknownNameError, UnmatchedRuleError
from gonio.lab import dry_run, make_plan
from gonio.lab.plan import RecipeEntry, StudyPlan, TrainingConfig, extended, seeds_of
from gonio.lab.planning.dry_run import run_seconds
from gonio.lab.planning.planner import BUILT_IN_RECIPES
from gonio.lab.running.cost import Gauge
from gonio.recipes import Recipe
from lab.plans import TINY, plan_of


def test_plan_survives_json() -> None:
    plan = plan_of(recipes=2, device="cuda", notes=("n",), history=({"seeds": [1], "recipes": [], "finished": 3},))
    assert StudyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_grid_goes_seed_by_seed_with_the_baseline_first() -> None:
    assert [(entry.name, seed) for entry, seed in plan_of(recipes=1, seeds=2).grid] == [
        ("baseline", 0),
        ("r0", 0),
        ("baseline", 1),
        ("r0", 1),
    ]


@pytest.mark.parametrize("key", ["task", "model", "metric", "direction", "data", "sesoi", "worst", "splits", "device"])
def test_hash_covers_what_results_depend_on(key: str) -> None:
    plan = plan_of()
    assert replace(plan, **{key: {"train": 9} if key == "splits" else 9}).hash != plan.hash


@pytest.mark.parametrize("key", ["notes", "versions", "command", "history"])
def test_hash_leaves_out_what_they_do_not_depend_on(key: str) -> None:
    plan = plan_of()
    assert replace(plan, **{key: "other"}).hash == plan.hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, r"model is digits-cnn in the study and other in the command"),
        ({"sesoi": 2.0}, r"sesoi is 1.0 in the study and 2.0 in the command"),
        ({"splits": {"train": 3, "validation": 2, "test": 2}}, r"splits.train is 2 in the study and 3"),
        ({"code": {"a.py:f": "0" * 64}}, r"code.a.py:f is absent in the study and 000000000000… in the comm"),
        ({"seeds": (0, 1)}, r"seeds is \[0, 1, 2\] in the study and \[0, 1\] in the command"),
        ({"recipes": plan_of().recipes[:1]}, r"recipe r0 is r0 in the study and absent in the command"),
        (
            {"recipes": (plan_of().recipes[0], RecipeEntry("r0", {}, "f" * 64))},  # changed under its name
            "recipe r0 is r0 in the study and ffffffffffff… in the command",
        ),
    ],
)
def test_a_changed_plan_says_what_changed_and_what_to_do(changes: dict[str, object], message: str) -> None:
    plan = plan_of(seeds=3)
    with pytest.raises(PlanChangedError, match=message) as caught:
        extended(plan, replace(plan, **changes), path="s", finished=0)
    assert "or a new folder to start another study. Only seeds and recipes can be added" in str(caught.value)
    assert len(caught.value.changes) == 1


def test_every_change_is_named_at_once() -> None:
    plan = plan_of()
    training = replace(plan.training, lr=0.7, epochs=9)
    with pytest.raises(PlanChangedError, match=r"task is .*; training.epochs is .*; training.lr is ") as caught:
        extended(plan, replace(plan, training=training, task="t"), path="s", finished=0)
    assert [key for key, _, _ in caught.value.changes] == ["task", "training.epochs", "training.lr"]


def test_additions_after_a_look_go_to_the_history() -> None:
    plan = plan_of(seeds=3, versions={"torch": "1"})
    more = replace(plan_of(recipes=2, seeds=4), versions={"torch": "2"})
    before = extended(plan, more, path="s", finished=0)
    assert (before.history, before.versions) == ((), {"torch": "1"})
    after = extended(plan, more, path="s", finished=6)
    assert after.history == ({"seeds": [3], "recipes": ["r1"], "finished": 6},)
    again = extended(after, more, path="s", finished=12)
    assert again.history == after.history


def test_the_built_in_study() -> None:
    plan = make_plan()
    assert [entry.name for entry in plan.recipes] == ["baseline", *BUILT_IN_RECIPES]
    assert (len(plan.grid), plan.seeds, plan.sesoi) == (48, tuple(range(8)), 1.0)
    assert plan.splits == {"train": 200, "validation": 400, "test": 1197}
    assert any("tuned for the baseline alone" in note for note in plan.notes)
    assert any("Few labels on purpose" in note for note in plan.notes)


def test_the_same_words_give_the_same_plan() -> None:
    assert make_plan(seeds=3).hash == make_plan(seeds=(0, 1, 2), command="other").hash
    assert make_plan(seeds=3).hash != make_plan(seeds=4).hash


def test_planning_leaves_the_callers_generator_and_settings_alone() -> None:
    before = torch.get_rng_state()
    dry_run(make_plan(["orthogonal-init"], seeds=1), jobs=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_user_code_is_part_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    text = Path(TINY).read_text()
    path.write_text(text)
    plan = make_plan([], task=f"{path}:task", seeds=1)
    assert set(plan.code) == {f"{path}:task", f"{path}:model"}
    path.write_text(text + "# changed\n")
    assert make_plan([], task=f"{path}:task", seeds=1).hash != plan.hash


def test_a_model_that_does_not_fit_the_task_is_found_here() -> None:
    message = r"must take the inputs of the task 'digits', of shape \(2, 1, 8, 8\).*found RuntimeError: mat1"
    with pytest.raises(InvalidArgumentError, match=message):
        make_plan([], model=f"{TINY}:model", seeds=1)


def test_a_rule_that_takes_nothing_is_found_here_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\npenalty:\n  - {where: conv9, use: L2, strength: 1.0e-3}\n")
    with pytest.raises(UnmatchedRuleError, match=r"mine.yaml:3: rule 1 of penalty \(conv9: L2.*selects nothing"):
        make_plan([str(path)], seeds=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": 0}, InvalidArgumentError, "at least one seed, none of them twice; found 0"),
        ({"seeds": (1, 1)}, InvalidArgumentError, r"none of them twice; found \(1, 1\)"),
        ({"recipes": ["scale-shift"] * 2}, InvalidArgumentError, "found scale-shift more than once"),
        ({"recipes": ["scale-shif"]}, UnknownNameError, r"named 'scale-shif'. Did you mean scale-shift"),
        ({"task": "digit"}, UnknownNameError, "no task named 'digit'"),
        ({"model": "digits"}, UnknownNameError, "no model named 'digits'. Did you mean .*digits-cnn"),
        ({"sesoi": -1.0}, InvalidArgumentError, "sesoi must be a positive number; found -1.0"),
        (
            {"training": TrainingConfig(epochs=0, batch_size=1, lr=1)},
            InvalidArgumentError,
            "epochs must be a positive whole number; found 0",
        ),
        (
            {"training": TrainingConfig(epochs=1, batch_size=201, lr=1)},
            InvalidArgumentError,
            "at most the 200 training",
        ),
        (
            {"training": TrainingConfig(epochs=1, batch_size=1, lr=1, optimizer="adam")},
            InvalidArgumentError,
            "one of sgd, adamw, muon; found 'adam'. Give",
        ),
    ],
)
def test_mistakes(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_plan(**options)  # type: ignore[arg-type]


def test_the_baseline_cannot_be_given_as_a_recipe() -> None:
    with pytest.raises(InvalidArgumentError, match="none may be 'baseline'; found baseline more than once"):
        make_plan([Recipe("baseline")], seeds=1)


def test_a_recipe_that_is_another_one_again_is_noted() -> None:
    first = Recipe.load("orthogonal-init")
    notes = make_plan([first, replace(first, name="again", source="me"), Recipe("empty")], seeds=1).notes
    assert "again has the rules of orthogonal-init: it is the same recipe, and Holm's correction counts both." in notes
    assert "empty has no rules: it is the baseline under another name, and Holm's correction counts it." in notes
    assert not any("Holm" in note for note in make_plan([first], seeds=1).notes)


def test_a_recipe_that_changes_several_things_is_noted() -> None:
    both = replace(Recipe.load("orthogonal-init"), name="both", penalty=Recipe.load("scale-shift").penalty)
    notes = make_plan([both], seeds=1).notes
    assert "both changes several things at once (init orthogonal_, penalty ScaleShift)" in notes[-1]
    assert not any("several things" in note for note in make_plan(seeds=1).notes)


def test_dry_run_tells_grid_time_and_power() -> None:
    text = dry_run(make_plan(["orthogonal-init", "scale-shift"], task=f"{TINY}:task", seeds=8), jobs=2)
    assert "task " in text
    assert "33 train, 64 validation, 128 test" in text
    assert "4 epochs, batch size 8, sgd (learning rate 0.1 with cosine decay, momentum 0.9" in text
    assert "the baseline and 2 recipes, 8 seeds each: 24 runs" in text
    assert "s with 2 runs at a time" in text
    assert "smallest possible p with 8 pairs after Holm over 2 recipes: 0.016; minimum detectable effect (80 %" in text


def test_the_estimated_time_is_that_of_the_epochs_and_batches_of_each_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gauge, "__exit__", lambda gauge, *_: setattr(gauge, "seconds", 3.0))
    plan = make_plan([], task=f"{TINY}:task", seeds=1)
    small = {"training": {"epochs": 5, "batch_size": 2}}
    (usual, _), (own, _) = run_seconds(replace(plan, recipes=(plan.baseline, RecipeEntry.of(Recipe("small"), small))))
    examples, trained = plan.splits["train"], plan.trained
    assert usual == trained.epochs * (examples // trained.batch_size + 3.0)  # the last example is dropped
    assert own == 5 * (examples // 2 + 3.0)


def test_dry_run_says_when_the_seeds_cannot_show_anything() -> None:
    text = dry_run(make_plan(["orthogonal-init"], task=f"{TINY}:task", seeds=5), jobs=1)
    assert "1 recipe: 0.062; it must be below 0.05: too few seeds to detect any effect. Use 6 or more" in text
    assert "nothing to compare" in dry_run(make_plan([], task=f"{TINY}:task", seeds=1), jobs=1)


def test_the_plan_knows_what_a_constant_prediction_scores() -> None:
    plans = [make_plan([], task=task, seeds=1) for task in ("digits", "bytes", f"{TINY}:task")]
    assert [plan.chance for plan in plans] == [pytest.approx(10, abs=0.3), 8.0, 25.0]
    assert replace(plans[0], chance=None).hash == plans[0].hash


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (99999999999999999999, "at most 100,000 seeds; found 99999999999999999999. Ten to twenty are usual"),
        (range(10**30), "at most 100,000 seeds; found 1000"),
        (
            range(2**63 - 1, 2**63 + 1),
            r"at most 4611686018427387904 \(2\^62\); found 9223372036854775807",
        ),
        ((0, -(2**70)), "Choose a smaller first seed"),
    ],
)
def test_absurd_seeds_are_refused(seeds: int | range | tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        seeds_of(seeds)
    assert seeds_of(range(2**62 - 1, 2**62 + 1)) == (2**62 - 1, 2**62)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ({"task": "text:a.txt"}, {"task": "text:../b/a.txt"}, True),
        ({"task": "text:a.txt"}, {"task": "text:../b/a.txt", "data": "0" * 64}, False),
        ({"task": "text:a.txt"}, {"task": "imagefolder:a.txt"}, False),
        ({"task": "t.py:f", "code": {"t.py:f": "1"}}, {"task": "x/t.py:f", "code": {"x/t.py:f": "1"}}, True),
        ({"model": "t.py:f", "code": {"t.py:f": "1"}}, {"model": "x/t.py:f", "code": {"x/t.py:f": "1"}}, True),
        ({"task": "t.py:f", "code": {"t.py:f": "1"}}, {"task": "x/t.py:f", "code": {"x/t.py:f": "2"}}, False),
        ({"task": "t.py:f", "code": {"t.py:f": "1"}}, {"task": "t.py:g", "code": {"t.py:g": "1"}}, False),
        ({"model": "timm:a"}, {"model": "timm:b"}, False),
    ],
)
def test_the_same_files_under_another_path_are_the_same_study(old: Any, new: Any, same: bool) -> None:
    plan = replace(plan_of(), data="f" * 64)
    before, after = replace(plan, **old), replace(plan, **new)
    if same:
        assert extended(before, after, path="s", finished=0) == after
    else:
        with pytest.raises(PlanChangedError, match=r" is .* in the study and .* in the command"):
            extended(before, after, path="s", finished=0)
