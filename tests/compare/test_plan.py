"""Plans: what their hash covers, and which changes a study accepts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from compare.plans import plan_of
from gonio.compare.planning.plan import Plan, RecipeEntry, extended
from gonio.errors import PlanChangedError


def test_plan_survives_json() -> None:
    plan = plan_of(recipes=2, notes=("n",), history=({"seeds": [1], "recipes": [], "finished": 3},))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_grid_goes_seed_by_seed_with_the_baseline_first() -> None:
    assert [(entry.name, seed) for entry, seed in plan_of(recipes=1, seeds=2).grid] == [
        ("baseline", 0),
        ("r0", 0),
        ("baseline", 1),
        ("r0", 1),
    ]


@pytest.mark.parametrize("key", ["task", "model", "metric", "direction", "data", "sesoi", "worst", "splits"])
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
    ],
)
def test_a_changed_plan_says_what_changed_and_what_to_do(changes: dict[str, object], message: str) -> None:
    plan = plan_of(seeds=3)
    with pytest.raises(PlanChangedError, match=message) as caught:
        extended(plan, replace(plan, **changes), path="s", finished=0)
    assert "name a new folder to start another one. Only seeds and recipes can be added" in str(caught.value)
    assert len(caught.value.changes) == 1


def test_every_change_is_named_at_once() -> None:
    plan = plan_of()
    training = replace(plan.training, lr=0.7, epochs=9)
    with pytest.raises(PlanChangedError, match=r"task is .*; training.epochs is .*; training.lr is ") as caught:
        extended(plan, replace(plan, training=training, task="t"), path="s", finished=0)
    assert [key for key, _, _ in caught.value.changes] == ["task", "training.epochs", "training.lr"]


def test_a_recipe_changed_under_its_name_is_refused() -> None:
    plan = plan_of()
    other = replace(plan, recipes=(plan.recipes[0], RecipeEntry("r0", {}, "f" * 64)))
    with pytest.raises(PlanChangedError, match="recipe r0 is r0 in the study and ffffffffffff… in the command"):
        extended(plan, other, path="s", finished=0)


def test_additions_after_a_look_go_to_the_history() -> None:
    plan = plan_of(seeds=3, versions={"torch": "1"})
    more = replace(plan_of(recipes=2, seeds=4), versions={"torch": "2"})
    before = extended(plan, more, path="s", finished=0)
    assert (before.history, before.versions) == ((), {"torch": "1"})
    after = extended(plan, more, path="s", finished=6)
    assert after.history == ({"seeds": [3], "recipes": ["r1"], "finished": 6},)
    again = extended(after, more, path="s", finished=12)
    assert again.history == after.history
