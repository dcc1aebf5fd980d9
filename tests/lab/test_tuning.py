"""Tuning: equal budgets, proposals that do not depend on the order of events, and a choice that is made once."""

from __future__ import annotations

import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from gonio.errors import InvalidArgumentError, MissingExtraError, PlanChangedError
from gonio.lab import RunRecord, Study, StudyPlan, make_plan, run
from gonio.lab.plan import TUNING_SEED
from gonio.lab.running.scheduler import Watcher, trial_jobs
from gonio.lab.running.training import execute_trial
from gonio.lab.running.tuning import Trial, best, propose, ready, settled, space_of
from gonio.recipes import Recipe
from lab.plans import TINY, plan_of

optuna = pytest.importorskip("optuna", reason="the extra `tune` is not installed")


def tiny_plan(tune: int = 3, *, seeds: int = 2, recipes: tuple[str, ...] = ("scale-shift",)) -> StudyPlan:
    return make_plan(recipes, task=f"{TINY}:task", seeds=seeds, tune=tune)


def record(score: float | None, status: str = "finished") -> RunRecord:
    return RunRecord("r0", TUNING_SEED, status, score=score)


def objective(values: dict[str, float]) -> float:
    """Best at a learning rate of 0.2."""
    return 90.0 - 100 * abs(values["lr"] - 0.2)


def history(plan: StudyPlan, count: int, *, shuffle: int | None = None) -> list[Trial]:
    """The trials of the first recipe after the baseline, made in whatever order is possible."""
    done: list[Trial] = []
    draw = random.Random(shuffle)
    while len(done) < count:
        number = draw.choice(ready(plan, done)) if shuffle is not None else ready(plan, done)[0]
        values = propose(plan, plan.recipes[1], number, done)
        done.append(Trial(number, values, record(objective(values))))
    return sorted(done, key=lambda trial: trial.number)


def test_the_space_is_the_learning_rate_and_every_strength_around_its_default() -> None:
    rules = [
        {"where": "conv1", "use": "Orthogonality", "strength": 0.02},
        {"where": "conv2", "use": "keep"},
        {"where": "conv3", "use": "Orthogonality", "strength": 0.0},
        {"where": None, "use": "Orthogonality", "strength": 3.0},
    ]
    recipe = Recipe.from_dict({"name": "mine", "penalty": rules})
    plan = make_plan([recipe], seeds=1, tune=2)
    space = {d.name: (d.low, d.default, d.high) for d in space_of(plan, plan.recipes[1])}
    assert space == {
        "lr": (0.05 / 8, 0.05, 0.05 * 8),
        "penalty.1.strength": (0.02 / 30, 0.02, 0.02 * 30),
        "penalty.4.strength": (3.0 / 30, 3.0, 3.0 * 30),
    }
    assert [d.name for d in space_of(plan, plan.baseline)] == ["lr"]
    assert space_of(make_plan([recipe], seeds=1), plan.recipes[1]) == ()


def test_settled_changes_these_values_and_nothing_else() -> None:
    plan = tiny_plan()
    tried, entry = settled(plan, plan.recipes[1], {"lr": 0.3, "penalty.1.strength": 0.7})
    assert (tried.trained.lr, entry.content["penalty"][0]["strength"]) == (0.3, 0.7)
    assert plan.trained.lr == 0.1
    assert plan.recipes[1].content["penalty"][0]["strength"] == 0.1
    assert entry.hash == plan.recipes[1].hash
    assert settled(plan, plan.recipes[1], {}) == (plan, plan.recipes[1])
    baseline = settled(plan, plan.baseline, {"lr": 0.3})
    assert baseline[1] == baseline[0].baseline  # what tells the baseline from a recipe


