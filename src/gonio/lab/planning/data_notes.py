"""What is unusual about the data of a task: numbers that are not finite, and examples that are in two splits."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from gonio.lab.tasks.task import Examples, ItemSet, Split, Task


def notes_on_data(task: Task) -> list[str]:
    """A note for each split with numbers that are not finite, and for each two splits with equal examples.

    Tensors in memory are equal if all their numbers are; items of data sets, if they are the same items of one object.
    """
    splits = {name: split for name, split in task.splits.items() if isinstance(split, (Split, ItemSet))}
    notes = []
    for name, split in splits.items():
        if isinstance(split, Split) and (count := int(_not_finite(split.inputs, split.targets).sum())):
            notes.append(f"{count:,} of the {len(split):,} examples of the {name} split contain NaN or infinity.")
    keys = {name: _keys(split) for name, split in splits.items()}
    for (first, held), (second, others) in combinations(keys.items(), 2):
        known = set(held)
        if count := sum(key in known for key in others):
            notes.append(
                f"{count:,} of the {len(others):,} examples of the {second} split are examples of the {first} split "
                "too, so its scores are partly those of examples that are known."
            )
    return notes


def _not_finite(*tensors: Tensor) -> Tensor:
    """Whether each example has a number that is not finite."""
    return torch.stack([~torch.isfinite(_rows(x)).all(1) for x in tensors]).any(0)


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(1).flatten(1).contiguous()


def _keys(split: Examples) -> list[Hashable]:
    """What equal examples have in common."""
    if isinstance(split, ItemSet):
        return _origins(split.dataset)
    return [hash(row.tobytes()) for row in _rows(split.inputs).view(torch.uint8).numpy()]


def _origins(dataset: Any) -> list[Hashable]:
    """The object and the index of each item, through subsets of subsets."""
    if type(dataset) is not Subset:
        return [(id(dataset), index) for index in range(len(dataset))]
    below = _origins(dataset.dataset)
    return [below[int(index)] for index in dataset.indices]
