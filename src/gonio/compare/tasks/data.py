"""The examples of a split: tensors in memory, a map-style data set, or loaders of the user's own.

All recipes of one seed get the same examples in the same order with the same augmentation. The order of tensors and of
data sets is drawn here, and each item of a data set is read with generators that depend on the seed, the epoch and its
index alone, so the number of loading processes changes nothing.
"""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gonio.errors import InvalidArgumentError
from gonio.seeding import derive_seed, generator

__all__ = ["Batch", "Examples", "ItemSet", "LoaderSet", "examples_of", "paired", "seeded", "shuffled_order"]

Batch = tuple[Tensor, Tensor]
Augment = Callable[[Tensor, Generator], Tensor]
_SAMPLED = 64  # items of a data set that its digest covers


class Examples(Protocol):
    """The examples of one split."""

    def __len__(self) -> int:
        """Their number."""

    @property
    def inputs(self) -> Tensor:
        """All inputs; an error if they are not in memory."""

    @property
    def targets(self) -> Tensor:
        """All targets; an error if they are not known without reading the examples."""

    def shuffled(
        self, size: int, *, seed: int, epoch: int, smallest: int, augment: Augment | None, workers: int
    ) -> Iterator[Batch]:
        """One epoch of training in batches of `size`; a last one with less than `smallest` examples is left out."""

    def steps(self, size: int, *, smallest: int) -> int:
        """The number of batches of an epoch."""

    def in_order(self, size: int, *, workers: int = 0) -> Iterator[Batch]:
        """Every example once, in order."""

    def take(self, indices: Sequence[int]) -> Batch:
        """The examples with these indices."""

    def numbers(self) -> Iterator[tuple[str, bytes]]:
        """What the digest of the data covers, with a description of each part."""


class _Unloaded:
    """What examples without tensors in memory say when they are asked for them."""

    @property
    def inputs(self) -> Tensor:
        raise InvalidArgumentError(
            "this needs the examples of a split as tensors in memory",
            "a data set or a loader, whose examples are read one by one",
            "Give the task a gonio.compare.Split.",
        )

    targets = inputs


