"""Recipes that name an optimizer or a hold: what each run trains with, equal tuning, and the same study again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, PendingRecipeError, UnmatchedRuleError
from gonio.lab import StudyPlan, TrainingConfig, make_plan, make_script_plan, run
from gonio.lab.claims import load_claim, plan_claim
from gonio.lab.claims.experiment import ClaimOptions
from gonio.lab.plan import RecipeEntry
from gonio.lab.planning.planner import check_training
from gonio.lab.running.training import TrainingStep, build, make_optimizer, make_schedule
from gonio.lab.running.tuning import Trial, propose, settled, space_of
from gonio.lab.tasks import resolve
from gonio.optim import Muon
from gonio.optim.holding import step_of_hold
from gonio.optim.named import OPTIMIZERS
from gonio.recipes import Recipe, built_in_names
from lab.plans import TINY, recorded

HELD = {"name": "held", "hold": {"where": None, "norm": "filters", "step": "fixed"}}
TURNED = {"name": "turned", "optimizer": {"use": "muon", "lr": 0.02, "weight_decay": 0.1}}


def plan_with(*recipes: dict[str, Any], **more: Any) -> StudyPlan:
    return make_plan([Recipe.from_dict(each) for each in recipes], task=f"{TINY}:task", **{"seeds": 2, **more})


def test_each_arm_has_its_own_training() -> None:
    plan = plan_with(TURNED, HELD, {"name": "slow", "optimizer": {"use": "sgd", "lr": 0.01}})
    baseline, turned, held, slow = (plan.training_of(entry) for entry in plan.recipes)
    assert baseline == held == plan.trained
    assert turned == replace(plan.trained, optimizer="muon", lr=0.02, weight_decay=0.1, momentum=0.95)
    assert slow == replace(plan.trained, lr=0.01), "the decay that it leaves out is the plan's"
    assert [entry.unchanged for entry in plan.recipes] == [True, False, False, False]
    assert [entry.changes for entry in plan.recipes[1:]] == [("optimizer muon",), ("hold filters",), ("optimizer sgd",)]


def test_a_setting_of_the_arm_goes_before_its_optimizer() -> None:
    plan = plan_with(TURNED)
    entry = RecipeEntry.of(Recipe.from_dict(TURNED), {"training": {"lr": 0.5}})
    assert plan.training_of(entry) == replace(plan.training_of(plan.recipes[1]), lr=0.5)


def test_an_optimizer_and_a_hold_are_two_changes() -> None:
    plan = make_plan(["hyperball"], task=f"{TINY}:task", seeds=1)
    assert "hyperball changes several things at once (optimizer adamw, hold matrix)" in plan.notes[-2]
    assert plan.notes[-1] == "hyperball is trained by adamw with a learning rate of 0.01, in place of sgd with 0.1."


def test_the_optimizers_of_the_arms_are_the_named_ones() -> None:
    plan, task = plan_with(TURNED, HELD), resolve(f"{TINY}:task")
    kinds = []
    for entry in plan.recipes:
        model, applied, _ = build(plan, task, entry, 0)
        step = TrainingStep(model, task, plan.training_of(entry), applied.penalty, hold=applied.hold_)
        kinds.append((type(step.optimizer), step_of_hold(model[0].weight)))
    assert kinds == [(torch.optim.SGD, None), (Muon, None), (torch.optim.SGD, "fixed")]


def test_a_step_without_the_hold_is_refused() -> None:
    """Negative control: the loop must hand its optimizer over."""
    plan, task = plan_with(HELD), resolve(f"{TINY}:task")
    model, applied, _ = build(plan, task, plan.recipes[1], 0)
    step = TrainingStep(model, task, plan.trained, applied.penalty)
    with pytest.raises(PendingRecipeError, match="the recipe 'held' acts on the optimizer's steps; found SGD"):
        step(*task.train.take(range(8)))


@pytest.mark.parametrize("more", [{}, {"ema": 0.9}, {"schedule": "one-cycle"}, {"accumulate": 2}])
def test_norms_are_held_through_a_run_and_only_in_its_arm(more: dict[str, Any]) -> None:
    plan, task = plan_with(HELD, training=more), resolve(f"{TINY}:task")
    spread = []
    for entry in plan.recipes:
        model, applied, _ = build(plan, task, entry, 0)
        before = model[0].weight.detach().flatten(1).norm(dim=1)
        step = TrainingStep(model, task, plan.training_of(entry), hold=applied.hold_)
        schedule = make_schedule(step.optimizer, plan.trained, 4)
        for _ in range(6):
            step(*task.train.take(range(8)))
            schedule.step()
        spread.append(float((model[0].weight.detach().flatten(1).norm(dim=1) / before - 1).abs().max()))
    assert spread[1] < 1e-6 < 1e-3 < spread[0]


def test_a_run_is_the_same_again_and_its_arms_differ() -> None:
    plan = plan_with(TURNED, HELD, {"name": "learned", "hold": {
        "where": "type:Linear", "norm": "filters", "magnitude": "learned", "radius": 1.0}})  # fmt: skip
    first, second = ([recorded(plan, entry) for entry in plan.recipes] for _ in range(2))
    assert [record.error for record in first] == [None] * 4
    assert [record.to_dict() | {"seconds": 0} for record in first] == [r.to_dict() | {"seconds": 0} for r in second]
    assert len({tuple(record.curve["train_loss"]) for record in first}) == 4
    assert first[2].plan.splitlines()[2].split() == ["hold", "1", "0", "Conv2d", "hold_(norm=filters,", "step=fixed)"]


@pytest.mark.slow
def test_a_study_that_was_cut_short_gives_the_same_rows(tmp_path: Path) -> None:
    plan = plan_with(TURNED, HELD)
    whole = run(plan, tmp_path / "whole", jobs=1)
    run(replace(plan, seeds=(0,)), tmp_path / "cut", jobs=1)
    assert run(plan, tmp_path / "cut", jobs=2).runs() == whole.runs()
    assert {record.status for record in whole.runs()} == {"finished"}
    assert StudyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_one_cycle_keeps_the_ratio_of_the_rates() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    training = TrainingConfig(epochs=2, batch_size=2, lr=0.1, optimizer="muon", schedule="one-cycle", others_factor=0.2)
    optimizer = make_optimizer(model, training)
    schedule = make_schedule(optimizer, training, 10)
    for _ in range(12):
        first, *others = (group["lr"] for group in optimizer.param_groups)
        assert others == pytest.approx([0.2 * first] * len(others))
        optimizer.step()
        schedule.step()


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_every_arm_is_tuned_around_its_own_rate_over_as_wide_a_range() -> None:
    plan = plan_with(TURNED, HELD, tune=3)
    rates = [space_of(plan, entry)[0] for entry in plan.recipes]
    assert [(d.name, d.default) for d in rates] == [("lr", 0.1), ("lr", 0.02), ("lr", 0.1)]
    assert {(round(d.default / d.low, 9), round(d.high / d.default, 9)) for d in rates} == {(8.0, 8.0)}
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    for number in range(1, 4):
        tried = [
            propose(plan, entry, number, [])["lr"] / d.default for entry, d in zip(plan.recipes, rates, strict=True)
        ]
        assert tried == pytest.approx([tried[0]] * 3), "the same multiples for every arm"


def test_a_tuned_rate_is_the_one_of_the_arm() -> None:
    plan = plan_with(TURNED, HELD, tune=3)
    for index, entry in enumerate(plan.recipes):
        tried, changed = settled(plan, entry, {"lr": 0.3})
        assert tried.training_of(changed).lr == 0.3
        assert replace(tried.training_of(changed), lr=1.0) == replace(plan.training_of(entry), lr=1.0)
        assert (changed.hash, tried.recipes[index]) == (entry.hash, changed)
    assert plan.recipes[1].content["optimizer"]["lr"] == 0.02
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = make_optimizer(model, replace(plan.training_of(plan.recipes[1]), lr=1.0))
    assert {group["lr"] for group in optimizer.param_groups} == {1.0, 0.015}, "what is no matrix follows"


def test_a_tuned_rate_is_the_one_of_an_arm_with_a_training_of_its_own() -> None:
    plan = plan_with(TURNED, tune=3)
    own = RecipeEntry.of(Recipe.from_dict(TURNED), {"training": {"lr": 0.005, "epochs": 4}})
    plan = replace(plan, recipes=(*plan.recipes, own))
    rate = space_of(plan, own)[0]
    assert (rate.low, rate.default, rate.high) == pytest.approx((0.005 / 8, 0.005, 0.04))
    tried, changed = settled(plan, own, {"lr": 0.3})
    assert tried.training_of(changed) == replace(plan.training_of(own), lr=0.3)
    assert (changed.hash, own.setting["training"]["lr"]) == (own.hash, 0.005)


def test_every_rate_and_strength_of_a_claim_that_is_tuned_reaches_its_arm() -> None:
    tuned = 0
    for name in ("bn-batch-2", "norm-grid"):
        plan = plan_claim(load_claim(name), ClaimOptions(full=True))
        for entry in plan.recipes:
            for dimension in space_of(plan, entry):
                tried, changed = settled(plan, entry, {dimension.name: 0.7 * dimension.default})
                assert (tried.training_of(changed), changed.content) != (plan.training_of(entry), entry.content)
                tuned += 1
    assert tuned > 20


def test_a_tuned_study_with_an_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    plan = plan_with(TURNED, tune=2, seeds=1)
    study = run(plan, tmp_path, jobs=1)
    entry = plan.recipes[1]
    trials: list[Trial] = study.trials.of(entry)
    assert [trial.values["lr"] for trial in trials] == [0.02, propose(plan, entry, 1, trials)["lr"]]
    assert all(record.settings == study.trials.chosen(entry) for record in study.runs() if record.recipe == "turned")


# --- before the first run ---------------------------------------------------------------------------------------------


def test_a_hold_that_matches_nothing_is_found_by_the_plan() -> None:
    with pytest.raises(UnmatchedRuleError, match=r"hold \(type:Conv3d: hold_\) selects nothing"):
        plan_with({"name": "x", "hold": {"where": "type:Conv3d"}})


def test_a_training_option_that_no_optimizer_has() -> None:
    task, plain = resolve(f"{TINY}:task"), TrainingConfig(epochs=1, batch_size=8, lr=0.1)
    with pytest.raises(InvalidArgumentError, match=rf"optimizer must be one of {', '.join(OPTIMIZERS)}; found 'lamb'"):
        check_training(replace(plain, optimizer="lamb"), task)
    check_training(replace(plain, optimizer="muon"), task)


SCRIPT = """
import torch

