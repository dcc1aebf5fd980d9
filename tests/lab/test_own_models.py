"""Models and losses of one's own that no run could train, or that would make two runs of one seed differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.errors import InvalidArgumentError
from gonio.lab import Split, StudyPlan, Task, TrainingConfig, make_plan
from gonio.lab.running.training import evaluate
from gonio.lab.tasks import Metric, resolve
from lab.plans import TINY, recorded


def tiny(**changes: Any) -> Task:
    return replace(resolve(f"{TINY}:task"), **changes)


def planned(task: str = f"{TINY}:task", model: str | None = None, **options: Any) -> StudyPlan:
    return make_plan([], task=task, model=model and f"{__file__}:{model}", seeds=1, **options)


# --- models ---------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


SHARED = net()


def shared() -> nn.Module:
    return SHARED


def frozen() -> nn.Module:
    return net().requires_grad_(requires_grad=False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))


def unseeded() -> nn.Module:
    made = net()
    with torch.no_grad():
        made[1].bias += float(np.random.default_rng().normal())
    return made


class Own(nn.Module):
    """A net whose outputs a function of the module changes."""

    def __init__(self, change: Callable[[Own, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.change, self.kept = net(), change, torch.zeros(4)
        self.unregistered = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Any:
        return self.change(self, self.net(x))


def pair() -> nn.Module:
    return Own(lambda self, y: (y, y))


def named() -> nn.Module:
    return Own(lambda self, y: {"logits": y})


def detached() -> nn.Module:
    return Own(lambda self, y: y.detach())


def in_a_list() -> nn.Module:
    return Own(lambda self, y: self.unregistered[0](y))


def with_the_last_graph() -> nn.Module:
    def change(self: Own, y: Tensor) -> Tensor:
        self.kept = self.kept + y.mean(0)
        return y + self.kept

    return Own(change)


def unseeded_noise() -> nn.Module:
    return Own(lambda self, y: y * (1 + float(np.random.default_rng().normal()) * self.training))


def lost() -> nn.Module:
    made = Own(lambda self, y: y)
    next(made.parameters()).data.fill_(float("nan"))
    return made


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("shared", "must build a new model at each call; found 6 parameters of the first one in the second"),
        ("frozen", "a study trains the parameters of .*:frozen'; found parameters that are all frozen"),
        ("lazy", "must have their sizes .* found a LazyLinear. Run the model on an example in its factory"),
        ("unseeded", "with one seed must be equal; found other weights with the same seed"),
        ("lost", "a new model of .* has finite weights; found NaN or infinity in "),
        ("unseeded_noise", "with one seed must be equal; found another loss after two steps"),
        ("pair", "must return one tensor; found a tuple"),
        ("named", "must return one tensor; found a dict"),
        ("detached", "a loss must have a gradient; found a loss of .* without one"),
        ("in_a_list", r"must be a parameter of the model, .* shapes \(4, 4\), \(4,\). Hold layers in an nn.ModuleList"),
        ("with_the_last_graph", "must train on a batch of 2; found RuntimeError: Trying to backward through the graph"),
    ],
)
def test_a_model_that_falsifies_or_fails_every_run_is_found_before_the_first_one(model: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        planned(model=model)


def test_a_batch_of_one_that_a_norm_cannot_train_on_is_found_before_the_first_run() -> None:
    with pytest.raises(InvalidArgumentError, match="must train on a batch of 1; found ValueError: Expected more than"):
        planned(training=TrainingConfig(epochs=1, batch_size=1, lr=0.1), model="net")


def of_its_own_seed() -> nn.Module:
    torch.manual_seed(0)
    return net()


def dropping() -> nn.Module:
    return Own(lambda self, y: F.dropout(y))


def remembering() -> nn.Module:
    def change(self: Own, y: Tensor) -> Tensor:
        self.kept = self.kept + y.detach().mean(0)
        return y + self.kept

    return Own(change)


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("of_its_own_seed", "Every seed starts with the same weights"),
        ("dropping", "In evaluation mode the model gives other outputs"),
        ("remembering", "In evaluation mode the model gives other outputs"),
    ],
)
def test_what_is_unusual_about_a_model_is_a_note(model: str, note: str) -> None:
    plan = planned(model=model)
    (found,) = plan.notes
    assert found.startswith(note)
    assert recorded(plan, plan.baseline) == recorded(plan, plan.baseline)


def test_usual_models_have_no_note_and_leave_the_generators_alone() -> None:
    state, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert planned(model="net").notes == ()
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(legacy, np.random.get_state()[1])  # noqa: NPY002


def test_a_model_that_changes_its_inputs_in_place_leaves_the_data_as_they_are() -> None:
    task, model = tiny(), nn.Sequential(nn.Threshold(0.5, -1.0, inplace=True), net())
    before = task.validation.inputs.clone()
    evaluate(model, task, task.validation)
    assert torch.equal(task.validation.inputs, before)


# --- losses ---------------------------------------------------------------------------------------------


def of_each_example() -> Task:
    return tiny(loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))


def no_tensor() -> Task:
    return tiny(loss=lambda outputs, targets: F.cross_entropy(outputs, targets).item())


def constant() -> Task:
    return tiny(loss=lambda outputs, targets: torch.ones(()))


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.temperature * outputs, targets)


def with_parameters() -> Task:
    return tiny(loss=Tempered())


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ("of_each_example", r"with one number, of shape \(\); found a Tensor of shape \(2,\)"),
        ("no_tensor", r"with one number, of shape \(\); found a float"),
        ("constant", "a loss must have a gradient; found a loss of 1 without one"),
        ("with_parameters", r"no optimizer trains it; found other tensors of shapes \(\).*parameters of a loss in the"),
    ],
)
def test_a_loss_that_trains_nothing_is_found_before_the_first_run(task: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        planned(f"{__file__}:{task}")


def column() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 1))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def regression(*, loss: Any = squares, metric: Any = squares, axis: bool = False) -> Task:
    kept = tiny()
    splits = {
        name: Split(each.inputs, each.targets.float().reshape(-1, *[1] * axis)) for name, each in kept.splits.items()
    }
    return replace(kept, model=f"{__file__}:column", loss=loss, metric=Metric("squares", metric, "min"), **splits)


def broadcast_loss() -> Task:
    return regression(loss=F.mse_loss)


def broadcast_metric() -> Task:
    return regression(loss=lambda outputs, targets: squares(outputs[:, 0], targets))


def fitting() -> Task:
    return regression(axis=True)


def indexed() -> Task:
    return regression(loss=lambda o, t: squares(o[:, 0], t), metric=lambda o, t: squares(o[:, 0], t))


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ("broadcast_loss", r"the loss compares each output with its own target; found outputs of shape \(2, 1\)"),
        ("broadcast_metric", r"the metric 'squares' compares .* \(32, 1\) and targets of shape \(32,\), which torch"),
    ],
)
def test_an_axis_that_would_be_broadcast_is_found_before_the_first_run(task: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        planned(f"{__file__}:{task}")


@pytest.mark.parametrize("task", ["fitting", "indexed"])
def test_outputs_of_one_column_that_fit_their_targets_are_no_error(task: str) -> None:
    plan = planned(f"{__file__}:{task}")
    assert recorded(plan, plan.baseline).status == "finished"


# --- augmentation ---------------------------------------------------------------------------------------


def noise_of_its_own() -> Task:
    return tiny(augment=lambda x, generator: x + torch.randn(x.shape))


def too_few() -> Task:
    return tiny(augment=lambda x, generator: x[:5])


@pytest.mark.parametrize(
    ("task", "match"),
    [
        ("noise_of_its_own", "found another first batch .* Draw random numbers from the generator that augment= is"),
        ("too_few", r"augment= returns the 33 inputs of an epoch, changed; found a Tensor of shape \(5, 1, 2, 2\)"),
    ],
)
def test_an_augmentation_that_is_not_that_of_its_generator_is_refused(task: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        planned(f"{__file__}:{task}")
