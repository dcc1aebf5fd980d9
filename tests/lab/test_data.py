"""Splits that are not in memory: the same examples, order and augmentation for all recipes of a seed, or a refusal."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gonio import models
from gonio.errors import InvalidArgumentError
from gonio.lab import Split, Task, make_plan
from gonio.lab.planning.checks import paired
from gonio.lab.running.training import batches, evaluate, execute_run
from gonio.lab.tasks import images, resolve
from gonio.lab.tasks.task import examples_of, seeded
from gonio.models.by_name import code_digest
from lab.plans import TINY
from lab.test_tasks import fill


class Points(Dataset[Any]):
    """The points of the tiny task one by one, each with noise from the three generators that user code draws from."""

    def __init__(self, name: str, noise: float = 0.0) -> None:
        split = resolve(f"{TINY}:task").splits[name]
        self.inputs, self.targets, self.noise = split.inputs, split.targets, noise

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        return self.inputs[index] + self.noise * drawn, int(self.targets[index])


class Unseeded(Points):
    """Draws from the operating system."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(index)[0] + os.urandom(1)[0], int(self.targets[index])


def tiny(**changes: Any) -> Task:
    """The tiny task with other splits, and without its augmentation of tensors."""
    return Task(**{**vars(resolve(f"{TINY}:task")), "augment": None, **changes})


def sets(noise: float = 0.5) -> Task:
    return tiny(**{name: Points(name, noise if name == "train" else 0.0) for name in ("train", "validation", "test")})


def still_sets() -> Task:
    return sets(noise=0.0)


def in_memory() -> Task:
    return tiny()


def loaders(workers: int = 2) -> Task:
    def make(size: int) -> DataLoader[Any]:
        return DataLoader(Points("train", 0.5), size, shuffle=True, num_workers=workers, multiprocessing_context="fork")

    def alone(size: int) -> DataLoader[Any]:
        return DataLoader(Points("train", 0.5), size, shuffle=True)

    return tiny(train=make if workers else alone)


def drawn(task: Task, *, seed: int = 1, epoch: int = 2, workers: int = 0) -> list[Tensor]:
    """All numbers of an epoch; the global generators are elsewhere at each call, as after different recipes."""
    random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    return [part for pair in batches(task, 8, seed=seed, epoch=epoch, workers=workers) for part in pair]


