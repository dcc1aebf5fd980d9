"""Data of one's own: the same in every run, refused with the reason, or noted."""

from __future__ import annotations

import json
import random
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from gonio.errors import InvalidArgumentError
from gonio.lab import Split, StudyPlan, Task, TrainingConfig, make_plan, make_script_plan
from gonio.lab.running.cost import measure_costs
from gonio.lab.tasks import ACCURACY, resolve
from gonio.lab.tasks.task import examples_of
from lab.plans import OWN, TINY, recorded


def tiny(**changes: Any) -> Task:
    return replace(resolve(f"{TINY}:task"), **changes)


def planned(name: str, recipes: tuple[str, ...] = ()) -> StudyPlan:
    return make_plan(recipes, task=f"{__file__}:{name}", seeds=1)


# --- the same data in every process --------------------------------------------------------------------


def split_at_random() -> Task:
    """The usual way to split a data set, which draws from the global generator."""
    kept = tiny(augment=None).train
    every = TensorDataset(kept.inputs, kept.targets)
    train, validation, test = random_split(every, [17, 8, 8])
    return tiny(augment=None, train=train, validation=validation, test=test)


def noisy_split() -> Task:
    kept = tiny().train
    noise = np.random.randn() + random.random() + torch.rand(())  # noqa: NPY002
    return tiny(train=Split(kept.inputs + noise, kept.targets))


@pytest.mark.parametrize("name", ["split_at_random", "noisy_split"])
def test_a_factory_that_draws_from_global_generators_gives_every_process_the_same_data(name: str) -> None:
    plan = planned(name)
    before = torch.get_rng_state()
    random.seed(5)
    assert resolve(plan.task).digest() == plan.data
    assert torch.equal(before, torch.get_rng_state())
    assert recorded(plan, plan.baseline).status == "finished"


def unseeded_split() -> Task:
    kept = tiny().train
    return tiny(train=Split(kept.inputs + float(np.random.default_rng().normal()), kept.targets))


def test_a_run_on_other_data_than_the_plans_is_refused() -> None:
    plan = planned("unseeded_split", ("orthogonal-init",))
    record = recorded(plan, plan.baseline)
    assert record.refused
    assert "must give them again; found other data. Restore the files" in str(record.error)
    with pytest.raises(ValueError, match="found other data"):
        measure_costs(plan, plan.recipes[1:])


def test_a_file_that_is_edited_while_its_study_runs_is_refused(tmp_path: Path) -> None:
    net, script = tmp_path / "net.py", tmp_path / "script_of_own.py"
    net.write_text(Path(TINY).read_text())
    script.write_text(Path(OWN).read_text())
    plans = [make_plan([], task=f"{TINY}:task", model=f"{net}:model", seeds=1),
             make_script_plan([], script=f"{script}:score_of_seed", seeds=1)]  # fmt: skip
    assert [recorded(plan, plan.baseline).status for plan in plans] == ["finished", "finished"]
    for path in (net, script):
        path.write_text(path.read_text() + "\n# another learning rate\n")
    for plan, path in zip(plans, (net, script), strict=True):
        record = recorded(plan, plan.baseline)
        assert record.refused
        assert f"found another content of {path}:" in str(record.error)


# --- what is no data set of pairs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "match"),
    [
        ({"input_ids": 1, "labels": 2}, "found a dict with the keys 'input_ids', 'labels'. Convert them"),
        (None, "found a NoneType"),
        (UserDict(x=1), "found an UserDict with the keys 'x'"),
        ((torch.zeros(2), object()), "arrays or tensors of one shape and type; found Could not infer dtype of obj"),
        ((torch.zeros(3), 0), "found stack expects each tensor to be equal size"),
    ],
)
def test_items_that_make_no_batch_are_named(item: object, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        examples_of([(torch.zeros(2), 0), item]).take([0, 1])


@pytest.mark.parametrize("source", [(torch.zeros(8, 2), torch.zeros(8)), {"train": []}], ids=["pair", "by name"])
def test_several_things_are_no_data_set(source: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Give one of its data sets, or gonio\.lab\.Split\(inputs, targets"):
        examples_of(source)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (np.zeros((2, 3)), "found a ndarray. Convert it"),
        ([[1.0], [2.0]], "found a list"),
        (torch.zeros(2, 3, requires_grad=True), "found a Tensor that is differentiable"),
        (torch.zeros(2, 3).to_sparse(), "found a Tensor that is sparse"),
        (torch.zeros(()), "found a Tensor that is one number"),
    ],
)
def test_what_a_split_cannot_hold_is_named(inputs: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        Split(inputs, torch.zeros(2))


def one() -> Task:
    kept = tiny()
    return replace(
        kept,
        **{name: Split(each.inputs[:1], each.targets[:1]) for name, each in kept.splits.items()},
        training=replace(kept.training, batch_size=1),
        model=f"{__file__}:linear",
    )


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4))


def of_bytes() -> Task:
    """Classes as torchvision's binary files have them, which the loss of torch takes."""
    kept = tiny()
    return replace(kept, **{n: Split(each.inputs, each.targets.to(torch.uint8)) for n, each in kept.splits.items()})


@pytest.mark.parametrize("name", ["one", "of_bytes"])
def test_few_examples_and_short_integers_are_trained_on(name: str) -> None:
    plan = planned(name)
    assert plan.notes == ()
    assert recorded(plan, plan.baseline).status == "finished"


# --- notes ----------------------------------------------------------------------------------------------