def test_the_first_trial_has_the_defaults_and_random_ones_the_same_rates_in_every_recipe() -> None:
    plan = tiny_plan(12)
    defaults = propose(plan, plan.recipes[1], 0, [])
    assert defaults == {"lr": 0.1, "penalty.1.strength": 0.1}
    for number in range(1, 8):
        ours, theirs = (propose(plan, entry, number, []) for entry in (plan.recipes[1], plan.baseline))
        assert ours["lr"] == theirs["lr"]
        assert all(d.low <= ours[d.name] <= d.high for d in space_of(plan, plan.recipes[1]))
    assert len({propose(plan, plan.baseline, number, [])["lr"] for number in range(8)}) == 8


@pytest.mark.parametrize("shuffle", [1, 2])
def test_proposals_depend_neither_on_order_nor_on_how_many_are_made_at_a_time(shuffle: int) -> None:
    plan = tiny_plan(20)
    assert history(plan, 20) == history(plan, 20, shuffle=shuffle)


def test_later_trials_learn_from_earlier_ones() -> None:
    plan = tiny_plan(40)
    made = history(plan, 40)
    off = [abs(trial.values["lr"] - 0.2) for trial in made]
    assert sum(off[8:]) / 32 < sum(off[1:8]) / 7
    assert min(off[8:]) < min(off[:8])
    chosen = best(plan, made)
    assert abs(chosen.values["lr"] - 0.2) == min(off)


def test_which_trials_can_be_made_at_the_same_time() -> None:
    plan = tiny_plan(14)
    assert ready(plan, []) == list(range(8))
    more = [Trial(n, {}, record(1.0)) for n in range(8)]
    assert ready(plan, more[:7]) == [7]
    assert ready(plan, more) == [8, 9, 10, 11]
    assert ready(plan, [*more, Trial(9, {}, record(1.0))]) == [8, 10, 11]
    assert ready(tiny_plan(2), []) == [0, 1]


def test_the_best_is_the_first_of_equals_in_the_metrics_direction_and_never_diverged() -> None:
    trials = [Trial(0, {}, record(2.0)), Trial(1, {}, record(None, "diverged")), Trial(2, {}, record(3.0)),
              Trial(3, {}, record(3.0)), Trial(4, {}, record(None, "failed"))]  # fmt: skip
    assert best(plan_of(), trials).number == 2  # type: ignore[union-attr]
    assert best(plan_of(direction="min"), trials).number == 0  # type: ignore[union-attr]
    assert best(plan_of(), [trials[1], trials[4]]) is None


def test_a_diverged_trial_tells_the_sampler_to_stay_away_and_a_failed_one_nothing() -> None:
    plan = tiny_plan(12)
    first = [Trial(n, propose(plan, plan.recipes[1], n, []), record(80.0 - n)) for n in range(8)]
    # the best of them, had it finished
    told, mute = ([Trial(0, first[0].values, record(None, s)), *first[1:]] for s in ("diverged", "failed"))
    found = [propose(plan, plan.recipes[1], 8, each) for each in (first, told, mute)]
    assert len({tuple(each.values()) for each in found}) == 3


def test_the_plan_says_how_it_is_tuned_and_is_another_plan_for_it() -> None:
    plan = tiny_plan(3)
    assert StudyPlan.from_dict(plan.to_dict()) == plan
    assert plan.hash != tiny_plan(4).hash != tiny_plan(0).hash
    assert tiny_plan(0).tuning is None
    with pytest.raises(InvalidArgumentError, match=r"must not be those of tuning and of attacks; found 1000003"):
        make_plan([], task=f"{TINY}:task", seeds=(0, TUNING_SEED), tune=3)


def test_without_optuna_the_extra_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"--tune\) needs the package 'optuna'.*gonio\[lab\]"):
        tiny_plan(3)


def tried(plan: StudyPlan, *, lr: float) -> RunRecord:
    found = execute_trial(plan, plan.recipes[1], TUNING_SEED, {"lr": lr, "penalty.1.strength": 0.2})
    return RunRecord(**found["record"])