def equal(first: list[Tensor], again: list[Tensor]) -> bool:
    return len(first) == len(again) and all(map(torch.equal, first, again))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_items_depend_on_seed_epoch_and_index_alone(workers: int) -> None:
    task = sets()
    first = drawn(task)
    assert equal(first, drawn(task, workers=workers))
    assert [len(y) for y in first[1::2]] == [8, 8, 8, 8]  # of 33, as from memory
    assert not equal(first, drawn(task, epoch=3, workers=workers))
    assert not equal(first, drawn(task, seed=2, workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffling_loader_of_several_workers_is_the_same_for_all_recipes_of_a_seed(workers: int) -> None:
    task = loaders(workers)
    first = drawn(task)
    assert equal(first, drawn(task))
    assert [len(y) for y in first[1::2]] == [8, 8, 8, 8]  # of 33, as from memory
    assert task.train.steps(8, smallest=2) == 4
    assert not equal(first, drawn(task, epoch=3))
    assert not equal(first, drawn(task, seed=2))


class Longer(DataLoader[Any]):
    """Says that it has one batch more than it gives."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_a_loader_that_ends_early_is_told() -> None:
    task = tiny(train=lambda size: Longer(Points("train", 0.5), size, drop_last=True))
    with pytest.raises(InvalidArgumentError, match="a DataLoader with fewer batches than its length"):
        drawn(task)


@pytest.mark.parametrize("make", [sets, loaders])
def test_reading_leaves_the_global_generators_alone(make: Any) -> None:
    # dropout reads them: its masks must not depend on how the data are loaded
    task = make()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    list(batches(task, 8, seed=0, epoch=0))
    list(task.test.in_order(64))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002
    with seeded(3):
        inside = torch.rand(())
    with seeded(3):
        assert torch.rand(()) == inside
    with pytest.raises(KeyError, match="raised inside"), seeded(3):
        raise KeyError("raised inside")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002


def test_a_data_set_gives_the_run_of_the_same_tensors() -> None:
    plans = [
        make_plan([], task=f"{__file__}:{name}", seeds=1, workers=n)
        for name, n in (("in_memory", 0), ("still_sets", 2))
    ]
    ours, theirs = (execute_run(plan, plan.baseline, 0)["record"] for plan in plans)
    assert ours["status"] == "finished", ours["error"]
    assert (ours["score"], ours["curve"]) == (theirs["score"], theirs["curve"])
    assert plans[1].chance == plans[0].chance == 25.0
    assert plans[1].hash == replace(plans[1], workers=5).hash


def test_a_data_set_is_judged_in_order() -> None:
    task = still_sets()
    inputs, targets = (torch.cat(parts) for parts in zip(*task.test.in_order(50, workers=2), strict=True))
    assert torch.equal(inputs, in_memory().test.inputs)
    assert torch.equal(targets, in_memory().test.targets)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 4))
    assert evaluate(model, task, task.test) == evaluate(model, in_memory(), in_memory().test)


def unseeded() -> Task:
    return tiny(train=Unseeded("train"))


def test_what_cannot_be_paired_is_refused_with_the_reason() -> None:
    assert paired(sets().train, 8)
    with pytest.raises(InvalidArgumentError, match="found another first batch when it was read again with the same"):
        make_plan([], task=f"{__file__}:unseeded", seeds=1)


def test_examples_with_nan_are_the_same_when_they_are_read_again() -> None:
    hollow = torch.zeros(8, 2).index_fill(1, torch.tensor([1]), float("nan"))
    assert paired(Split(hollow, torch.zeros(8, dtype=torch.long)), 4)
    assert not paired(Split(hollow, torch.zeros(8, dtype=torch.long)), 4, augment=lambda x, draw: x + torch.rand(1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(1), 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DataLoader(Points("train")), "a DataLoader, whose batch size is fixed. Give its data set, or a function"),
        (Stream(), "an IterableDataset, which has no indices. Give a function of the batch size"),
        ([], "an empty data set"),
        (3, "found an int"),
    ],
)
def test_sources_that_have_no_order_of_their_own(source: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        examples_of(source)


def test_a_loader_without_length_and_a_function_without_loader() -> None:
    with pytest.raises(InvalidArgumentError, match="a DataLoader without a length, which a schedule needs"):
        examples_of(lambda size: DataLoader(Stream(), size)).steps(2, smallest=2)
    with pytest.raises(InvalidArgumentError, match="a DataLoader without a length, which a schedule needs"):
        len(examples_of(lambda size: DataLoader(Stream(), size)))
    with pytest.raises(InvalidArgumentError, match=r"a function that returns an int\. Return a torch DataLoader"):
        examples_of(lambda size: 3).steps(2, smallest=2)
    with pytest.raises(InvalidArgumentError, match="a function for a split that is judged"):
        list(loaders().train.in_order(8))


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_function_for_a_judged_split_is_refused_before_any_run(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a function for a split that is judged\. Give its data set"):
        tiny(**{name: lambda size: DataLoader(Points(name), size)})


def test_tensors_that_are_not_there_are_asked_for_in_vain() -> None:
    for split in (sets().train, loaders().train):
        with pytest.raises(InvalidArgumentError, match="as tensors in memory; found a data set or a loader"):
            split.inputs  # noqa: B018
    with pytest.raises(InvalidArgumentError, match="as tensors in memory"):
        examples_of([(torch.zeros(1), 0)]).targets  # noqa: B018


def test_examples_are_pairs() -> None:
    with pytest.raises(InvalidArgumentError, match=r"pair of an input and a target.*found 3 of Tensor, int, int"):
        examples_of([(torch.zeros(1), 0, 1)] * 2).take([0, 1])


def test_augmentation_of_tensors_needs_tensors() -> None:
    with pytest.raises(InvalidArgumentError, match="augment= takes all training inputs of an epoch as one tensor"):
        replace(sets(), augment=lambda x, generator: x)


def test_the_digest_sees_items_and_all_targets() -> None:
    task, other = sets(), sets()
    assert task.digest() == other.digest()
    other.train.dataset.targets = other.train.dataset.targets.clone()  # type: ignore[attr-defined]
    other.train.dataset.targets[32] += 1  # type: ignore[attr-defined]
    assert task.digest() != other.digest()


def test_many_images_are_decoded_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    fill(tmp_path, mode="RGB")
    known = resolve(f"imagefolder:{tmp_path}")
    monkeypatch.setattr(images, "_IN_MEMORY", 0)
    task = resolve(f"imagefolder:{tmp_path}")
    for name, split in task.splits.items():
        inputs, targets = split.take(range(len(split)))
        assert torch.equal(inputs, known.splits[name].inputs)
        assert torch.equal(targets, known.splits[name].targets)
        with pytest.raises(InvalidArgumentError, match="as tensors in memory"):
            split.inputs  # noqa: B018
    assert task.standardize[0] == pytest.approx(known.standardize[0])
    assert task.sizes == known.sizes
    fill(tmp_path, classes=("cat",), size=(40, 20), count=5, mode="RGB")
    shapes = {tuple(x.shape) for x, _ in resolve(f"imagefolder:{tmp_path}").train.in_order(1)}
    assert shapes == {(1, 3, 64, 64)}


NEIGHBOURS = {
    "parts.py": "from deeper import WIDTH\n",
    "deeper.py": "WIDTH = 3\n",
    "late.py": "SHIFT = 1\n",
    "mine.py": "import parts\nfrom torch.nn import Linear\n\n\n"
    "def net():\n    import late\n    return Linear(parts.WIDTH, late.SHIFT)\n",
}


def test_user_files_import_their_neighbours_whose_text_is_part_of_the_plan(tmp_path: Path) -> None:
    for name, text in NEIGHBOURS.items():
        (tmp_path / name).write_text(text)
    before, spec = [*sys.path], f"{tmp_path / 'mine.py'}:net"
    try:
        model = models.resolve(spec)()
        assert (model.in_features, model.out_features) == (3, 1)
        assert sys.path == before
    finally:
        for name in ("parts", "deeper", "late"):
            sys.modules.pop(name, None)
    digest = code_digest(spec)
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert code_digest(spec) == digest
    for name in ("deeper.py", "late.py"):
        (tmp_path / name).write_text(NEIGHBOURS[name] + "# changed\n")
        assert code_digest(spec) != digest
        digest = code_digest(spec)


def test_a_field_of_another_kind_is_told_on_one_line() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Task\(model=\) is the name of a model.* found Sequential\( \(0\)"):
        tiny(model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
