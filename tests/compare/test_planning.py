"""From words to a plan: every mistake is found before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gonio.compare import BUILT_IN_RECIPES, dry_run, make_plan
from gonio.compare.planning.plan import Training
from gonio.errors import InvalidArgumentError, UnknownNameError, UnmatchedRuleError
from gonio.recipes import Recipe

TINY = str(Path(__file__).with_name("tiny.py"))


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
        ({"model": "digits"}, UnknownNameError, "no model named 'digits'. Did you mean digits-cnn"),
        ({"sesoi": -1.0}, InvalidArgumentError, "sesoi must be a positive number; found -1.0"),
        ({"training": Training(epochs=0, batch_size=1, lr=1)}, InvalidArgumentError, "epochs must be a posit"),
        ({"training": Training(epochs=1, batch_size=201, lr=1)}, InvalidArgumentError, "at most the 200 training"),
        (
            {"training": Training(epochs=1, batch_size=1, lr=1, optimizer="adam")},
            InvalidArgumentError,
            "one of sgd, adamw; found 'adam'. Choose",
        ),
    ],
)
def test_mistakes(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_plan(**options)  # type: ignore[arg-type]


def test_the_baseline_cannot_be_given_as_a_recipe() -> None:
    with pytest.raises(InvalidArgumentError, match="none may be 'baseline'; found baseline more than once"):
        make_plan([Recipe("baseline")], seeds=1)


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


def test_dry_run_says_when_the_seeds_cannot_show_anything() -> None:
    text = dry_run(make_plan(["orthogonal-init"], task=f"{TINY}:task", seeds=5), jobs=1)
    assert "1 recipe: 0.062; it must be below 0.05: too few seeds to detect any effect. Use 6 or more" in text
    assert "nothing to compare" in dry_run(make_plan([], task=f"{TINY}:task", seeds=1), jobs=1)
