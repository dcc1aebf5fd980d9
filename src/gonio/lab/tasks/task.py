"""A task: the examples of its splits, a loss, a metric, and how its baseline is trained.

Examples are tensors in memory, a map-style data set, or loaders of the user's own. All recipes of one seed get the same
examples in the same order with the same augmentation. The order of tensors and of data sets is drawn here, and each
item of a data set is read with generators that depend on the seed, the epoch and its index alone, so the number of
loading processes changes nothing.
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gonio.errors import InvalidArgumentError, first_line, with_article
from gonio.escaping import shorten
from gonio.lab.plan import AttackConfig, TrainingConfig
from gonio.lab.tasks.metric import ACCURACY, Metric, is_finite
from gonio.seeding import derive_seed, generator, state_kept
from gonio.system import loader_context

Batch = tuple[Tensor, Tensor]
Augment = Callable[[Tensor, Generator], Tensor]
_RESIDENT = 0.05  # of a device's memory, for the examples of one run; several may share the device
_COMPARED = 8  # items of a data set that are compared with its attribute `targets`
_SAMPLED = 64  # items of a data set that its digest covers


# --- examples ------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Split:
    """Examples and their targets, in memory.

    Shape:
        - ``inputs``: (N, ...); ``targets``: (N, ...).

    Example:
        >>> len(gonio.lab.Split(torch.zeros(10, 3, 8, 8), torch.arange(10)))
        10
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        for x in (self.inputs, self.targets):
            if not isinstance(x, Tensor) or x.layout != torch.strided or x.requires_grad or x.ndim == 0:
                kind = with_article(type(x).__name__)
                found = f"{kind} that is {_unusual(x)}" if isinstance(x, Tensor) else kind
                do = "Convert it: torch.as_tensor(x), x.to_dense() or x.detach()."
                raise InvalidArgumentError("a split holds tensors with an axis of examples", found, do)
        if len(self.inputs) != len(self.targets) or len(self.inputs) == 0:
            raise InvalidArgumentError(
                "a split needs as many targets as inputs, and at least one",
                f"{len(self.inputs)} inputs and {len(self.targets)} targets",
                "Check the task's data.",
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def shuffled(
        self, size: int, *, seed: int, epoch: int, smallest: int, augment: Augment | None, workers: int
    ) -> Iterator[Batch]:
        """One epoch of training in batches of `size`; a last one with less than `smallest` examples is left out."""
        order = shuffled_order(len(self), seed, epoch).to(self.inputs.device)
        inputs, targets = self.take(order)  # type: ignore[arg-type]
        if augment is not None:
            inputs = augment(inputs, generator(seed, "augment", epoch))
            if not isinstance(inputs, Tensor) or len(inputs) != len(order):
                what = with_article(type(inputs).__name__)
                found = f"{what} of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else what
                needs = f"augment= returns the {len(order)} inputs of an epoch, changed"
                raise InvalidArgumentError(needs, found, "Correct the function.")
        pairs = zip(inputs.split(size), targets.split(size), strict=True)
        return ((x, y) for x, y in pairs if len(y) >= smallest)

    def steps(self, size: int, *, smallest: int) -> int:
        """The number of batches of an epoch."""
        return _steps(len(self), size, smallest)

    def in_order(self, size: int, *, workers: int = 0) -> Iterator[Batch]:
        """Every example once, in order."""
        return zip(self.inputs.split(size), self.targets.split(size), strict=True)

    def take(self, indices: Sequence[int]) -> Batch:
        """The examples with these indices."""
        return self.inputs[indices], self.targets[indices]

    def to(self, device: torch.device) -> Split:
        """The same examples on a device."""
        return Split(self.inputs.to(device), self.targets.to(device))

    def numbers(self) -> Iterator[tuple[str, bytes]]:
        """What the digest of the data covers: every number."""
        for x in (self.inputs, self.targets):
            yield f"{x.dtype} {tuple(x.shape)}", x.contiguous().numpy().tobytes()


def _unusual(x: Tensor) -> str:
    """What a split cannot hold of a tensor."""
    return "differentiable" if x.requires_grad else "sparse" if x.layout != torch.strided else "one number"


class _Unloaded:
    """What examples without tensors in memory say when they are asked for them."""

    @property
    def inputs(self) -> Tensor:
        raise InvalidArgumentError(
            "this needs the examples of a split as tensors in memory",
            "a data set or a loader, whose examples are read one by one",
            "Give the task a gonio.lab.Split.",
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
        """The attribute `targets` of the data set, as torchvision's have it, where it is what its items give.

        A `target_transform` changes the items alone.
        """
        try:
            found = torch.as_tensor(getattr(self.dataset, "targets", None))
        except (TypeError, ValueError, RuntimeError):  # there are none, or names of classes
            return super().inputs
        if found.ndim == 0 or len(found) != len(self):
            return super().inputs
        count = min(_COMPARED, len(self))
        some = [i * len(self) // count for i in range(count)]
        given = self.take(some)[1]
        return found if given.shape == found[some].shape and bool((given == found[some]).all()) else super().inputs

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
                collate_fn=_collated,
                generator=Generator(),  # else an iteration would draw from the global generator, which dropout reads
                multiprocessing_context=loader_context() if workers else None,
            )
            return iter(loader)


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
        self.steps(1, smallest=1)  # says what a data set without a length needs
        return len(self._loader(1).dataset)  # type: ignore[arg-type]

    def shuffled(
        self, size: int, *, seed: int, epoch: int, smallest: int, augment: Augment | None, workers: int
    ) -> Iterator[Batch]:
        with seeded(derive_seed(seed, "loader", epoch)):
            batches = iter(self._loader(size))
        for number in range(self.steps(size, smallest=smallest)):
            with seeded(derive_seed(seed, "loader", epoch, number)):
                batch = next(batches, None)
            if batch is None:
                raise _unpaired("a DataLoader with fewer batches than its length", "Give its data set a right length.")
            inputs, targets = _pair(batch)
            if len(targets) >= smallest:
                yield inputs, targets

    def steps(self, size: int, *, smallest: int) -> int:
        loader = self._loader(size)
        try:
            count = len(loader)
        except TypeError as error:
            raise _unpaired(
                "a DataLoader without a length, which a schedule needs", "Give its data set a length."
            ) from error
        if loader.batch_size is None or loader.drop_last or isinstance(loader.dataset, IterableDataset):
            return count
        last = len(loader.sampler) - loader.batch_size * (count - 1)  # type: ignore[arg-type]
        return count - (last < smallest)

    def in_order(self, size: int, *, workers: int = 0) -> Iterator[Batch]:
        raise _judged_by_a_function()

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
            raise _unpaired(
                f"a function that returns {with_article(type(loader).__name__)}", "Return a torch DataLoader."
            )
        if loader.num_workers and loader.multiprocessing_context is None:
            loader.multiprocessing_context = loader_context()
        return loader


def _same_there(augment: Augment, inputs: Tensor, device: torch.device) -> bool:
    """Whether an augmentation gives the same for inputs on a device, where its generator stays one of the CPU."""
    try:
        found = augment(inputs.to(device), generator(0, "augment", 0))
    except (RuntimeError, TypeError, ValueError):  # it mixes tensors of the CPU with its inputs, say
        return False
    return found.device.type == device.type and torch.equal(found.cpu(), augment(inputs, generator(0, "augment", 0)))


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
    if isinstance(source, (tuple, Mapping, str)):
        kind = with_article(type(source).__name__)
        raise _unpaired(kind, "Give one of its data sets, or gonio.lab.Split(inputs, targets).")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if len(source) == 0:
            raise _unpaired("an empty data set", "Check the task's data.")
        return ItemSet(source)
    if callable(source):
        return LoaderSet(source)
    raise _unpaired(with_article(type(source).__name__), "Give a gonio.lab.Split, or a map-style data set.")


def _unpaired(found: str, do: str) -> InvalidArgumentError:
    needs = "a split is tensors, a map-style data set, or, for training, a function that makes a DataLoader"
    return InvalidArgumentError(needs, found, do)


def _judged_by_a_function() -> InvalidArgumentError:
    return _unpaired("a function for a split that is judged", "Give its data set, or a gonio.lab.Split.")


def shuffled_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=generator(seed, "order", epoch))


def seed_everything(seed: int) -> None:
    """Seed the global generators, which user factories, dropout and the like read; gonio does not."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (for user code that reads it)


@contextmanager
def kept_generators(devices: Sequence[int] | None = None) -> Iterator[None]:
    """Restore the states of the global generators at the end of the block: of the CPU, and of all devices or these."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with state_kept(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU for the block, and restore their states after it."""
    with kept_generators(devices=()):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (for user code that reads it)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed devices
        yield


def _collated(items: list[Any]) -> Batch:
    """The items of a data set as one batch."""
    for item in items:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise _no_pair(item)
    try:
        return _pair(default_collate(items))
    except (TypeError, RuntimeError) as error:
        needs = "the inputs of a batch, and its targets, must be numbers, arrays or tensors of one shape and type"
        raise InvalidArgumentError(needs, first_line(error).rstrip("."), "Convert, crop or pad them.") from error


def _pair(item: Any) -> Batch:
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(x, Tensor) for x in item)):
        raise _no_pair(item)
    return item[0], item[1]