def test_a_trial_looks_at_the_validation_split_alone() -> None:
    plan = tiny_plan()
    first = tried(plan, lr=0.05)
    assert first.status == "finished", first.error
    assert first.score == max(s for s in first.curve["val_score"] if s is not None)
    assert (first.geometry, first.plan, first.robustness) == ({}, "", {})
    other = tried(plan, lr=0.2)
    assert other.curve != first.curve


@pytest.mark.slow
def test_a_tuned_study_end_to_end_and_again(tmp_path: Path) -> None:
    plan = tiny_plan(9, seeds=1)
    seen: list[str] = []

    class Watching(Watcher):
        def start(self, total: int, done: int) -> None:
            seen.append(f"{done} of {total}")

    study = run(plan, tmp_path, jobs=2, watcher=Watching())
    tuned = study.results().tuning
    assert [(each.recipe, each.trials, each.failed) for each in tuned] == [("baseline", 9, 0), ("scale-shift", 9, 0)]
    for each, entry in zip(tuned, plan.recipes, strict=True):
        made = study.trials.of(entry)
        chosen = best(plan, made)
        assert each.chosen == chosen.values == study.trials.chosen(entry)
        assert each.score == chosen.record.score
        assert each.default_score == made[0].record.score
        assert [trial.values for trial in made] == [propose(plan, entry, n, made) for n in range(9)]
        assert all(record.settings == each.chosen for record in study.runs() if record.recipe == each.recipe)
    run(plan, tmp_path, jobs=2, watcher=Watching())
    assert seen == ["0 of 20", "20 of 20"]
    with pytest.raises(PlanChangedError, match=r"tuning.trials is 9 in the study and 10 in the command"):
        run(tiny_plan(10, seeds=1), tmp_path)


@pytest.mark.slow
def test_a_tuning_that_was_cut_short_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = tiny_plan(4, seeds=1)
    whole = run(plan, tmp_path / "whole", jobs=1)
    cut = Study.create(tmp_path / "cut", plan)
    for entry, count in zip(plan.recipes, (4, 2), strict=True):
        for trial in whole.trials.of(entry)[:count]:
            cut.trials.add(entry, trial, {})
    # killed after the baseline's last trial and before its choice
    assert cut.trials.chosen(plan.baseline) is None
    assert [unit.name for unit in trial_jobs(cut)] == ["scale-shift, trial 3", "scale-shift, trial 4"]
    assert cut.trials.chosen(plan.baseline) == whole.trials.chosen(plan.baseline)
    assert run(plan, tmp_path / "cut", jobs=2).runs() == whole.runs()


def test_if_no_trial_finishes_the_defaults_are_used(tmp_path: Path) -> None:
    plan = tiny_plan(2, seeds=1)
    study = Study.create(tmp_path, plan)
    for number in range(2):
        study.trials.add(plan.baseline, Trial(number, {"lr": 9.0}, record(None, "failed")), {})
    study.trials.choose_if_complete(plan.baseline)
    assert study.trials.chosen(plan.baseline) == {"lr": 0.1}
    assert study.results().tuning[0].score is None


def test_an_altered_trial_is_named_and_left_out(tmp_path: Path) -> None:
    study = Study.create(tmp_path, tiny_plan())
    for number in range(2):
        study.trials.add(study.plan.baseline, Trial(number, {"lr": 0.1}, record(90.0)), {})
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute("UPDATE trials SET record = json_set(record, '$.score', 99) WHERE number = 1")
    again = Study.open(tmp_path)
    assert [trial.number for trial in again.trials.of(study.plan.baseline)] == [0]
    assert again.damaged() == ["trials: baseline, trial 1"]


def test_proposing_leaves_the_callers_generator_alone() -> None:
    plan = tiny_plan(12)
    before = torch.get_rng_state()
    history(plan, 12)
    assert torch.equal(torch.get_rng_state(), before)
