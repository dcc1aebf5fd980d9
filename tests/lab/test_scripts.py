"""Training of the user's own: what it is given, what is taken from it, and what is said when it is wrong."""

from __future__ import annotations

import io
import json
import math
import pickle
import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from gonio import Recipe
from gonio.errors import InvalidArgumentError, UnmatchedRuleError
from gonio.lab import Run, Study, StudyPlan, make_script_plan, run
from gonio.lab.running.scheduler import Lines
from gonio.lab.running.scripts import _run_script, curve_of, logged
from gonio.lab.showing import html as html_of
from lab.plans import OWN

DECAY = {"name": "decay", "penalty": [{"where": "*", "use": "L2", "strength": 0.5}]}


def plan_of(function: str, *, seeds: int = 2, recipes: tuple[str, ...] = ("scale-shift",), **more: object) -> StudyPlan:
    return make_script_plan(list(recipes), script=f"{OWN}:{function}", seeds=seeds, **more)  # type: ignore[arg-type]


def run_of(folder: Path, recipe: dict[str, object] | None = None) -> Run:
    return Run(recipe or {"name": "baseline"}, seed=3, folder=folder)


def test_a_study_of_a_script(tmp_path: Path) -> None:
    study = run(plan_of("train", unit="%"), tmp_path, jobs=2)
    assert [record.status for record in study.runs()] == ["finished"] * 4
    ours = study.runs()[2]
    assert ours.curve["step"] == [0, 1, 2, 3, 4]
    assert len(ours.curve["train_loss"]) == 5
    assert set(ours.geometry["layers"]) == {"0", "2"}
    assert "scale-shift" in ours.plan
    assert study.runs()[0].plan == ""
    assert study.without_costs() == []
    assert list((tmp_path / "work").iterdir()) == []
    results = study.results()
    assert results.plan.scripted
    assert results.effects[0].n == 2


def test_recipes_with_one_seed_see_the_same_random_numbers(tmp_path: Path) -> None:
    recipes = ("baseline", "orthogonal-init", "scale-shift")
    drawn = set()
    for name in recipes:
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)  # noqa: NPY002
        folder = tmp_path / name
        folder.mkdir()
        Run(Recipe.load(name).to_dict(), seed=3, folder=folder).apply_(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        drawn.add((torch.rand(()).item(), random.random(), numpy.random.rand()))  # noqa: NPY002
    assert len(drawn) == 1


def test_the_penalty_is_the_recipes_and_0_without_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    plain = run_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"found no call of run.apply_. Call it first"):
        plain.penalty  # noqa: B018
    plain.apply_(model)
    assert plain.penalty().item() == 0
    with pytest.raises(InvalidArgumentError, match="found a second call"):
        plain.apply_(nn.Linear(2, 2))
    decayed = run_of(tmp_path, DECAY)
    decayed.apply_(model)
    assert decayed.penalty().item() == pytest.approx(0.5 * model.weight.square().sum().item() / 2, rel=1e-6)


def test_a_rule_that_takes_nothing_is_an_error_in_the_run_too(tmp_path: Path) -> None:
    rule = {"where": "conv9", "use": "L2", "strength": 1e-3}
    with pytest.raises(UnmatchedRuleError, match="selects nothing"):
        run_of(tmp_path, {"name": "mine", "penalty": [rule]}).apply_(nn.Linear(2, 2))


def test_what_is_logged_twice_is_replaced_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    one = run_of(tmp_path)
    one.log(2, loss=torch.tensor(2.0, requires_grad=True))
    one.log(0, loss=float("inf"), score=1)
    one.log(2, loss=3.0)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "val')
    assert curve_of(logged(tmp_path)) == {"step": [0.0, 2.0], "loss": [None, 3.0], "score": [1.0, None]}


def test_long_logs_are_thinned(tmp_path: Path) -> None:
    one = run_of(tmp_path)
    for step in range(2001):
        one.log(step, loss=step)
    curve = curve_of(logged(tmp_path))
    assert curve["step"] == curve["loss"] == [float(step) for step in range(0, 2001, 3)]


