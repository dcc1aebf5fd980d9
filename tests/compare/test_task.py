"""The built-in task and the names of tasks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gonio.compare.tasks import digits, resolve
from gonio.compare.tasks.digits import shifted
from gonio.compare.tasks.task import ACCURACY, Metric, Split, accuracy
from gonio.errors import InvalidArgumentError, MissingExtraError, UnknownNameError


def test_digits_are_split_into_equal_shares_of_every_class_without_overlap() -> None:
    task = digits()
    assert [len(split) for split in task.splits.values()] == [200, 400, 1197]
    assert task.train.targets.bincount().tolist() == [20] * 10
    assert task.validation.targets.bincount().tolist() == [40] * 10
    images = [{image.numpy().tobytes() for image in split.inputs} for split in task.splits.values()]
    # all 1,797 images of the set differ from each other
    assert len(images[0] | images[1] | images[2]) == 1797


def test_digits_are_the_same_for_ever() -> None:
    # changes if the data, the split or torch's generator changes: old studies then refuse to be extended
    assert digits().digest() == "540e507ea43df2b9b6be4e0a810a26b14edc8e468edca611e5eac26f2ea250c2"


def test_shifted_moves_each_image_by_at_most_one_pixel() -> None:
    images = torch.rand(50, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    moved = shifted(images, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    seen = set()
    for before, after in zip(padded, moved, strict=True):
        at = [(i, j) for i in range(3) for j in range(3) if torch.equal(before[:, i : i + 5, j : j + 6], after)]
        assert len(at) == 1
        seen.add(at[0])
    assert len(seen) == 9


def test_shifted_depends_on_its_generator_alone() -> None:
    images = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = shifted(images, torch.Generator().manual_seed(7))
    torch.manual_seed(2)
    assert torch.equal(first, shifted(images, torch.Generator().manual_seed(7)))
    assert not torch.equal(first, shifted(images, torch.Generator().manual_seed(8)))


def test_accuracy_in_percent() -> None:
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    assert accuracy(outputs, torch.tensor([1, 1, 1])) == 200 / 3
    assert (ACCURACY.direction, ACCURACY.worst) == ("max", 0.0)


def test_metric_and_split_refuse_nonsense() -> None:
    with pytest.raises(InvalidArgumentError, match="direction must be 'max' or 'min'; found 'up'"):
        Metric("f1", accuracy, "up")
    with pytest.raises(InvalidArgumentError, match="found 2 inputs and 3 targets"):
        Split(torch.zeros(2), torch.zeros(3))


def test_unknown_task_names_the_closest() -> None:
    with pytest.raises(UnknownNameError, match=r"no task named 'digit'. Did you mean digits"):
        resolve("digit")


def test_user_task_must_be_a_task(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("def make(): return 3\n")
    with pytest.raises(InvalidArgumentError, match="must build a task; found a int"):
        resolve(f"{path}:make")


def test_digits_without_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(MissingExtraError, match=r"needs the package 'scikit-learn'.*gonio\[lab\]"):
        digits()