def not_finite() -> Task:
    kept = tiny()
    test = kept.test.inputs.clone()
    test[3:5], test[7, 0, 0, 1] = float("nan"), float("inf")
    return replace(kept, test=Split(test, kept.test.targets))


def known_examples() -> Task:
    kept = tiny()
    inputs, targets = (torch.cat(x) for x in zip(kept.test.take(range(100)), kept.train.take([1, 5]), strict=True))
    return replace(kept, test=Split(inputs, targets))


def subsets() -> Task:
    kept = tiny(augment=None)
    every = TensorDataset(*kept.test.take(range(128)))
    half = Subset(every, range(64))
    return replace(kept, train=half, validation=Subset(every, range(64, 90)), test=Subset(half, [3, 4, 4]))


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("not_finite", "3 of the 128 examples of the test split contain NaN or infinity."),
        ("known_examples", "2 of the 102 examples of the test split are examples of the train split too, so"),
        ("subsets", "3 of the 3 examples of the test split are examples of the train split too, so"),
    ],
)
def test_data_that_spoil_the_scores_are_a_note(name: str, note: str) -> None:
    (found,) = planned(name).notes
    assert found.startswith(note)


def loader_of_its_own_size() -> Task:
    kept = tiny(augment=None)
    every = TensorDataset(kept.train.inputs, kept.train.targets)
    return replace(kept, train=lambda size: DataLoader(every, batch_size=8))


def test_a_loader_that_ignores_the_batch_size_is_a_note() -> None:
    (found,) = planned("loader_of_its_own_size").notes
    assert "does not follow the batch size: it gives 8 examples where 2 were asked for" in found


# --- fields of a task ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("name", None, "is text"),
        ("model", nn.Linear(2, 2), "is the name of a model"),
        ("sizes", None, "is a mapping of num_classes and in_channels"),
        ("sizes", {"klasses": 2}, "is a mapping of num_classes and in_channels"),
        ("sizes", {"num_classes": "2"}, "to whole numbers"),
        ("training", {"epochs": 1}, "is a gonio.lab.TrainingConfig"),
        ("sesoi", None, "is a positive number"),
        ("sesoi", "1", "is a positive number"),
        ("sesoi", float("nan"), "is a positive number"),
        ("loss", None, "is a function of outputs and targets"),
        ("metrics", ACCURACY, "is a tuple of metrics"),
        ("notes", "one sentence", "is a tuple of sentences"),
        ("recipes", "orthogonal-init", "is a tuple of names"),
        ("workers", "2", "is 0 or a positive whole number"),
        ("workers", -1, "is 0 or a positive whole number"),
        ("threat", {"epsilon": 0.1}, "is a gonio.lab.AttackConfig"),
        ("standardize", ((0.0,), (0.0,)), "standard deviation, which is above 0"),
        ("standardize", ((float("nan"),), (1.0,)), "is the mean of each channel"),
    ],
)
def test_a_field_of_a_task_of_another_kind_is_named(field: str, value: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Task\({field}=\).*{told}"):
        tiny(**{field: value})


def numbers_of_numpy() -> Task:
    return tiny(sesoi=np.float32(5.0))


def rate_of_torch() -> Task:
    return tiny(training=TrainingConfig(epochs=1, batch_size=8, lr=torch.tensor(0.1)))


def test_numbers_of_other_libraries_are_kept_as_data_or_refused() -> None:
    assert StudyPlan.from_dict(json.loads(json.dumps(planned("numbers_of_numpy").to_dict()))).sesoi == 5.0
    with pytest.raises(InvalidArgumentError, match=r"lr must be a positive number; found tensor\(0\.1.*of Python"):
        planned("rate_of_torch")


def test_a_text_is_no_data_set() -> None:
    with pytest.raises(InvalidArgumentError, match="found a str"):
        examples_of("data/train")


class Labelled(TensorDataset):
    """As data sets of torchvision: `targets` are those before `target_transform`."""

    def __init__(self, targets: Any) -> None:
        kept = tiny(augment=None).test
        super().__init__(kept.inputs, kept.targets)
        self.targets = targets


def names_of_classes() -> Task:
    return tiny(augment=None, test=Labelled(["cat", "dog"] * 64))


def transformed_classes() -> Task:
    return tiny(augment=None, test=Labelled([7, 8, 9, 10] * 32))


def some_classes() -> Task:
    return tiny(augment=None, test=Labelled([0, 1]))


def same_classes() -> Task:
    return tiny(augment=None, test=Labelled([0, 1, 2, 3] * 32))


@pytest.mark.parametrize("name", ["names_of_classes", "transformed_classes", "some_classes"])
def test_targets_that_the_items_do_not_give_are_not_believed(name: str) -> None:
    assert planned(name).chance is None
    assert planned("same_classes").chance == 25.0


class Drifting(Dataset[tuple[Tensor, Tensor]]):
    """Items with noise of a generator that nobody seeds again."""

    def __init__(self, split: Any) -> None:
        self.split, self.draw = split, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.split.inputs[index]
        return inputs + torch.rand(inputs.shape, generator=self.draw), self.split.targets[index]


def drifting() -> Task:
    task = resolve(f"{TINY}:task")
    return replace(task, validation=Drifting(task.validation))


def test_judged_examples_that_differ_when_they_are_read_again_are_refused_before_the_runs() -> None:
    with pytest.raises(InvalidArgumentError, match="the same each time that they are read; found other ones"):
        make_plan(["orthogonal-init"], task=f"{__file__}:drifting", seeds=2)
