"""The training loop: what it depends on, what it reports, and what it refuses to hide."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from gonio.lab import Task
from gonio.lab.plan import StudyPlan, TrainingConfig
from gonio.lab.planning.planner import BUILT_IN_RECIPES, make_plan
from gonio.lab.running.training import batches, build, evaluate, fit, make_optimizer, seed_everything
from gonio.lab.tasks import resolve
from lab.plans import TINY, recorded


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_plan(["orthogonal-init"], task=f"{TINY}:task", seeds=2)


@pytest.fixture
def task() -> Task:
    return resolve(f"{TINY}:task")  # of 33 examples


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4))


def test_a_run_does_not_depend_on_the_process_it_is_in(plan: StudyPlan) -> None:
    first = recorded(plan, plan.recipes[1], 1)
    torch.manual_seed(99)
    torch.rand(7)
    again = recorded(plan, plan.recipes[1], 1)
    assert first.status == "finished", first.error
    assert first == again
    assert first != replace(recorded(plan, plan.recipes[1], 0), seed=1)


def test_batches_depend_on_seed_and_epoch_alone(task: Task) -> None:
    first = list(batches(task, 8, seed=1, epoch=2))
    torch.rand(3)
    again = list(batches(task, 8, seed=1, epoch=2))
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, again, strict=True))
    for seed, epoch in ((2, 2), (1, 3)):
        other = list(batches(task, 8, seed=seed, epoch=epoch))
        assert not torch.equal(first[0][0], other[0][0])


def test_a_last_batch_of_one_is_left_out(task: Task) -> None:
    assert [len(targets) for _, targets in batches(task, 8, seed=0, epoch=0)] == [8, 8, 8, 8]
    assert [len(targets) for _, targets in batches(task, 10, seed=0, epoch=0)] == [10, 10, 10, 3]


@pytest.mark.parametrize("seed", [0, 5])
def test_untouched_layers_start_bit_equal_in_every_recipe(seed: int) -> None:
    plan = make_plan(seeds=1)
    task = resolve("digits")
    reference = dict(build(plan, task, plan.baseline, seed)[0].named_parameters())
    equal = {
        entry.name: {
            name
            for name, value in build(plan, task, entry, seed)[0].named_parameters()
            if name in reference and torch.equal(value, reference[name])
        }
        for entry in plan.recipes[1:]
    }
    weights = {name for name in reference if name.endswith("weight") and "norm" not in name}
    assert set(equal) == set(BUILT_IN_RECIPES)
    biases = {name.replace("weight", "bias") for name in weights}
    # an initialiser changes weight matrices and their biases alone; the others start from the baseline's numbers
    assert equal["orthogonal-init"] == set(reference) - weights - biases
    assert all(equal[name] >= weights for name in equal if name != "orthogonal-init")
    assert equal["self-orthogonality"] == equal["scale-shift"] == set(reference)


def test_the_training_noise_is_the_same_in_every_recipe(plan: StudyPlan, task: Task) -> None:
    # Dropout reads the global generator: it must not matter how much a recipe drew before.
    marks = []
    for draws in (0, 5):
        model, _, _ = build(plan, task, plan.baseline, 0)
        torch.rand(draws)
        seed_everything(1)
        marks.append(fit(model, task, training=plan.training, seed=0).curve)
    assert marks[0] == marks[1]


def test_the_reported_epoch_is_the_best_of_validation_and_the_latest_of_equals(
    task: Task, model: nn.Sequential
) -> None:
    scores = iter([50.0, 70.0, 70.0, 60.0])
    metric = replace(task.metric, function=lambda outputs, targets: next(scores))
    done = fit(model, replace(task, metric=metric), training=task.training, seed=0)
    assert (done.best_epoch, done.curve["val_score"]) == (2, [50.0, 70.0, 70.0, 60.0])
    assert not torch.equal(done.state["1.weight"], model[1].weight)


def test_a_falling_metric_is_best_at_its_least(model: nn.Sequential) -> None:
    task = resolve(f"{TINY}:regression")
    done = fit(model, task, training=task.training, seed=0)
    scores = done.curve["val_score"]
    assert done.best_epoch == scores.index(min(scores))


def test_the_penalty_is_part_of_the_objective_and_not_of_the_curve(task: Task, model: nn.Sequential) -> None:
    def penalty() -> torch.Tensor:
        return 100 * model[1].weight.square().sum()

    training = TrainingConfig(epochs=1, batch_size=32, lr=1e-9)
    plain = fit(model, task, training=training, seed=0)
    penalised = fit(model, task, training=training, seed=0, penalty=penalty)
    assert penalised.curve["train_loss"] == pytest.approx(plain.curve["train_loss"], rel=1e-6)
    before = penalty().item()
    fit(model, task, training=replace(training, lr=1e-3, epochs=3), seed=0, penalty=penalty)
    assert penalty().item() < before / 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(task: Task, model: nn.Sequential, value: float) -> None:
    calls = iter([0.0] * 6 + [value] * 9)
    done = fit(model, task, training=task.training, seed=0, penalty=lambda: torch.tensor(next(calls)))
    assert done.diverged == f"the training loss is {value} in epoch 1"
    assert len(done.curve["val_score"]) == 1


def test_outputs_that_are_not_finite_in_evaluation_are_a_divergence(task: Task, model: nn.Sequential) -> None:
    class OnlyInTraining(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else x / 0

    model.append(OnlyInTraining())
    assert evaluate(model, task, task.test) is None
    done = fit(model, task, training=task.training, seed=0)
    assert done.diverged == "outputs on the validation split are not finite in epoch 0"


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizers_take_every_parameter(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = make_optimizer(model, TrainingConfig(epochs=1, batch_size=1, lr=0.1, optimizer=name))
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())


@pytest.mark.parametrize(
    ("model", "status", "error"),
    [
        ("raising_model", "failed", r"RuntimeError: <b>no</b> memory \(tiny.py:\d+\)"),
        ("diverging_model", "diverged", "the training loss is nan in epoch 0"),
    ],
)
def test_what_goes_wrong_is_part_of_the_record(model: str, status: str, error: str) -> None:
    plan = make_plan([], task=f"{TINY}:task", model=f"{TINY}:{model}", seeds=6)
    records = [recorded(plan, plan.baseline, seed) for seed in plan.seeds]
    wrong = [record for record in records if record.status != "finished"]
    assert 0 < len(wrong) < 6
    for record in wrong:
        assert (record.status, record.score) == (status, None)
        assert re.fullmatch(error, record.error or ""), record.error