def train(run):
    model = torch.nn.Linear(4, 3)
    run.apply_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    HOLD
    norm = model.weight.norm().item()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return abs(model.weight.norm().item() / norm - 1)
"""


def test_a_script_hands_its_optimizer_over(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT.replace("HOLD", "run.hold_(optimizer)"))
    plan = make_script_plan([Recipe.from_dict(HELD | {"hold": {}})], script=f"{path}:train", seeds=1)
    plain, held = (recorded(plan, entry) for entry in plan.recipes)
    assert (plain.error, held.error) == (None, None)
    assert held.score < 1e-6 < 1e-3 < plain.score
    assert "hold" in held.plan


def test_a_script_that_forgets_the_hold_fails_its_runs(tmp_path: Path) -> None:
    path = tmp_path / "forgetful.py"
    path.write_text(SCRIPT.replace("HOLD", "pass"))
    plan = make_script_plan([Recipe.from_dict(HELD | {"hold": {}})], script=f"{path}:train", seeds=1)
    plain, held = (recorded(plan, entry) for entry in plan.recipes)
    assert plain.status == "finished"
    assert "PendingRecipeError: optimizer.step(): the recipe 'held'" in (held.error or "")


def test_a_script_builds_its_own_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    with pytest.raises(InvalidArgumentError, match=r"a script builds its own optimizer; found muon, which names one"):
        make_script_plan(["muon"], script=f"{path}:train", seeds=1)


@pytest.mark.parametrize("name", [n for n in built_in_names() if not n.endswith(("-1d", "-linear"))])
def test_channels_side_by_side_train_every_recipe_to_the_same_weights(name: str) -> None:
    plan = make_plan([name], task="digits", seeds=1)
    task, entry = resolve("digits"), plan.recipes[1]
    ends, kept = [], []
    for chosen in (False, True):
        model, applied, _ = build(plan, task, entry, 0)
        training = replace(plan.training_of(entry), channels_last=chosen)
        seen: list[Tensor] = []
        model.conv3.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        step = TrainingStep(model.double(), task, training, applied.penalty, hold=applied.hold_)
        inputs, targets = task.train.take(range(32))
        for _ in range(3):
            step(inputs.double(), targets)
        ends.append([parameter.detach() for parameter in model.parameters()])
        kept.append([each.is_contiguous() for each in seen[-3:]])  # muon runs the model on its own before
    # float64: 3 steps of a few dozen operations, each with sums in another order
    for plain, last in zip(*ends, strict=True):
        torch.testing.assert_close(last, plain, rtol=1e-9, atol=1e-11)
    assert kept == [[True] * 3, [False] * 3]