@pytest.mark.parametrize(("values", "message"), [({}, "found none for step 0"), ({"a": "x"}, "a must be a number; fo")])
def test_only_numbers_are_logged(tmp_path: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run_of(tmp_path).log(0, **values)  # type: ignore[arg-type]


def test_a_run_can_be_sent_to_another_process(tmp_path: Path) -> None:
    first = run_of(tmp_path, DECAY)
    first.apply_(nn.Linear(2, 2))
    second = pickle.loads(pickle.dumps(first))
    assert (second.seed, second.recipe, second.folder) == (3, "decay", tmp_path)
    second.apply_(nn.Linear(2, 2))
    second.report(1.5)
    assert json.loads((tmp_path / "outcome.json").read_text())["score"] == 1.5


def test_mishaps_are_those_of_one_run(tmp_path: Path) -> None:
    study = run(plan_of("mishaps", seeds=7, recipes=()), tmp_path, jobs=3)
    found = {record.seed: record for record in study.runs()}
    assert [found[seed].status for seed in range(7)] == [
        *("finished", "failed", "diverged", "failed", "failed", "failed", "finished")
    ]
    assert (found[6].score, found[2].error) == (6.0, "the score is not finite")
    assert "RuntimeError: a defect of the script (own_training.py:" in (found[1].error or "")
    assert "RuntimeError" in (found[3].error or "")
    assert "memory" in (found[3].error or "")
    assert "signal SIGKILL" in (found[4].error or "")
    assert "SystemExit: the script gave up" in (found[5].error or "")
    assert [seed for _, seed in study.missing()] == [1, 3, 4, 5]


class Seen(io.StringIO):
    """Writes down how many runs had their row when a line was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.lines: dict[str, int] = {}

    def write(self, text: str) -> int:
        self.lines[text] = len(Study.open(self.folder).runs())
        return len(text)


def test_a_run_without_memory_is_said_at_once_and_on_the_page_and_the_others_go_on(tmp_path: Path) -> None:
    stream = Seen(tmp_path)
    study = run(plan_of("greedy", seeds=6, recipes=()), tmp_path, jobs=1, watcher=Lines(stream))
    found = study.runs()
    assert [r.status for r in found] == ["finished", "failed", "failed", "failed", "finished", "finished"]
    assert [r.score for r in found if r.status == "finished"] == [0.0, 4.0, 5.0]
    errors = [r.error or "" for r in found[1:4]]
    for error, word in zip(errors, ("MemoryError", "allocate memory", "signal SIGKILL"), strict=True):
        assert word in error
    for seed in (1, 2, 3):
        said = [rows for text, rows in stream.lines.items() if text.startswith(f"baseline, seed {seed}: failed: ")]
        assert said == [seed + 1]  # when its own row was the last one
    page = html_of(study.results())
    for word in ("MemoryError", "allocate memory", "signal SIGKILL", "3 of 6 runs failed and left no score"):
        assert word in page


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    plan = plan_of("resumes", seeds=1, recipes=())
    assert run(plan, tmp_path).runs()[0].status == "failed"
    record = run(plan, tmp_path).runs()[0]
    assert (record.status, record.score) == ("finished", 7.0)
    assert record.curve["step"] == [0, 1, 2, 3, 4]
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_a_script_may_start_processes_of_its_own(tmp_path: Path) -> None:
    study = run(plan_of("distributed", seeds=1), tmp_path, jobs=1)
    baseline, ours = study.runs()
    assert (baseline.status, ours.status) == ("finished", "finished"), (baseline.error, ours.error)
    assert baseline.curve["step"] == [0, 1, 2]
    assert set(ours.geometry["layers"]) == {"0", "2"}
    assert baseline.score != ours.score


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("without_model", r"found .*own_training\.py:without_model: it ended without a call of run.apply_"),
        ("raises", "it raised KeyError: 'no such <b>column</b>'. Correct the script"),
        ("absent", "there is no function in .*own_training.py named 'absent'"),
    ],
)
def test_what_is_wrong_with_a_script_is_found_before_the_first_run(function: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan_of(function)


def test_a_script_without_a_score(tmp_path: Path) -> None:
    record = run(plan_of("without_score", seeds=1, recipes=()), tmp_path).runs()[0]
    assert record.status == "failed"
    assert "must give the score of its run; found None. Return a number" in (record.error or "")


def test_a_recipe_that_does_not_fit_the_scripts_model_is_found_before_the_first_run() -> None:
    with pytest.raises(InvalidArgumentError, match=r"switchable-norm.*selects nothing.*name recipes that fit"):
        plan_of("train", recipes=("switchable-norm",))


def test_default_recipes_that_do_not_fit_are_left_out_and_noted() -> None:
    plan = make_script_plan(script=f"{OWN}:train", seeds=1)
    assert [entry.name for entry in plan.recipes] == [
        "baseline",
        "orthogonal-init",
        "scale-shift",
    ]
    for name in ("switchable-norm", "decoupled-tanh", "self-orthogonality"):
        assert any(f"{name} is left out" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"script": "train"}, "a script is file.py:function; found 'train'"),
        ({"script": "no.py:train"}, "no file"),
        ({"direction": "up"}, "direction is 'max' or 'min'; found 'up'"),
        ({"sesoi": math.inf}, "sesoi must be 0 or a positive number; found inf"),
        ({"seeds": 0}, "at least one seed"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_script_plan([], **{"script": f"{OWN}:train", **options})  # type: ignore[arg-type]


def test_a_smaller_score_can_be_better(tmp_path: Path) -> None:
    plan = plan_of("noisy", seeds=6, direction="min", metric="perplexity")
    effect = run(plan, tmp_path).results().effects[0]
    assert effect.mean == pytest.approx(len("scale-shift") - len("baseline"))
    assert effect.verdict == "hurts"
    assert Study.open(tmp_path).plan.metric == "perplexity"


def test_a_script_measures_its_steps_shows_further_metrics_and_hands_over_its_model(tmp_path: Path) -> None:
    study = run(plan_of("measured", epsilon=0.3, unit="%"), tmp_path, jobs=1)
    records = study.runs()
    assert [record.status for record in records] == ["finished"] * 4, [record.error for record in records]
    assert all(record.costs["step_time"] > 0 and "memory" not in record.costs for record in records)
    assert [record.metrics for record in records] == [
        {"val_score": 11.0, "f1": seed + len(record.recipe)} for record, seed in zip(records, [0, 1, 0, 1], strict=True)
    ]
    assert {"clean", "noise", "fgsm", "pgd", "worst"} <= set(records[0].robustness)
    assert "transfer" not in records[0].robustness
    assert records[0].robustness["worst"] <= records[0].robustness["clean"]
    results = study.results()
    assert results.effects[0].step_time.n == 2
    assert [each.recipe for each in results.robustness] == ["baseline", "scale-shift"]
    shown = [(one.metric, one.recipe, one.score, one.mean) for one in results.further if one.metric == "f1"]
    assert shown == [("f1", "baseline", 8.5, None), ("f1", "scale-shift", 11.5, 3.0)]


def test_only_some_steps_are_measured(tmp_path: Path) -> None:
    one = run_of(tmp_path)
    for _ in range(120):
        with one.step():
            pass
    assert len(one._gauges) == 100
    one.report(1.0)
    assert set(json.loads((tmp_path / "outcome.json").read_text())["costs"]) == {"step_time"}


def test_attacks_need_the_model(tmp_path: Path) -> None:
    plan = plan_of("train", epsilon=0.1)
    with pytest.raises(InvalidArgumentError, match=r"hands over; found no call of run.hand_over"):
        _run_script(plan, plan.baseline, 0, tmp_path)
    one = run_of(tmp_path)
    one.hand_over(nn.Linear(2, 2), torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    assert not (tmp_path / "attacked.json").exists()  # without --robust
