"""A task: data in three splits, a loss, a metric, and how its baseline is trained; and tasks by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Generator, Tensor
from torch.nn import functional as F

from gonio.compare.planning.plan import AttackConfig, Training
from gonio.compare.tasks.data import Augment, Batch, Examples, examples_of, shuffled_order
from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.models.user_code import is_user_code, load_function
from gonio.seeding import generator

__all__ = ["ACCURACY", "Metric", "Split", "Task", "accuracy", "resolve"]


@dataclass(frozen=True)
class Split:
    """Examples and their targets, in memory.

    Shape:
        - ``inputs``: (N, ...); ``targets``: (N, ...).
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
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
        order = shuffled_order(len(self), seed, epoch)
        inputs, targets = self.take(order)  # type: ignore[arg-type]
        if augment is not None:
            inputs = augment(inputs, generator(seed, "augment", epoch))
        pairs = zip(inputs.split(size), targets.split(size), strict=True)
        return ((x, y) for x, y in pairs if len(y) >= smallest)

    def steps(self, size: int, *, smallest: int) -> int:
        """The number of batches of an epoch."""
        return len(self) // size + (len(self) % size >= max(smallest, 1))

    def in_order(self, size: int, *, workers: int = 0) -> Iterator[Batch]:
        """Every example once, in order."""
        return zip(self.inputs.split(size), self.targets.split(size), strict=True)

    def take(self, indices: Sequence[int]) -> Batch:
        """The examples with these indices."""
        return self.inputs[indices], self.targets[indices]

    def numbers(self) -> Iterator[tuple[str, bytes]]:
        """What the digest of the data covers: every number."""
        for x in (self.inputs, self.targets):
            yield f"{x.dtype} {tuple(x.shape)}", x.contiguous().numpy().tobytes()


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Percentage of rows whose largest output is at the target class.

    Shape:
        - ``outputs``: (N, K); ``targets``: (N,) integers.

    Example:
        >>> gonio.compare.accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        50.0
    """
    # an integer count, so that no summation order can change the last bit
    return 100.0 * int((outputs.argmax(1) == targets).sum()) / len(targets)


@dataclass(frozen=True)
class Metric:
    """The score of a run.

    Attributes:
        function: maps (outputs, targets) of a whole split to a number.
        direction: `max` if larger is better, else `min`.
        worst: the worst possible value, if there is one; the score of a diverged run.
    """

    name: str
    function: Callable[[Tensor, Tensor], float]
    direction: str = "max"
    unit: str = ""
    worst: float | None = None

    def __post_init__(self) -> None:
        if self.direction not in ("max", "min"):
            raise InvalidArgumentError(
                "a metric's direction must be 'max' or 'min'", repr(self.direction), "Use one of them."
            )


ACCURACY = Metric("accuracy", accuracy, "max", "%", 0.0)


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
    """

    name: str
    train: Examples
    validation: Examples
    test: Examples
    model: str
    sizes: Mapping[str, int]
    training: Training
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
        for name, source in self.splits.items():
            object.__setattr__(self, name, examples_of(source))
        if self.augment is not None and not isinstance(self.train, Split):
            raise InvalidArgumentError(
                "augment= takes all training inputs of an epoch as one tensor",
                "a training split that is not in memory",
                "Augment each item in the data set's __getitem__.",
            )

    @property
    def splits(self) -> Mapping[str, Examples]:
        """The three splits by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def outputs(self, model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """The model's outputs for inputs in their own unit, standardised if the task says so.

        Example:
            >>> from dataclasses import replace
            >>> task = replace(gonio.compare.tasks.digits(), standardize=((0.5,), (0.25,)))
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


# By name, and by the form of a name with an argument. The package fills them: tasks know this file, not it them.
BUILT_IN: dict[str, Callable[[], Task]] = {}
SOURCES: dict[str, Callable[[str], Task]] = {}


def resolve(spec: str) -> Task:
    """The task with a name.

    Args:
        spec: a built-in name; `torchvision:NAME` or `torchvision:NAME:FOLDER`, a data set of torchvision in
            FOLDER or in `data`; `imagefolder:FOLDER`;
            `fashion-mnist:FOLDER`; or `file.py:factory`, where the factory takes no arguments
            and returns a :class:`~gonio.compare.Task`.

    Raises:
        UnknownNameError: no such task; gives the closest names.
        InvalidArgumentError: the file, function or data are missing, or the factory returns no task.
        MissingExtraError: a package that the task needs is not installed.

    Example:
        >>> len(gonio.compare.tasks.resolve("digits").train)
        200
    """
    if is_user_code(spec):
        task = load_function(spec)()
        if not isinstance(task, Task):
            raise InvalidArgumentError(
                f"{spec!r} must build a task", f"a {type(task).__name__}", "Return a gonio.compare.Task."
            )
        return task
    source, _, rest = spec.partition(":")
    for form, make in SOURCES.items():
        if rest and form.startswith(f"{source}:"):
            return make(rest)
    if spec not in BUILT_IN:
        raise UnknownNameError("task", spec, [*BUILT_IN, *SOURCES, "file.py:factory"])
    return BUILT_IN[spec]()