class ItemSet(_Unloaded):
    """A map-style data set whose items are pairs of an input and a target.

    Args:
        dataset: with `len()` and indices from 0; its own random augmentation may use torch, NumPy and random.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def targets(self) -> Tensor:
        """The attribute `targets` of the data set, as torchvision's have it."""
        found = getattr(self.dataset, "targets", None)
        return super().inputs if found is None else torch.as_tensor(found)

    def shuffled(
        self, size: int, *, seed: int, epoch: int, smallest: int, augment: Augment | None, workers: int
    ) -> Iterator[Batch]:
        order = shuffled_order(len(self), seed, epoch).tolist()
        kept = [part for part in _parts(order, size) if len(part) >= smallest]
        return self._read(kept, seed=seed, epoch=epoch, workers=workers)

    def steps(self, size: int, *, smallest: int) -> int:
        return _steps(len(self), size, smallest)

    def in_order(self, size: int, *, workers: int = 0) -> Iterator[Batch]:
        return self._read(_parts(range(len(self)), size), seed=0, epoch=-1, workers=workers)

    def take(self, indices: Sequence[int]) -> Batch:
        return next(self._read([list(map(int, indices))], seed=0, epoch=-1, workers=0))

    def numbers(self) -> Iterator[tuple[str, bytes]]:
        """The data set's own `digest()` if it has one, else some of its items, evenly spaced."""
        own = getattr(self.dataset, "digest", None)
        if own is not None:
            yield f"{len(self)}", str(own()).encode()
            return
        with suppress(InvalidArgumentError):  # targets that are not known
            yield "targets", _bytes(self.targets)
        count = min(_SAMPLED, len(self))
        inputs, targets = self.take([i * len(self) // count for i in range(count)])
        yield from ((f"{len(self)} {x.dtype} {tuple(x.shape)}", _bytes(x)) for x in (inputs, targets))

    def _read(self, batches: Sequence[Sequence[int]], *, seed: int, epoch: int, workers: int) -> Iterator[Batch]:
        with warnings.catch_warnings():  # more processes than cores: their number is the user's own choice
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: DataLoader[Any] = DataLoader(
                _Seeded(self.dataset, seed, epoch),
                batch_sampler=batches,  # type: ignore[arg-type]
                num_workers=workers,
                generator=Generator(),  # else an iteration would draw from the global generator, which dropout reads
                multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
            )
            return map(_pair, iter(loader))


class _Seeded(Dataset[Any]):
    """Reads each item with generators that depend on the seed, the epoch and its index alone."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch

    def __getitem__(self, index: int) -> Any:
        with seeded(derive_seed(self._seed, "item", self._epoch, index)):
            return self._dataset[index]


class LoaderSet(_Unloaded):
    """Batches of a DataLoader that a function of the user's makes, one for each epoch.

    The global generators are seeded wherever the loader draws from them: its order, its processes, and its
    augmentation are then those of the seed and the epoch.

    Args:
        make: takes the batch size and returns a DataLoader with a length.
    """

    def __init__(self, make: Callable[[int], DataLoader[Any]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(self._loader(1).dataset)  # type: ignore[arg-type]

    def shuffled(
        self, size: int, *, seed: int, epoch: int, smallest: int, augment: Augment | None, workers: int
    ) -> Iterator[Batch]:
        with seeded(derive_seed(seed, "loader", epoch)):
            batches = iter(self._loader(size))
        for number in range(self.steps(size, smallest=smallest)):
            with seeded(derive_seed(seed, "loader", epoch, number)):
                batch = _pair(next(batches))
            yield batch

    def steps(self, size: int, *, smallest: int) -> int:
        try:
            return len(self._loader(size))
        except TypeError as error:
            raise _unpaired(
                "a DataLoader without a length, which a schedule needs", "Give its data set a length."
            ) from error

    def in_order(self, size: int, *, workers: int = 0) -> Iterator[Batch]:
        raise _unpaired("a function for a split that is judged", "Give its data set, or a gonio.compare.Split.")

    def take(self, indices: Sequence[int]) -> Batch:
        """The first examples, as many as there are indices."""
        inputs, targets = next(
            self.shuffled(max(2, len(indices)), seed=0, epoch=0, smallest=1, augment=None, workers=0)
        )
        return inputs[: len(indices)], targets[: len(indices)]

    def numbers(self) -> Iterator[tuple[str, bytes]]:
        inputs, targets = self.take(range(2))
        yield from ((f"{len(self)} {x.dtype} {tuple(x.shape)}", _bytes(x)) for x in (inputs, targets))

    def _loader(self, size: int) -> DataLoader[Any]:
        loader = self._make(size)
        if not isinstance(loader, DataLoader):
            raise _unpaired(f"a function that returns a {type(loader).__name__}", "Return a torch DataLoader.")
        if loader.num_workers and loader.multiprocessing_context is None and sys.platform == "linux":
            loader.multiprocessing_context = "fork"  # other processes could not import the user's file by its name
        return loader


def examples_of(source: Any) -> Examples:
    """The examples of what a task was given.

    Raises:
        InvalidArgumentError: runs on it cannot be paired; says why.
    """
    if hasattr(source, "shuffled"):
        return source
    if isinstance(source, DataLoader):
        raise _unpaired("a DataLoader, whose batch size is fixed", "Give its data set, or a function that makes it.")
    if isinstance(source, IterableDataset):
        raise _unpaired(
            "an IterableDataset, which has no indices", "Give a function of the batch size that makes its DataLoader."
        )
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if len(source) == 0:
            raise _unpaired("an empty data set", "Check the task's data.")
        return ItemSet(source)
    if callable(source):
        return LoaderSet(source)
    raise _unpaired(f"a {type(source).__name__}", "Give a gonio.compare.Split, or a map-style data set.")


def _unpaired(found: str, do: str) -> InvalidArgumentError:
    needs = "a split is tensors, a map-style data set, or, for training, a function that makes a DataLoader"
    return InvalidArgumentError(needs, found, do)


def paired(examples: Examples, size: int, *, workers: int = 0) -> bool:
    """Whether two readings of the first batch with one seed are equal, as a paired comparison needs it."""
    first, again = (
        next(examples.shuffled(size, seed=0, epoch=0, smallest=1, augment=None, workers=workers)) for _ in range(2)
    )
    return all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def shuffled_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=generator(seed, "order", epoch))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU for the block, and restore their states after it."""
    python, legacy, state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (for user code that reads it)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed devices, and not restore them
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(state)


def _pair(item: Any) -> Batch:
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(x, Tensor) for x in item)):
        parts = item if isinstance(item, (tuple, list)) else [item]
        found = f"{len(parts)} of {', '.join(type(x).__name__ for x in parts)}"
        raise InvalidArgumentError(
            "an example is a pair of an input and a target, each a tensor or a number", found, "Convert them."
        )
    return item[0], item[1]


def _parts(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[at : at + size]) for at in range(0, len(order), size)]


def _steps(count: int, size: int, smallest: int) -> int:
    return count // size + (count % size >= max(smallest, 1))


def _bytes(x: Tensor) -> bytes:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).digest()
