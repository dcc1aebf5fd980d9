"""Metrics of the user's own: wrong shapes, numbers that are none, NaN, and functions that change their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.lab import Split, StudyPlan, Task, make_plan
from gonio.lab.record import RunRecord
from gonio.lab.running.training import execute_run, execute_trial, fit, metrics_on
from gonio.lab.tasks import ACCURACY, Metric, accuracy, resolve
from lab.plans import TINY


def tiny(**changes: Any) -> Task:
    return replace(resolve(f"{TINY}:task"), **changes)


def judged_by(function: Callable[[Tensor, Tensor], Any]) -> Task:
    return tiny(metric=Metric("own", function))


def planned(name: str) -> StudyPlan:
    return make_plan([], task=f"{__file__}:{name}", seeds=1)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((4, 3), (4, 1)), ((3, 3), (3, 3)), ((4, 2, 5, 5), (4, 5, 5)), ((4,), (4,)), ((5, 3), (4,))],
    ids=["a column", "shares of classes", "pixels", "no classes", "another number"],
)
def test_shapes_that_would_be_broadcast_have_no_accuracy(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"one class per example; found outputs of shape .* of its own"):
        accuracy(torch.zeros(outputs), torch.zeros(targets, dtype=torch.long))


@pytest.mark.parametrize(("targets", "found"), [([0, 1, 3], "0 to 3"), ([-100, 1, 2], "-100 to 2")])
def test_classes_without_an_output_are_not_counted_as_wrong(targets: list[int], found: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"needs targets from 0 to 2; found {found}"):
        accuracy(torch.zeros(3, 3), torch.tensor(targets))


def column() -> Task:
    """Labels of shape (N, 1), whose axis the loss removes and the accuracy does not."""
    kept = tiny()
    splits = {name: Split(each.inputs, each.targets[:, None]) for name, each in kept.splits.items()}
    return replace(kept, **splits, loss=lambda o, t: nn.functional.cross_entropy(o, t.squeeze(1)))


def from_one() -> Task:
    """The classes of the test split count from 1."""
    test = tiny().test
    return tiny(test=Split(test.inputs, test.targets + 1))


def all_beyond() -> Task:
    test = tiny().test
    return tiny(test=Split(test.inputs, torch.full_like(test.targets, 7)))


@pytest.mark.parametrize(
    ("task", "match"),
    [("column", "one class per example"), ("from_one", "found 1 to 4"), ("all_beyond", "found 7 to 7")],
)
def test_targets_that_the_accuracy_cannot_judge_are_found_before_the_first_run(task: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        planned(task)


def nothing() -> Task:
    return judged_by(lambda outputs, targets: None)


def named() -> Task:
    return judged_by(lambda outputs, targets: {"accuracy": 1.0})


def each_example() -> Task:
    return judged_by(lambda outputs, targets: (outputs.argmax(1) == targets).float())


@pytest.mark.parametrize("task", ["nothing", "named", "each_example"])
def test_what_is_no_number_is_found_before_the_first_run(task: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the metric 'own' must return one number; found"):
        planned(task)


def undefined_for_few() -> Task:
    def function(outputs: Tensor, targets: Tensor) -> float:
        if len(outputs.unique(dim=0)) < 3:
            raise ValueError("not defined for equal outputs")
        return 1.0

    return judged_by(function)


def test_a_metric_that_rejects_outputs_of_two_examples_is_no_error() -> None:
    assert planned("undefined_for_few").chance is None


@pytest.mark.parametrize(
    "found", [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), torch.tensor(0.5, requires_grad=True)]
)
def test_numbers_of_other_kinds_are_numbers(found: Any) -> None:
    assert Metric("own", lambda outputs, targets: found).value(torch.zeros(1), torch.zeros(1)) == 0.5


def test_a_function_that_changes_its_arguments_changes_nothing_else() -> None:
    def spoils(outputs: Tensor, targets: Tensor) -> float:
        targets.copy_(outputs.zero_()[:, 0])
        return 0.0

    task = tiny(metric=Metric("spoils", spoils), metrics=(ACCURACY,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    found = metrics_on(model, task, task.test, [task.metric, *task.metrics])
    assert found is not None
    assert found["accuracy"] == accuracy(model(task.test.inputs).detach(), task.test.targets)


def test_metrics_need_names_and_directions_of_their_own() -> None:
    with pytest.raises(InvalidArgumentError, match="needs its own name; found 'accuracy' twice"):
        tiny(metrics=(Metric("accuracy", lambda outputs, targets: -1.0),))
    with pytest.raises(InvalidArgumentError, match=r"judged by a gonio\.lab\.tasks\.Metric; found a function\. Write"):
        tiny(metric=accuracy)


def scored(*scores: float) -> Task:
    given = iter(scores)
    return judged_by(lambda outputs, targets: next(given))


@pytest.mark.parametrize(
    ("scores", "best"),
    [((math.nan, 1.0, 2.0, math.nan), 2), ((3.0, math.nan, math.inf, 1.0), 0), ((math.nan,) * 4, None)],
)
def test_an_epoch_without_a_finite_score_is_never_the_best(scores: tuple[float, ...], best: int | None) -> None:
    task = scored(*scores)
    done = fit(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), task, training=task.training, seed=0)
    assert done.best_epoch == best
    assert (done.state is None) == (best is None)


def never() -> Task:
    return judged_by(lambda outputs, targets: math.nan)


def not_on_test() -> Task:
    return judged_by(lambda outputs, targets: math.nan if len(targets) == 128 else 1.0)


def now_and_then() -> Task:
    calls = iter(range(1000))
    return judged_by(lambda outputs, targets: math.nan if next(calls) % 2 == 0 else 2.0)


@pytest.mark.parametrize(
    ("task", "error"),
    [("never", "no epoch has a finite validation score"), ("not_on_test", "its own on the test split is nan")],
)
def test_a_metric_that_is_not_finite_is_named_and_not_the_outputs(task: str, error: str) -> None:
    plan = planned(task)
    assert plan.chance is None
    record = RunRecord(**execute_run(plan, plan.baseline, 0)["record"])
    assert (record.status, record.score, record.error) == ("diverged", None, error)


def test_a_trial_is_scored_by_its_finite_epochs() -> None:
    plan = planned("now_and_then")
    assert execute_trial(plan, plan.baseline, 5, {})["record"]["score"] == 2.0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"function": None}, r"Metric\(function=\) is a function of outputs and targets; found None"),
        ({"name": 5}, r"Metric\(name=\) is text; found 5"),
        ({"unit": 5}, r"Metric\(unit=\) is text; found 5"),
        ({"worst": math.nan}, r"Metric\(worst=\) is a finite number; found nan"),
        ({"worst": -math.inf}, r"Metric\(worst=\) is a finite number; found -inf"),
        ({"worst": "0"}, r"Metric\(worst=\) is a finite number; found '0'"),
    ],
)
def test_a_field_of_a_metric_of_another_kind_is_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        Metric(**{"name": "own", "function": lambda outputs, targets: 1.0, **fields})


def not_a_number(outputs: Tensor, targets: Tensor) -> float:
    return math.nan


def of_several_outputs(outputs: Tensor, targets: Tensor) -> float:
    """Undefined for constant outputs alone, as a correlation is."""
    return float(outputs.std()) if bool((outputs != outputs[0]).any()) else math.nan


def task_of_never() -> Task:
    return tiny(metric=Metric("never", not_a_number))


def task_of_several() -> Task:
    return tiny(metric=Metric("several", of_several_outputs))


def test_a_metric_that_is_never_finite_is_a_note_of_the_plan() -> None:
    noted = make_plan(["orthogonal-init"], task=f"{__file__}:task_of_never", seeds=2).notes
    assert any("The metric 'never' is nan for the outputs of the untrained model" in note for note in noted)
    usual = make_plan(["orthogonal-init"], task=f"{__file__}:task_of_several", seeds=2).notes
    assert not any("The metric" in note for note in usual)