def _no_pair(item: Any) -> InvalidArgumentError:
    needs, do = "an example is a pair of an input and a target, each a tensor or a number", "Convert them."
    if isinstance(item, (tuple, list)):
        return InvalidArgumentError(needs, f"{len(item)} of {', '.join(type(x).__name__ for x in item)}", do)
    keys = f" with the keys {', '.join(map(repr, item))}" if isinstance(item, Mapping) else ""
    return InvalidArgumentError(needs, f"{with_article(type(item).__name__)}{keys}", do)


def _parts(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[at : at + size]) for at in range(0, len(order), size)]


def _steps(count: int, size: int, smallest: int) -> int:
    return count // size + (count % size >= max(smallest, 1))


def _bytes(x: Tensor) -> bytes:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).digest()


# --- what a task is -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data, loss and metric with which the models of a comparison are trained and judged.

    Attributes:
        train, validation, test: each a :class:`Split`, or a map-style data set of pairs (input, target), which is read
            item by item. For training also a function that takes the batch size and returns a DataLoader.
        model: name of the default model.
        sizes: `num_classes` and `in_channels`, passed to the model's factory where it takes them.
        training: the best known training of the baseline; `notes` should say how it was found.
        sesoi: smallest effect of interest, in the metric's unit.
        metrics: further metrics, which are shown and decide nothing.
        augment: maps (inputs, generator) to inputs of the same shape; called once per epoch on a training split in
            memory, with a generator that depends on seed and epoch alone. A data set augments its own items, with
            torch's, NumPy's or Python's global generator, which are seeded for each item.
        workers: processes that load the items of data sets in each run; they change no result.
        standardize: mean and standard deviation of each channel, applied in front of the model. The inputs
            themselves, and attacks on them, stay in their own unit.
        recipes: default built-in recipes of a study of this task; empty: one per method family, where it fits
            the model.
        threat: how `--robust` disturbs inputs; None for inputs that have no small disturbance, such as text.
        notes: remarks on the data and the training, printed with the results.

    Raises:
        InvalidArgumentError: a field of another kind, or examples whose runs cannot be paired.

    Example:
        >>> split = gonio.lab.Split(torch.randn(8, 1, 8, 8), torch.arange(8) % 2)
        >>> task = gonio.lab.Task(name="pairs", train=split, validation=split, test=split, model="digits_cnn",
        ...                       sesoi=0.5, sizes={"num_classes": 2, "in_channels": 1},
        ...                       training=gonio.lab.TrainingConfig(epochs=1, batch_size=4, lr=0.1))
        >>> len(task.train), task.metric.name
        (8, 'accuracy')
    """

    name: str
    train: Examples
    validation: Examples
    test: Examples
    model: str
    sizes: Mapping[str, int]
    training: TrainingConfig
    sesoi: float
    metric: Metric = ACCURACY
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    augment: Callable[[Tensor, Generator], Tensor] | None = None
    standardize: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    recipes: tuple[str, ...] = ()
    threat: AttackConfig | None = None
    notes: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    workers: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        object.__setattr__(self, "sesoi", float(self.sesoi))  # a number of NumPy cannot be stored in a plan
        self._check_metrics()
        for name, source in self.splits.items():
            object.__setattr__(self, name, made := examples_of(source))
            if name != "train" and isinstance(made, LoaderSet):
                raise _judged_by_a_function()
        if self.augment is not None and not isinstance(self.train, Split):
            raise InvalidArgumentError(
                "augment= takes all training inputs of an epoch as one tensor",
                "a training split that is not in memory",
                "Augment each item in the data set's __getitem__.",
            )

    def _check_metrics(self) -> None:
        listed = [self.metric, *self.metrics]
        if other := next((each for each in listed if not isinstance(each, Metric)), None):
            needs = "a task is judged by a gonio.lab.tasks.Metric"
            do = "Write Metric('name', function, 'max'), or 'min' where less is better."
            raise InvalidArgumentError(needs, with_article(type(other).__name__), do)
        names = [each.name for each in listed]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidArgumentError("each metric of a task needs its own name", f"{twice!r} twice", "Rename one.")

    @property
    def splits(self) -> Mapping[str, Examples]:
        """The three splits by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def on(self, device: torch.device) -> Task:
        """The task with the training and validation examples on a device, if they fit and batches stay the same there.

        They are batches of the CPU, which are then copied step by step, where a split is not in memory, takes more
        than a share of the device's memory, or where `augment` does not give the same on the device.
        """
        if device.type == "cpu" or not isinstance(self.train, Split) or not isinstance(self.validation, Split):
            return self
        size = sum(x.nbytes for split in (self.train, self.validation) for x in (split.inputs, split.targets))
        if device.type == "cuda" and size > _RESIDENT * torch.cuda.get_device_properties(device).total_memory:
            return self
        if self.augment is not None and not _same_there(
            self.augment, self.train.take(range(min(2, len(self.train))))[0], device
        ):
            return self
        return replace(self, train=self.train.to(device), validation=self.validation.to(device))

    def outputs(self, model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """The model's outputs for inputs in their own unit, standardised if the task says so.

        Example:
            >>> from dataclasses import replace
            >>> task = replace(gonio.lab.tasks.digits(), standardize=((0.5,), (0.25,)))
            >>> task.outputs(nn.Identity(), torch.ones(1, 1, 1, 1)).item()
            2.0
        """
        if self.standardize is None:
            return model(inputs)
        shape = (1, -1, *(1,) * (inputs.ndim - 2))
        mean, std = (inputs.new_tensor(values).view(shape) for values in self.standardize)
        return model((inputs - mean) / std)

    def digest(self) -> str:
        """SHA-256 over every number of the splits in memory, and over a sample of the items of data sets."""
        sha = hashlib.sha256()
        for name, split in self.splits.items():
            for description, content in split.numbers():
                sha.update(f"{name} {description}".encode())
                sha.update(content)
        return sha.hexdigest()


def _check_fields(task: Task) -> None:
    """Refuse values of another kind, which would fail later in words of Python, or pass as something else."""
    words = (tuple, list)
    kinds: dict[str, tuple[str, bool]] = {
        "name": ("text", isinstance(task.name, str)),
        "model": ("the name of a model, such as 'file.py:function'", isinstance(task.model, str)),
        "sizes": ("a mapping of num_classes and in_channels to whole numbers", _sizes(task.sizes)),
        "training": ("a gonio.lab.TrainingConfig", isinstance(task.training, TrainingConfig)),
        "sesoi": ("a positive number", is_finite(task.sesoi) and task.sesoi > 0),
        "loss": ("a function of outputs and targets", callable(task.loss)),
        "metrics": ("a tuple of metrics", isinstance(task.metrics, words)),
        "notes": ("a tuple of sentences", isinstance(task.notes, words) and _texts(task.notes)),
        "recipes": ("a tuple of names of recipes", isinstance(task.recipes, words) and _texts(task.recipes)),
        "workers": ("0 or a positive whole number", type(task.workers) is int and task.workers >= 0),
        "threat": ("a gonio.lab.AttackConfig", task.threat is None or isinstance(task.threat, AttackConfig)),
    }
    for name, (what, holds) in kinds.items():
        if not holds:
            found = shorten(repr(getattr(task, name)), longest=80)
            raise InvalidArgumentError(f"Task({name}=) is {what}", found, "Correct it.")
    for values, least in zip(task.standardize or (), (-math.inf, 0.0), strict=False):
        if not all(least < value < math.inf for value in np.ravel(values)):
            needs = "Task(standardize=) is the mean of each channel and its standard deviation, which is above 0"
            raise InvalidArgumentError(needs, f"{task.standardize!r:.80}", "Leave out constant channels.")


def _texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _sizes(values: object) -> bool:
    known = ("num_classes", "in_channels")
    return isinstance(values, Mapping) and all(
        key in known and isinstance(value, Integral) for key, value in values.items()
    )
